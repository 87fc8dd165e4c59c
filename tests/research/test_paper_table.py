"""The tables of docs/paper.md and docs/results/measured.md quote numbers from files."""

import json

import pytest

from research.tables import paper as tool


def test_every_row_is_quoted_from_files(tmp_path):
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
        "published": {"published": "LOSS", "key": ["small", "deeploop", 3]},
    }
    paper = [{"order": 1, "what": "l", "theirs": "{published:.4f}", "ours": "{loss:.1f}", "verdict": "v"}]
    entry = {"order": 1, "what": "w", "result": "{loss:.2f} at {rate:.0f} K", "values": values}
    (folder / "results.json").write_text(json.dumps(entry))
    assert tool.measured(tmp_path).splitlines()[2:] == ["| w | 1.23 at 3 K | [mine](mine) |"]
    assert len(tool.beside(tmp_path).splitlines()) == 2  # it has nothing of the paper
    (folder / "results.json").write_text(json.dumps(entry | {"paper": paper}))
    assert tool.beside(tmp_path).splitlines()[2:] == ["| l | 2.7917 | 1.2 | v | [mine](results/mine) |"]
    values["loss"]["field"] = "gain"
    (folder / "results.json").write_text(json.dumps(entry))
    with pytest.raises(ValueError, match="no validation line has gain"):
        tool.measured(tmp_path)


def test_numbers_over_run_folders(tmp_path):
    for name, loss, verdict in (("a-0", 2.0, "escaped"), ("a-1", 3.0, "collapsed"), ("b-0", 9.0, "escaped")):
        (tmp_path / name).mkdir()
        lines = [{"kind": "validation", "step": 0, "loss": 99.0, "verdict": "undecided"},
                 {"kind": "validation", "step": 4, "loss": loss, "verdict": verdict}]  # fmt: skip
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tool.value(tmp_path, {"escaped_runs": "a-*"}) == 1
    assert tool.value(tmp_path, {"mean_loss": "*"}) == 5.5
    assert tool.value(tmp_path, {"mean": "loss", "of": "a-*", "times": 100}) == 250
    assert tool.value(tmp_path, {"minus": [{"mean_loss": "b-*"}, {"mean_loss": "a-*"}]}) == 7
    with pytest.raises(ValueError, match=r"no run is named c-\*"):
        tool.value(tmp_path, {"mean_loss": "c-*"})
    (tmp_path / "c-0").mkdir()
    with pytest.raises(ValueError, match="c-0: its last validation has no loss"):
        tool.value(tmp_path, {"escaped_runs": "c-*"})
