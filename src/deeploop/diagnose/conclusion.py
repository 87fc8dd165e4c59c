"""Summarize a diagnosis in a few sentences, by the thresholds of docs/alignment.md and of the guard."""

import math
from collections.abc import Mapping
from typing import Any

from deeploop.diagnose.collapse import LOSS_MARGIN, SIMILARITY_LIMIT, Verdict, judge

# Two of 176 steps in docs/alignment.md, from the tenth on, had a larger error of the linear prediction.
USUAL_ERROR = 0.15
FIRST_COMPARED = 10
VERDICTS: dict[Verdict, str] = {
    "escaped": "Not collapsed",
    "collapsed": "Collapsed",
    "undecided": "Undecided",
}


def conclude(record: Mapping[str, Any], validation: Mapping[str, Any] | None) -> str:
    """Two or three sentences; `validation` is the last one up to the record's step, if any."""
    sentences = [on_collapse(record["similarity"], validation)]
    if wrong := len(record["audit"]):
        sentences.insert(0, f"The audit found {wrong} fault{'s' * (wrong > 1)}: see WRONG below.")
    if effect := record.get("step_effect"):
        sentences.append(on_step(effect, record["step"]))
    return " ".join(sentences)


def on_collapse(similarity: float, validation: Mapping[str, Any] | None) -> str:
    """Apply the guard's rule to the probe's similarity and the last validation."""
    differ = similarity < SIMILARITY_LIMIT
    if math.isnan(similarity):
        states = "token states are not finite"
    elif differ:
        states = f"token states differ (similarity {similarity:.2f}, below {SIMILARITY_LIMIT})"
    else:
        states = f"token states are nearly one (similarity {similarity:.2f}, not below {SIMILARITY_LIMIT})"
    if validation is None:
        return f"{states.capitalize()}; there is no validation to compare with the unigram floor."
    loss, floor = validation["loss"], validation["floor"]
    below = loss < floor - LOSS_MARGIN
    place = "below" if below else f"not {LOSS_MARGIN} nats below"
    joint = "and" if differ == below else "but"
    validated = (
        f"the loss, {loss:.3f} at step {validation['step']}, is {place} the unigram floor of {floor:.3f}"
    )
    verdict = judge(loss, floor, similarity)
    advice = " (what to change: docs/training.md#when-it-says-collapsed)" if verdict == "collapsed" else ""
    return f"{VERDICTS[verdict]}: {states}, {joint} {validated}{advice}."


def on_step(effect: Mapping[str, Any], step: int) -> str:
    """Compare the effect of the last step with its linear prediction."""
    text = f"The last step changed the output by {effect['measured']:.2g} of its norm"
    text += f", and its linear prediction is off by {effect['error']:.1%}"
    if step < FIRST_COMPARED:
        return f"{text}."
    if effect["error"] <= USUAL_ERROR:
        return f"{text}: the first-order theory describes it."
    return (
        f"{text}: more than {USUAL_ERROR:.0%}, as at 2 of the 176 steps in our runs, in a collapse and in a "
        "recovery (docs/alignment.md)."
    )
