"""The model of the collapse (research/escape.py) beside the recorded starts of docs/results/alignment.

    python -m research.tables.escape_model

Prints, for each start, the sum of rates at which its positions merge beside the predicted one; then every
record until then, with the similarity that the model predicts at its sum of rates. No constant is fitted: S
is the schedule's, m_0 that of step 0.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from deeploop.config.json import from_dict
from deeploop.files import read_json
from deeploop.models import GPTConfig
from deeploop.report.tables import text_table
from deeploop.runs.packed import opened
from deeploop.tasks.language.config import TrainConfig
from deeploop.theory.scaling import ScalingRule
from deeploop.train.metrics import read_metrics
from research import RESULTS
from research.escape import critical_sum, similarity

STARTS = (
    "deeploop-warmup2000",
    "deeploop-warmup600",
    "deeploop-warmup100",
    "deepnorm-warmup600",
    "p1-warmup100",
)
MERGED = 0.99  # beyond it the onset is over


@dataclass(frozen=True)
class Start:
    """One recorded start: what was measured every ten steps, and the model's prediction."""

    model: GPTConfig
    ramp: float
    records: list[dict[str, Any]]

    @property
    def law(self) -> ScalingRule:
        law = self.model.residual.law
        assert law is not None, f"model.rule={self.model.rule}: this is for deeploop and deepnorm"
        return law

    @property
    def initial(self) -> float:
        return float(self.records[0]["similarity"])

    def S(self, record: dict[str, Any]) -> float:
        return float(self.ramp * record["step"] * (record["step"] + 1) / 2)

    def predict(self, S: float) -> float:
        return similarity(self.model.depth, self.law, self.model.width, S, initial=self.initial)

    def merger(self) -> tuple[float, float, float]:
        """The S at which similarity passes one half (log odds linear in S²), and the records around it."""
        for one, other in pairwise(self.records):
            low, high = (log_odds(record["similarity"]) for record in (one, other))
            if low < 0 <= high:
                s, t = self.S(one), self.S(other)
                return math.sqrt(s * s + (t * t - s * s) * low / (low - high)), s, t
        raise ValueError("this start never merged")

    def onset(self) -> list[dict[str, Any]]:
        """The records up to the first beyond MERGED."""
        end = next(i for i, record in enumerate(self.records) if record["similarity"] > MERGED)
        return self.records[1 : end + 1]


def log_odds(m: float) -> float:
    return math.log(m / (1 - min(m, 1 - 1e-6)))


def read_starts(results: Path) -> list[Start]:
    found = []
    for name in STARTS:
        folder = opened(results / "alignment" / f"start-{name}")
        config = from_dict(TrainConfig, read_json(folder / "config.json"))
        ramp = config.optim.peak_lr / config.optim.warmup_steps
        found.append(Start(config.model, ramp, read_metrics(folder, "diagnose")))
    return found


def row(start: Start) -> list[str]:
    measured, before, after = start.merger()
    model, last = start.model, start.records[-1]
    predicted = critical_sum(model.depth, start.law, model.width, initial=start.initial)
    return [
        f"{start.law.p:g}",
        f"{start.ramp:.1e}",
        f"{measured:.2e}",
        f"{before:.1e}–{after:.1e}",
        f"{predicted:.2e}",
        f"{measured / predicted:.2f}",
        str(last["step"]),
        f"{last['similarity']:.2f}",
    ]


HEADER = ("p", "ramp", "S at ½", "between", "model", "ratio", "last step", "similarity there")


def model_figure(results: Path) -> Figure:
    """Token similarity over the sum of rates: the starts as points, the model as lines."""
    starts = read_starts(results)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = {0.25: "C1", 0.5: "C0", 1.0: "C2"}
    for start, mark in zip(starts, "osD^v", strict=True):
        points = [(start.S(record), min(record["similarity"], 0.999)) for record in start.onset()]
        label, colour = f"p = {start.law.p:g}, {start.ramp:.1e} a step", colours[float(start.law.p)]
        axes.plot(*zip(*points, strict=True), mark, color=colour, label=label, ms=6, alpha=0.8)
    for p, colour in colours.items():
        start = next(start for start in starts if start.law.p == p)
        sums = [10 ** (-4.7 + 2.6 * i / 400) for i in range(401)]
        curve = [(S, m) for S in sums if (m := start.predict(S)) < 0.9995]
        axes.plot(*zip(*curve, strict=True), color=colour, lw=1.2, label=f"model, p = {p:g}")
    axes.set(xscale="log", yscale="logit", xlabel="sum of the learning rates S", ylabel="token similarity m")
    axes.set_ylim(0.01, 0.9993)
    axes.set_yticks(ticks := (0.01, 0.03, 0.1, 0.5, 0.9, 0.99, 0.999), [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def main() -> None:
    starts = read_starts(RESULTS)
    print(text_table(HEADER, [row(start) for start in starts]))
    records = [
        (
            f"{start.law.p:g}",
            f"{start.ramp:.1e}",
            str(record["step"]),
            f"{start.S(record):.2e}",
            f"{record['similarity']:.3f}",
            f"{start.predict(start.S(record)):.3f}",
        )
        for start in starts
        for record in start.onset()
    ]
    print(text_table(("p", "ramp", "step", "S", "similarity", "model"), records))


if __name__ == "__main__":
    main()
