"""When a run is over: by its last validation alone."""

import pytest

from deeploop.report.endings import ending, outcome


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
