"""The collapse of DeepNorm's exponent: the record that comes with the package, its table and figure.

assets/collapse.json is the collapse.json that `deeploop demo --collapse` wrote, seed 0. No torch.
"""

from pathlib import Path
from typing import Any

import deeploop
from deeploop.files import read_object
from deeploop.report import plots

FILE = Path(deeploop.__file__).parent / "assets" / "collapse.json"
HEADER = ("block", "R", "N", "alpha", "beta", "loss", "floor - loss", "token sim.", "outcome")
OUTCOMES = {"escaped": "trains", "collapsed": "COLLAPSED", "undecided": "undecided"}

Record = dict[str, Any]


def read() -> Record:
    """The shipped record."""
    record = read_object(FILE)
    return {**record, "source": f"a record that comes with the package, seed {record['seed']}"}


def table_rows(record: Record) -> list[tuple[str, ...]]:
    return [_row(run, run["validations"][-1]) for run in record["runs"]]


def _row(run: Record, last: Record) -> tuple[str, ...]:
    scaled = "alpha" in run
    return (
        run["method"],
        str(run["rounds"]),
        str(run["depth"]),
        f"{run['alpha']:.3f}" if scaled else "–",
        f"{run['beta']:.4f}" if scaled else "–",
        f"{last['loss']:.3f}",
        f"{last['floor'] - last['loss']:+.3f}",
        f"{last['similarity']:.2f}",
        OUTCOMES[last["verdict"]],
    )


def looped(record: Record) -> int:
    """The looped depth R that stands beside R = 1."""
    rounds: int = max(run["rounds"] for run in record["runs"])
    return rounds


def floor(record: Record) -> float:
    """The unigram floor, the same for all runs."""
    value: float = record["runs"][0]["validations"][-1]["floor"]
    return value


def verdict(record: Record) -> str:
    """What happened at the looped depth, whatever it is: the two exponents, and the smaller with the bias."""
    if record["quick"]:
        return "A quick look of a few steps, from which nothing follows."
    rounds = looped(record)
    looped_runs = (run for run in record["runs"] if run["rounds"] == rounds)
    ends = {run["method"]: run["validations"][-1]["verdict"] for run in looped_runs}
    return f"At R = {rounds} {_of_exponents(ends)} {_of_bias(ends)}"


def _of_exponents(ends: dict[str, str]) -> str:
    small, large = ends["DeepNorm p=1/4"], ends["DeepLoop p=1/2"]
    match small, large:
        case "collapsed", "escaped":
            return "the exponent decides: p = 1/4 ends with all positions in one state, p = 1/2 trains."
        case "escaped", "escaped":
            return "both exponents train with this seed; the ramp spared p = 1/4 too."
        case "collapsed", "collapsed":
            return "both exponents collapse with this seed; a slower ramp is what to try."
        case "escaped", "collapsed":
            return "p = 1/4 trains and p = 1/2 collapses with this seed: not what the bound predicts."
    return f"with this seed: p = 1/4 {OUTCOMES[small]}; p = 1/2 {OUTCOMES[large]}."


def _of_bias(ends: dict[str, str]) -> str:
    helped = ends["DeepNorm p=1/4, unigram bias"]
    said = {"escaped": "trains", "collapsed": "collapses as well"}.get(helped, "is undecided")
    return f"With an output bias that starts at the unigram frequencies p = 1/4 {said}."


def draw(record: Record) -> plots.Figure:
    depths = sorted({run["rounds"] for run in record["runs"]})
    own = plots.colours(dict.fromkeys(run["method"] for run in record["runs"]))
    panels = [
        (
            f"R = {rounds}" + (" (no block is revisited)" if rounds == 1 else " (looped)"),
            [_curve(run, own[run["method"]]) for run in record["runs"] if run["rounds"] == rounds],
        )
        for rounds in depths
    ]
    return plots.loss_and_similarity(panels, floor(record))


def _curve(run: Record, colour: str) -> plots.Curve:
    return plots.Curve(
        run["method"],
        colour,
        [(step, loss) for step, loss in run["train"]],
        [(line["step"], line["similarity"]) for line in run["validations"]],
    )
