"""The tables of docs/depth.md are those that docs/results makes, to the byte."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_page_is_in_step():
    spec = importlib.util.spec_from_file_location("depth_table", ROOT / "tools" / "depth_table.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    results = ROOT / "docs" / "results"
    page = (ROOT / "docs" / "depth.md").read_text(encoding="utf-8")
    assert tool.make(page, results) == page, "run: make results"
    assert "| flat, noise 0.3 | 28 of 30 | 0.004: 10 of 10, " in page
    study = (results / "depth" / "README.md").read_text(encoding="utf-8")
    assert tool.make_study(study, results) == study, "run: make results"
    assert "| flat, noise 0.3 | 0.004 | 10 of 10 |" in study
