"""The tables of docs/results/recurrent are those that docs/results makes, to the byte."""

from research import RESULTS
from research.tables import recurrent_tables


def test_page_is_in_step():
    text = (RESULTS / "recurrent" / "README.md").read_text(encoding="utf-8")
    assert recurrent_tables.make(text, RESULTS / "recurrent") == text, "run: make results"
