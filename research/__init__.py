"""Studies behind docs/results: analyses, tables of the pages, experiments. From a clone; not in the wheel."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
