"""When positions merge, over R at fixed K: the sum of rates at which token similarity passes one half.

    python -m research.experiments.escape_threshold --data data/text --size gpu
    python -m research.experiments.escape_threshold --data data/stdlib --size laptop

Trains each R, exponent and seed from the start until its positions have merged (or --steps), under one ramp,
and sets the measured sums beside docs/escape.md's prediction S* ∝ R^(-(1-p)/2): a table, threshold.json and
threshold.png in --out. Finished runs are kept and not repeated.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from deeploop.models import GPTConfig
from deeploop.report.plots import save_png
from deeploop.report.tables import text_table
from deeploop.tasks.language.config import TrainConfig
from deeploop.theory.scaling import ScalingRule
from deeploop.train.distributed import World, open_world
from research.escape import critical_sum, sum_exponent
from research.experiments import starts

MERGED, ENOUGH = 0.5, 0.8
Row = dict[str, Any]


def curve(config: TrainConfig, world: World, every: int, hold: bool) -> list[tuple[float, float]]:
    """(sum of rates, token similarity) until the positions have merged; the embedding may be held still."""
    found = []
    for _, total, seen in starts.looks(config, world, every, hold_embedding=hold):
        found.append((total, seen["similarity"]))
        if found[-1][1] > ENOUGH:
            break
    return found


def crossing(points: list[tuple[float, float]]) -> float | None:
    """The S at which similarity first passes MERGED, by linear interpolation between two looks."""
    for (s, a), (t, b) in pairwise(points):
        if a < MERGED <= b:
            return s + (t - s) * (MERGED - a) / (b - a)
    return None


def predict(row: Row, model: GPTConfig) -> float:
    """The model's sum for a start, by the similarity that it began with."""
    N, initial = model.blocks * row["rounds"], row["curve"][0][1]
    return critical_sum(N, ScalingRule(row["p"]), model.width, initial=initial)


def by_exponent(rows: list[Row]) -> dict[float, list[Row]]:
    """p → its starts whose positions merged, by R and sum."""
    found: dict[float, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["p"], row["rounds"], row["S"] or 0)):
        if row["S"]:
            found[row["p"]].append(row)
    return found


def slope(rows: list[Row]) -> float:
    return starts.exponent((row["rounds"] for row in rows), (row["S"] for row in rows))


def draw(rows: list[Row], model: GPTConfig, title: str) -> Figure:
    figure, axes = starts.log_log_figure("sum of rates at similarity ½")
    axes.set_title(title)
    for p, own in by_exponent(rows).items():
        rounds = [row["rounds"] for row in own]
        label = f"p = {p:g}: R^{slope(own):.2f}"
        (points,) = axes.plot(rounds, [row["S"] for row in own], "o", label=label)
        means = [
            fmean(predict(row, model) for row in rows if (row["p"], row["rounds"]) == (p, R)) for R in rounds
        ]
        label = f"predicted, R^{float(sum_exponent(p)):g}"
        axes.plot(rounds, means, "--", color=points.get_color(), label=label)
    starts.label_log_log(axes, (row["rounds"] for row in rows))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", choices=starts.SIZES, default="gpu")
    parser.add_argument("--width", type=int, help="another than the size's; give it an --out of its own")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3, 5, 7, 12])
    parser.add_argument("--p", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--ramp", type=float, default=5e-6, help="rise of the rate a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=2, help="steps between two looks at the similarity")
    parser.add_argument("--hold-embedding", action="store_true", help="give it an --out of its own")
    parser.add_argument("--out", type=Path, default=Path("runs/threshold"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "threshold.json"
    rows: list[Row] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    done = {(row["rounds"], row["p"], row["seed"]) for row in rows}
    base = starts.paper_start(options.size, options.data, options.steps, options.ramp, width=options.width)
    cells = [(R, p, seed) for seed in options.seeds for p in options.p for R in options.rounds]
    with open_world(base.device) as world, tempfile.TemporaryDirectory() as folder:
        for R, p, seed in tqdm([cell for cell in cells if cell not in done], desc="threshold", disable=None):
            model = replace(base.model, rounds=R, rule=f"deeploop:p={p}")
            config = replace(base, seed=seed, model=model, out=Path(folder) / f"{R}-{p}-{seed}")
            points = curve(config, world, options.every, options.hold_embedding)
            rows.append({"rounds": R, "p": p, "seed": seed, "S": crossing(points), "curve": points})
            kept.write_text(starts.json_lines(rows) + "\n", encoding="utf-8")
    table = [
        (*(f"{row[key]:g}" for key in ("p", "rounds", "seed")), f"{row['S']:.2e}", f"{predicted:.2e}")
        for own in by_exponent(rows).values()
        for row in own
        for predicted in [predict(row, base.model)]
    ]
    print(text_table(("p", "R", "seed", "S", "predicted"), table))
    for p, own in by_exponent(rows).items():
        print(f"p = {p:g}: S ~ R^{slope(own):.2f}, predicted R^{float(sum_exponent(p)):.3f}")
    title = "embedding held still" if options.hold_embedding else "as trained"
    save_png(draw(rows, base.model, title), options.out / "threshold.png")


if __name__ == "__main__":
    main()
