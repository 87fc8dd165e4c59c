"""The tables behind docs/depth.md are those that docs/results makes, to the byte."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_pages_are_in_step():
    spec = importlib.util.spec_from_file_location("depth_table", ROOT / "tools" / "depth_table.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    texts = {}
    for page, parts in tool.tables(ROOT / "docs").items():
        texts[page.parent.name] = text = page.read_text(encoding="utf-8")
        assert tool.with_tables(text, parts) == text, f"{page}: run: make results"
    assert set(texts) == {"depth", "demo-seeds", "recall", "iterate", "demo-every", "two-blocks"}
    assert "| flat, noise 0.3 | 28 of 30 | 0.004: 10 of 10, " in texts["depth"]
    assert "| flat, noise 0.3 | 0.004 | 10 of 10 |" in texts["depth"]
