"""When positions merge, over R at fixed K: the sum of rates at which token similarity passes one half.

    python -m research.experiments.escape_threshold --data data/text --size gpu
    python -m research.experiments.escape_threshold --data data/stdlib --size laptop

Trains each R, exponent and seed from the start until its positions have merged (or --steps), under one ramp,
and sets the measured sums beside docs/escape.md's prediction S* ∝ R^(-(1-p)/2): a table, threshold.json and
threshold.png in --out. Finished runs are kept and not repeated.
"""

import argparse
import json
import math
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from deeploop.models import GPTConfig
from deeploop.paper.grids import paper_grid
from deeploop.report.plots import save_png
from deeploop.report.tables import text_table
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.recipes import get_recipe
from deeploop.theory.scaling import ScalingRule
from deeploop.train.distributed import World, open_world
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest
from research.escape import critical_sum, sum_exponent

MERGED, ENOUGH = 0.5, 0.8


def base_config(size: str, width: int | None, data: Path, steps: int, ramp: float) -> TrainConfig:
    recipe = get_recipe("tiny" if size == "laptop" else "gpt2-small")
    assert isinstance(recipe, TrainConfig)
    model = recipe.model
    batch = recipe.optim.batch
    if size == "gpu":
        settings = paper_grid("escape", "gpu")["settings"]
        model, batch = replace(model, **settings["model"]), settings["optim"]["batch"]
    if width is not None:
        model = replace(model, width=width, hidden=8 * -(-width // 3))
    return replace(
        recipe,
        model=model,
        data=replace(recipe.data, path=data, validation_sequences=8),
        optim=replace(
            recipe.optim, batch=batch, steps=steps, warmup_steps=steps, peak_lr=ramp * steps, floor_lr=0.0
        ),
        device=replace(recipe.device, micro_batch=0),
    )


def curve(config: TrainConfig, world: World, every: int, hold: bool) -> list[tuple[float, float]]:
    """(sum of rates, token similarity) until the positions have merged; the embedding may be held still."""
    run, total = open_run(config, world), 0.0
    queue = StepQueue(run, StopRequest())
    run.model.embedding.weight.requires_grad_(not hold)
    found = [(0.0, run.task.evaluate(run.model)["similarity"])]
    for step in range(config.optim.steps):
        total += queue.take().lr
        if (step + 1) % every == 0:
            found.append((total, run.task.evaluate(run.model)["similarity"]))
            if found[-1][1] > ENOUGH:
                break
    return found


def crossing(points: list[tuple[float, float]]) -> float | None:
    """Where the similarity first passes MERGED, in a straight line between two looks."""
    for (s, a), (t, b) in pairwise(points):
        if a < MERGED <= b:
            return s + (t - s) * (MERGED - a) / (b - a)
    return None


def predict(row: dict[str, Any], model: GPTConfig) -> float:
    """What the model says of a start, by the similarity that it began with."""
    N, initial = model.blocks * row["rounds"], row["curve"][0][1]
    return critical_sum(N, ScalingRule(row["p"]), model.width, initial=initial)


def exponent(rounds: list[int], sums: list[float]) -> float:
    """Slope of log S over log R, by least squares."""
    x, y = [math.log(R) for R in rounds], [math.log(S) for S in sums]
    mx, my = fmean(x), fmean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def draw(rows: list[dict[str, Any]], model: GPTConfig, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for p in sorted({row["p"] for row in rows}):
        mine = sorted((row["rounds"], row["S"]) for row in rows if row["p"] == p and row["S"])
        slope = exponent(*map(list, zip(*mine, strict=True)))
        (points,) = axes.plot(*zip(*mine, strict=True), "o", label=f"p = {p:g}: R^{slope:.2f}")
        own = [row for row in rows if row["p"] == p]
        means = {R: fmean(predict(row, model) for row in own if row["rounds"] == R) for R, _ in mine}
        label = f"predicted, R^{float(sum_exponent(p)):g}"
        axes.plot(*zip(*means.items(), strict=True), "--", color=points.get_color(), label=label)
    axes.set(xscale="log", yscale="log", xlabel="rounds R", ylabel="sum of rates at similarity ½")
    axes.set_title(title)
    axes.minorticks_off()
    axes.set_xticks(ticks := sorted({row["rounds"] for row in rows}), [str(R) for R in ticks])
    marks = [m * 10.0**e for e in range(-5, 0) for m in (1, 2, 3, 5, 7)]
    low, high = axes.get_ylim()
    marks = [mark for mark in marks if low < mark < high]
    axes.set_yticks(marks, [f"{mark:.0e}" for mark in marks])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save_png(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", choices=("gpu", "laptop"), default="gpu")
    parser.add_argument(
        "--width", type=int, help="another width than the size's; give it an --out of its own"
    )
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3, 5, 7, 12])
    parser.add_argument("--p", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--ramp", type=float, default=5e-6, help="rise of the rate a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=2, help="steps between two looks at the similarity")
    parser.add_argument(
        "--hold-embedding", action="store_true", help="as in the model; give it an --out of its own"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/threshold"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "threshold.json"
    rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    done = {(row["rounds"], row["p"], row["seed"]) for row in rows}
    base = base_config(options.size, options.width, options.data, options.steps, options.ramp)
    cells = [(R, p, seed) for seed in options.seeds for p in options.p for R in options.rounds]
    with open_world(base.device) as world, tempfile.TemporaryDirectory() as folder:
        for R, p, seed in tqdm([cell for cell in cells if cell not in done], desc="threshold", disable=None):
            model = replace(base.model, rounds=R, rule=f"deeploop:p={p}")
            config = replace(base, seed=seed, model=model, out=Path(folder) / f"{R}-{p}-{seed}")
            points = curve(config, world, options.every, options.hold_embedding)
            rows.append({"rounds": R, "p": p, "seed": seed, "S": crossing(points), "curve": points})
            kept.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    table = [
        (
            f"{p:g}",
            str(R),
            *(f"{row['S']:.2e}" if row["S"] else "–" for row in mine),
            f"{fmean(predict(row, base.model) for row in mine):.2e}",
        )
        for p in options.p
        for R in options.rounds
        if (mine := [row for row in rows if (row["p"], row["rounds"]) == (p, R)])
    ]
    seeds = tuple(f"seed {seed}" for seed in options.seeds)
    print(text_table(("p", "R", *seeds, "predicted"), table))
    for p in options.p:
        mine = [row for row in rows if row["p"] == p and row["S"]]
        if len({row["rounds"] for row in mine}) > 1:
            slope = exponent([row["rounds"] for row in mine], [row["S"] for row in mine])
            print(f"p = {p:g}: S ~ R^{slope:.2f}, predicted R^{float(sum_exponent(p)):.3f}")
    title = "embedding held still" if options.hold_embedding else "as trained"
    draw(rows, base.model, title, options.out / "threshold.png")


if __name__ == "__main__":
    main()
