"""The model of the collapse (research/escape.py) beside the recorded starts of docs/results/alignment.

    python -m research.experiments.escape_model --out docs/results/escape-model

Prints, for each start, the sum of rates at which its positions merge beside the predicted one, and how large
its branches became; then every record on the way in, with the similarity that the model predicts at its sum
of rates. model.png has the same as a picture. No constant is fitted: S is the schedule's, m_0 that of step 0.
"""

import argparse
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from deeploop.config.json import from_dict
from deeploop.models import GPTConfig
from deeploop.report.plots import save_png
from deeploop.report.tables import text_table
from deeploop.runs.packed import opened
from deeploop.tasks.language.config import TrainConfig
from deeploop.theory.scaling import ScalingRule
from deeploop.train.metrics import read_metrics
from research import RESULTS
from research.escape import critical_sum, similarity

RECORDS = RESULTS / "alignment"
STARTS = (
    "deeploop-warmup2000",
    "deeploop-warmup600",
    "deeploop-warmup100",
    "deepnorm-warmup600",
    "p1-warmup100",
)
MERGED = 0.99  # beyond it the way in is over


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
        """Where the similarity passes one half, log odds straight in S², and the two records around it."""
        for one, other in pairwise(self.records):
            low, high = (log_odds(record["similarity"]) for record in (one, other))
            if low < 0 <= high:
                s, t = self.S(one), self.S(other)
                return math.sqrt(s * s + (t * t - s * s) * low / (low - high)), s, t
        raise ValueError("this start never merged")

    def way_in(self) -> list[dict[str, Any]]:
        """The records up to the first beyond MERGED."""
        end = next(i for i, record in enumerate(self.records) if record["similarity"] > MERGED)
        return self.records[1 : end + 1]


def log_odds(m: float) -> float:
    return math.log(m / (1 - min(m, 1 - 1e-6)))


def read_start(folder: Path) -> Start:
    config = from_dict(TrainConfig, json.loads((folder / "config.json").read_text()))
    ramp = config.optim.peak_lr / config.optim.warmup_steps
    return Start(config.model, ramp, read_metrics(folder, "diagnose"))


def branches(record: dict[str, Any], kind: str) -> list[float]:
    """Branch over skip at every visit of attention or of the feed-forward."""
    own = [visits["ratio"] for name, visits in record["stream"].items() if kind in name]
    return [ratio for ratios in own for ratio in ratios]


def row(start: Start) -> list[str]:
    measured, before, after = start.merger()
    model, last = start.model, start.records[-1]
    predicted = critical_sum(model.depth, start.law, model.width, initial=start.initial)
    return [
        f"{model.residual.p:g}",
        f"{start.ramp:.1e}",
        f"{measured:.2e}",
        f"{before:.1e}–{after:.1e}",
        f"{predicted:.2e}",
        f"{measured / predicted:.2f}",
        f"{max(fmean(branches(record, 'attention')) for record in start.records[1:]):.2f}",
        f"{max(max(branches(record, 'attention')) for record in start.records[1:]):.2f}",
        str(last["step"]),
        f"{fmean(branches(last, 'attention')):.2f}",
        f"{fmean(branches(last, 'mlp')):.2f}",
        f"{last['similarity']:.2f}",
    ]


HEADER = (
    "p|ramp|S at ½|between|model|ratio|attention/skip: mean over visits, most over steps|largest visit"
    "|last step|mean there|ff/skip, mean there|similarity there"
)


def draw(starts: list[Start], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    colours = {0.25: "C1", 0.5: "C0", 1.0: "C2"}
    for start, mark in zip(starts, "osD^v", strict=True):
        way = start.way_in()
        points = [(start.S(record), min(record["similarity"], 0.999)) for record in way]
        label = f"p = {start.model.residual.p:g}, {start.ramp:.1e} a step"
        axes.plot(
            *zip(*points, strict=True),
            mark,
            color=colours[start.model.residual.p],
            label=label,
            ms=6,
            alpha=0.8,
        )
    for p, colour in colours.items():
        start = next(start for start in starts if start.model.residual.p == p)
        sums = [10 ** (-4.7 + 2.6 * i / 400) for i in range(401)]
        curve = [(S, m) for S in sums if (m := start.predict(S)) < 0.9995]
        axes.plot(*zip(*curve, strict=True), color=colour, lw=1.2, label=f"model, p = {p:g}")
    axes.set(xscale="log", yscale="logit", xlabel="sum of the learning rates S", ylabel="token similarity m")
    axes.set_ylim(0.01, 0.9993)
    ticks = (0.01, 0.03, 0.1, 0.5, 0.9, 0.99, 0.999)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save_png(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for model.png")
    options = parser.parse_args()
    starts = [read_start(opened(RECORDS / f"start-{name}")) for name in STARTS]
    print(text_table(tuple(HEADER.split("|")), [row(start) for start in starts]))
    way = [
        (
            f"{start.model.residual.p:g}",
            f"{start.ramp:.1e}",
            str(record["step"]),
            f"{start.S(record):.2e}",
            f"{record['similarity']:.3f}",
            f"{start.predict(start.S(record)):.3f}",
        )
        for start in starts
        for record in start.way_in()
    ]
    print(text_table(("p", "ramp", "step", "S", "similarity", "model"), way))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        draw(starts, options.out / "model.png")


if __name__ == "__main__":
    main()
