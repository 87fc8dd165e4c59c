"""When a run is over, by its last validation alone; and where it stands, by its files."""

import json

import pytest

from deeploop.files import lock_folder
from deeploop.runs.endings import ending, exit_file, log_file, outcome, run_state


@pytest.mark.parametrize(
    ("step", "verdict", "stops", "expected"),
    [
        (100, "escaped", False, "finished"),
        (100, "collapsed", True, "finished"),  # at the last step nothing was cut off
        (40, "collapsed", True, "collapsed"),
        (40, "collapsed", False, None),  # only a warning
        (40, "escaped", True, None),
        (20, "collapsed", True, None),  # in warm-up the guard waits
    ],
)
def test_how_a_run_ended(step, verdict, stops, expected):
    validation = {"step": step, "verdict": verdict}
    assert ending(validation, steps=100, since=30, stops=stops) == expected


def test_a_run_that_was_never_validated_has_not_ended():
    assert ending({}, steps=0, since=0, stops=True) is None
    assert ending({"step": 5}, steps=None, since=0, stops=True) is None


def test_what_it_came_to():
    assert outcome({"verdict": "escaped"}) == "escaped"
    assert outcome({"exact": 0.842}) == "84.2% exact"
    assert outcome({"exact": 0.0}) == "0.0% exact"
    assert outcome({}) is None


def write(path, text="{}"):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


SAYS_ERROR = "$ deeploop train\ndeeploop train: error: no space left\n"


@pytest.mark.parametrize(
    ("over", "left", "noted", "log", "state"),
    [
        (None, False, None, None, "started"),
        ("finished", False, None, None, "finished"),
        ("collapsed", False, None, None, "collapsed"),
        ("finished", True, None, None, "started"),  # its weights or its scores are missing
        ("finished", True, {"code": 2, "failed": True}, None, "failed"),
        ("finished", False, {"code": 2, "failed": True}, None, "finished"),
        (None, False, {"code": 1, "failed": True}, "no word of it", "failed"),
        (None, False, {"code": 0, "failed": False}, SAYS_ERROR, "started"),  # the exit code decides
        (None, False, {"code": 1, "failed": False}, None, "started"),  # asked to stop
        (None, False, None, SAYS_ERROR, "failed"),  # a folder of before codes were kept
        (None, False, None, SAYS_ERROR + "$ deeploop train\n", "started"),
    ],
)
def test_where_a_run_stands(tmp_path, over, left, noted, log, state):
    run = tmp_path / "p0.25"
    write(run / "run.json")
    if noted is not None:
        write(exit_file(run), json.dumps(noted))
    if log is not None:
        write(log_file(run), log)
    assert run_state(run, over, left=left) == state


def test_a_retrofits_start_is_untrained_and_its_healing_is_not(tmp_path):
    run = tmp_path / "run"
    write(run / "run.json", json.dumps({"retrofit": {"core": "2-3"}}))
    assert run_state(run, None) == "untrained"
    write(run / "metrics.jsonl", "")
    assert run_state(run, None) == "started"


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        ({"how": "stopped", "step": 7}, "stopped"),
        ({"how": "finished", "step": 7}, "started"),  # and was then asked for more steps, and killed
        ({"how": "stopped", "step": "7"}, "started"),
        (None, "started"),
    ],
)
def test_a_stopped_run_says_so(tmp_path, ended, state):
    write(tmp_path / "run" / "run.json", json.dumps({"ended": ended}))
    assert run_state(tmp_path / "run", None) == state


def test_a_run_without_a_folder(tmp_path):
    run = tmp_path / "p0.25"
    assert run_state(run, None) == "absent"
    write(exit_file(run), json.dumps({"code": 2, "failed": True}))
    assert run_state(run, None) == "failed"
    exit_file(run).write_text("cut o")
    assert run_state(run, None) == "absent"


def test_a_run_that_is_written_is_running(tmp_path):
    write(tmp_path / "run" / "run.json")
    with lock_folder(tmp_path / "run"):
        assert run_state(tmp_path / "run", "finished") == "running"
    assert run_state(tmp_path / "run", "finished") == "finished"
