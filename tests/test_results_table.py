"""README's table of results is the one that docs/results makes."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("results_table", ROOT / "tools" / "results_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_in_step(tool):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tool.renewed(text, ROOT / "docs" / "results") == text, "run: make results"


def test_every_row_is_quoted_from_files(tool, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [
        {"kind": "train", "step": i, "loss": 9.0, "rate": rate} for i, rate in enumerate((1000, 5000, 3000))
    ]
    lines.append({"kind": "validation", "step": 3, "loss": 1.23456})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {
        "loss": {"last": "validation", "field": "loss"},
        "rate": {"median": "train", "field": "rate", "times": 1e-3},
    }
    entry = {"order": 1, "what": "w", "result": "{loss:.2f} at {rate:.0f} K", "values": values}
    (folder / "results.json").write_text(json.dumps(entry))
    assert (
        tool.table(tmp_path).splitlines()[-1]
        == "| w | 1.23 at 3 K | [docs/results/mine](docs/results/mine) |"
    )
    before = f"a\n{tool.BEGIN}\nold\n{tool.END}\nb\n"
    assert tool.renewed(before, tmp_path) == f"a\n{tool.BEGIN}\n{tool.table(tmp_path)}\n{tool.END}\nb\n"
    with pytest.raises(ValueError, match="lacks the markers"):
        tool.renewed("no markers", tmp_path)
    values["loss"]["field"] = "gain"
    (folder / "results.json").write_text(json.dumps(entry))
    with pytest.raises(ValueError, match="no validation line has gain"):
        tool.table(tmp_path)


def test_numbers_over_run_folders(tool, tmp_path):
    for name, loss, verdict in (("a-0", 2.0, "escaped"), ("a-1", 3.0, "collapsed"), ("b-0", 9.0, "escaped")):
        (tmp_path / name).mkdir()
        lines = [{"kind": "validation", "step": 0, "loss": 99.0, "verdict": "undecided"},
                 {"kind": "validation", "step": 4, "loss": loss, "verdict": verdict}]  # fmt: skip
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tool.value(tmp_path, {"escaped_runs": "a-*"}) == 1
    assert tool.value(tmp_path, {"runs": "a-*"}) == 2
    assert tool.value(tmp_path, {"mean_loss": "*"}) == 5.5
    with pytest.raises(ValueError, match=r"no run is named c-\*"):
        tool.value(tmp_path, {"mean_loss": "c-*"})
    (tmp_path / "c-0").mkdir()
    with pytest.raises(ValueError, match="c-0: its last validation has no loss"):
        tool.value(tmp_path, {"runs": "c-*"})
