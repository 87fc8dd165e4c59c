"""Which runs escape the unigram floor, counted two ways, with intervals; from run folders, without torch.

The paper's way (Appendix C): a seed escapes if any validation of any of its attempts is below the floor.
The strict way: a validation more than 0.1 nats below the floor at a token similarity below 0.95, which is
the verdict `escaped` in the metrics. A model that has all but collapsed can stand below the floor by a hair.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from deeploop.files import parse_json, read_object
from deeploop.report.tables import text_table
from deeploop.runs.endings import ending
from deeploop.runs.packed import opened
from deeploop.runs.sweeps import read_sweep
from deeploop.train.metrics import Record, read_metrics

TRAILING_STEPS = 50  # of the surrogate: the paper's "trailing-50-iter mean train loss"
ATTEMPTS = (
    "metrics.previous.jsonl",
    "metrics.jsonl",
)  # an earlier start that left no checkpoint, and the last


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run."""

    axes: Mapping[str, Any]
    below_floor: bool
    """By the paper's rule."""
    escaped: bool
    """By the strict rule."""
    ended: bool
    """It went to its last step, or was stopped for being collapsed; else it may yet escape."""
    loss: float | None
    """Validation loss at the step of comparison, or its surrogate."""
    surrogate: bool
    """`loss` is the mean training loss of the last 50 steps, for want of that validation."""

    @property
    def decided(self) -> bool:
        return self.ended or self.escaped


@dataclass(frozen=True)
class Count:
    """Escapes among the seeds of one corner of a grid."""

    axes: Mapping[str, Any]
    seeds: int
    """Seeds whose outcome is known."""
    below_floor: int
    below_floor_interval: tuple[float, float]
    escaped: int
    escaped_interval: tuple[float, float]
    mean_loss: float | None
    """Mean over the seeds that escaped, strictly."""
    surrogates: int
    """How many of these losses are surrogates."""
    cut_off: int
    """Seeds that were cut off before they escaped."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share: in [0, 1], around the share, and with a width also at 0 and all."""
    if not 0 <= successes <= trials:
        raise ValueError(f"successes={successes}: must be between 0 and trials={trials}")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, weight = successes / trials, z * z / trials
    centre = share + weight / 2
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    low, high = (centre - half) / (1 + weight), (centre + half) / (1 + weight)
    # At 0 and at all, rounding may leave the share itself outside.
    return min(share, max(0.0, low)), max(share, min(1.0, high))


def read_outcome(run: Path, axes: Mapping[str, Any], compare_at: int | None = None) -> Outcome | None:
    """The outcome of a run folder, all attempts pooled; None if nothing was trained, or has no such floor."""
    run = opened(run)
    try:
        config = read_object(run / "config.json")
        steps, warm = (int(config["optim"][name]) for name in ("steps", "warmup_steps"))
        stops = bool(config.get("guard", {}).get("stop", False))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # damaged: `deeploop runs` names it
        return None
    attempts = [read_metrics(run, file=name) for name in ATTEMPTS]
    records = attempts[-1]
    validations = [r for attempt in attempts for r in attempt if r["kind"] == "validation" and r.get("floor")]
    trained = [r for r in validations if r["step"] > 0 and r.get("loss") is not None]
    if not validations or not any(r["step"] > 0 for r in records):
        return None
    loss, surrogate = loss_at(records, compare_at or steps)
    below = any(r["loss"] < r["floor"] for r in trained)
    if not trained and loss is not None:  # only the surrogate can tell
        below = loss < validations[0]["floor"]
    last = next((r for r in reversed(records) if r["kind"] == "validation"), {})
    over = ending(last, steps=steps, since=warm, stops=stops) is not None
    return Outcome(
        axes,
        below,
        any(r.get("verdict") == "escaped" for r in trained),
        over or records[-1]["step"] >= steps,
        loss,
        surrogate,
    )


def loss_at(records: Sequence[Record], step: int) -> tuple[float | None, bool]:
    """Validation loss at a step; a run that has none there gives the mean of its last training losses."""
    for record in records:
        if record["kind"] == "validation" and record["step"] == step:
            return record.get("loss"), False
    losses = [(r["step"], r["loss"]) for r in records if r["kind"] == "train" and r.get("loss") is not None]
    recent = [loss for at, loss in losses if at > losses[-1][0] - TRAILING_STEPS]
    return (fmean(recent) if recent else None), True


def count(sweep: Path, *, compare_at: int | None = None) -> list[Count]:
    """Escapes of a sweep folder, over seeds, for every combination of its other axes that was run."""
    cells = read_sweep(sweep).cells
    outcomes = [read_outcome(sweep / name, cell.axes, compare_at) for name, cell in cells.items()]
    return tally([outcome for outcome in outcomes if outcome is not None])


def tally(outcomes: Sequence[Outcome]) -> list[Count]:
    """Count over the axis `seed`; several outcomes of one seed are attempts, of which any may escape."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        key = json.dumps({k: v for k, v in outcome.axes.items() if k != "seed"})
        groups.setdefault(key, []).append(outcome)
    return [_count(parse_json(key), group) for key, group in groups.items()]


def _count(axes: dict[str, Any], outcomes: list[Outcome]) -> Count:
    seeds: dict[Any, list[Outcome]] = {}
    for outcome in outcomes:
        seeds.setdefault(outcome.axes.get("seed"), []).append(outcome)
    known = [attempts for attempts in seeds.values() if any(a.decided for a in attempts)]
    below = sum(any(a.below_floor for a in attempts) for attempts in known)
    escaped = sum(any(a.escaped for a in attempts) for attempts in known)
    # As the paper's figure: the most recent attempt of a seed.
    plotted = [attempts[-1] for attempts in known if attempts[-1].escaped and attempts[-1].loss is not None]
    return Count(
        axes,
        len(known),
        below,
        wilson(below, len(known)),
        escaped,
        wilson(escaped, len(known)),
        fmean(a.loss for a in plotted if a.loss is not None) if plotted else None,
        sum(a.surrogate for a in plotted),
        len(seeds) - len(known),
    )


def table(counts: Sequence[Count]) -> str:
    """The counts for a terminal."""
    axes = list(counts[0].axes)
    header = (*axes, "below floor", "95%", "escaped", "95%", "mean loss", "cut off")
    rows = [
        (
            *(str(count.axes[axis]) for axis in axes),
            f"{count.below_floor}/{count.seeds}",
            _interval(count.below_floor_interval),
            f"{count.escaped}/{count.seeds}",
            _interval(count.escaped_interval),
            "–" if count.mean_loss is None else f"{count.mean_loss:.3f}" + "*" * bool(count.surrogates),
            str(count.cut_off or "–"),
        )
        for count in counts
    ]
    notes = [
        "below floor: the paper's rule, any validation below the unigram floor; escaped: more than 0.1 nats",
        "below it and token similarity below 0.95; 95%: Wilson intervals; mean loss: of those that escaped",
    ]
    if any(count.surrogates for count in counts):
        notes.append(
            f"*: with training losses of the last {TRAILING_STEPS} steps for runs not validated there"
        )
    return "\n".join([text_table(header, rows), *notes])


def _interval(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:.2f}–{bounds[1]:.2f}"
