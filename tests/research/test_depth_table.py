"""The tables behind docs/depth.md are those that docs/results makes, to the byte."""

from research import DOCS
from research.tables import depth_table as tool


def test_pages_are_in_step():
    texts = {}
    for page, parts in tool.tables(DOCS).items():
        texts[page.parent.name] = text = page.read_text(encoding="utf-8")
        assert tool.with_tables(text, parts) == text, f"{page}: run: make results"
    assert set(texts) == {"depth", "demo-seeds", "recall", "iterate", "demo-every", "two-blocks"}
    assert "| flat, noise 0.3 | 28 of 30 | 0.004: 10 of 10, " in texts["depth"]
    assert "| flat, noise 0.3 | 0.004 | 10 of 10 |" in texts["depth"]
