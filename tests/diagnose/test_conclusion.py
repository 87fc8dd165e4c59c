"""The conclusion of a diagnosis: the guard's verdict, and the last step beside its prediction."""

import math

import pytest

from deeploop.diagnose.collapse import judge
from deeploop.diagnose.conclusion import conclude

FLOOR = 3.3
DIFFER = "token states differ (similarity 0.13, below 0.95)"
ONE = "token states are nearly one (similarity 0.99, not below 0.95)"


def concluded(similarity=0.13, loss=None, **more):
    record = {"audit": [], "similarity": similarity, "step": 500, **more}
    return conclude(record, None if loss is None else {"loss": loss, "floor": FLOOR, "step": 400})


@pytest.mark.parametrize(
    ("similarity", "loss", "said"),
    [
        (0.13, 2.1, f"Not collapsed: {DIFFER}, and the loss, 2.100 at step 400, is below the unigram floor"),
        (0.99, 3.3, f"Collapsed: {ONE}, and the loss, 3.300 at step 400, is not 0.1 nats below the unigram"),
        (0.13, 3.3, f"Undecided: {DIFFER}, but the loss, 3.300 at step 400, is not 0.1 nats below"),
        (
            0.99,
            2.1,
            f"Undecided: {ONE}, but the loss, 2.100 at step 400, is below the unigram floor of 3.300.",
        ),
        (math.nan, 3.3, "Collapsed: token states are not finite, and the loss"),
        (0.13, None, "Token states differ (similarity 0.13, below 0.95); there is no validation"),
        (0.99, None, "Token states are nearly one (similarity 0.99, not below 0.95); there is no validation"),
    ],
)
def test_whether_it_has_collapsed_is_said_by_the_guards_rule(similarity, loss, said):
    assert concluded(similarity, loss).startswith(said)


@pytest.mark.parametrize(
    ("error", "step", "ending"),
    [
        (0.03, 500, "off by 3.0%: the first-order theory describes it."),
        (0.34, 500, "off by 34.0%: more than 15%, as at 2 of the 176 steps"),
        (0.34, 9, "off by 34.0%."),  # the 176 are from the tenth on
    ],
)
def test_a_step_is_judged_by_its_linear_prediction(error, step, ending):
    text = concluded(step=step, step_effect={"measured": 0.0653, "error": error})
    assert "The last step changed the output by 0.065 of its norm, and its linear prediction is " in text
    assert ending in text
    assert "last step" not in concluded()


def test_a_collapsed_run_is_told_where_to_read_on():
    assert concluded(0.99, 3.3).endswith("(what to change: docs/training.md#when-it-says-collapsed).")
    assert "what to change" not in concluded(0.99, 2.1)


def test_faults_of_the_loop_come_first():
    text = concluded(audit=["WRONG α of blocks.0.mlp"])
    assert text.startswith("The audit found 1 fault: see WRONG below. Token states")
    assert concluded(audit=["WRONG a", "WRONG b"]).startswith("The audit found 2 faults")


@pytest.mark.parametrize("similarity", [0.1, 0.949, 0.951, 1.0])
@pytest.mark.parametrize("loss", [3.19, 3.21, 4.0])
def test_its_first_word_is_the_guards(similarity, loss):
    first = {"escaped": "Not collapsed:", "collapsed": "Collapsed:", "undecided": "Undecided:"}
    assert concluded(similarity, loss).startswith(first[judge(loss, FLOOR, similarity)])
