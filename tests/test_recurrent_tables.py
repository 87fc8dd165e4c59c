"""The tables of docs/results/recurrent are those that docs/results makes, to the byte."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_page_is_in_step():
    spec = importlib.util.spec_from_file_location("recurrent_tables", ROOT / "tools" / "recurrent_tables.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = (ROOT / "docs" / "results" / "recurrent" / "README.md").read_text(encoding="utf-8")
    assert tool.make(text, ROOT / "docs" / "results" / "recurrent") == text, "run: make results"
