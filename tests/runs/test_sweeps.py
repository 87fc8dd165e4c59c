"""The reader of sweep.json: whole, old, damaged."""

import json

import pytest

from deeploop.runs.sweeps import RecordedCell, read_sweep
from run_folders import write_sweep


def test_what_a_sweep_records(tmp_path):
    more = {
        "compare_at": 20,
        "jobs": 3,
        "command": ["deeploop", "sweep", "a b"],
        "written": "2026-11-15T21:49",
    }
    record = read_sweep(write_sweep(tmp_path, {"p0.5": {"p": 0.5}}, **more))
    # As of 0.2.0, whose recipes had no bias.
    assert record.cells == {"p0.5": RecordedCell("tiny", {"model.unigram_bias": False}, {"p": 0.5})}
    assert (record.sweep, record.scale, record.compare_at, record.jobs) == ("s", "own", 20, 3)
    assert (record.command, record.day) == ("deeploop sweep 'a b'", "2026-11-15")


@pytest.mark.parametrize(("words", "jobs"), [(["--jobs", "4"], 4), (["--jobs=2"], 2), ([], 1), (None, 1)])
def test_before_jobs_was_a_field_the_command_tells(tmp_path, words, jobs):
    assert read_sweep(write_sweep(tmp_path, {}, command=words)).jobs == jobs


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "format 2, this deeploop reads 1"),
        ({"cells": {"a": {"recipe": "tiny", "axes": {}}}}, "it has no 'settings'"),
        ({"cells": [1]}, "list"),
        ({"jobs": "many"}, "many"),
    ],
)
def test_a_damaged_one_is_named(tmp_path, change, why):
    path = write_sweep(tmp_path, {}) / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"sweep\.json: not a sweep's \(.*{why}"):
        read_sweep(tmp_path)


def test_none_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_sweep(tmp_path)
