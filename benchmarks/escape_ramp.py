"""How fast the rate may rise, over R at fixed K: the ramp beyond which a start does not come back.

    python benchmarks/escape_ramp.py --data data/stdlib

For each R, exponent and seed the border between ramps that escape and ramps that stay collapsed is closed in
on: by factors of two from --ramp until both are seen, then by halves of the logarithm. A start escapes if
its last look is more than 0.1 nats below the unigram floor with a token similarity below 0.95. Every start
is kept in --out/ramp.json and not repeated; the table and ramp.png have the borders beside the law that was
measured over exponents, r* ∝ R^-(1-p) (docs/escape.md).
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from escape_threshold import base_config, exponent
from tqdm import tqdm

from deeploop.experiments.page import text_table
from deeploop.models import GPTConfig
from deeploop.theory.escape import critical_ramp, ramp_exponent
from deeploop.theory.scaling import ScalingRule
from deeploop.train.config import TrainConfig
from deeploop.train.distributed import World, open_world
from deeploop.train.loop import open_run, train_step
from deeploop.train.optim import learning_rate, set_learning_rate
from deeploop.train.progress import StopRequest

PEAK = 1e-3  # held after the rise, as in the sweeps `escape` and `p-sweep`
MERGED, CLEAR = 0.95, 0.7
WIDEST = 6  # doublings from the first ramp before a border counts as not found
Start = dict[str, Any]


def start(config: TrainConfig, world: World, every: int) -> Start:
    """Trains one start; one that has merged and is clearly back needs no more steps."""
    run, stop, highest = open_run(config, world), StopRequest(), 0.0
    looks: list[tuple[int, float, float]] = []
    escaped = False
    for step in range(config.optim.steps):
        set_learning_rate(run.optimizer, learning_rate(step, config.optim))
        train_step(run, stop)
        if (step + 1) % every == 0 or step + 1 == config.optim.steps:
            seen = run.task.evaluate(run.model)
            similarity, loss = seen["similarity"], seen["loss"]
            looks.append((step + 1, round(loss, 4), round(similarity, 4)))
            highest = max(highest, similarity)
            escaped = loss < seen["floor"] - 0.1 and similarity < MERGED
            if escaped and highest > MERGED and similarity < CLEAR:
                break
    return {"escaped": escaped, "looks": looks}


def close_in(first: float, escapes: Callable[[float], bool], halvings: int) -> tuple[float, float] | None:
    """(a ramp that escapes, a steeper one that does not), at most 2^(1 / 2^halvings) apart."""
    low = high = first
    if escapes(first):
        for _ in range(WIDEST):
            low, high = high, 2 * high
            if not escapes(high):
                break
        else:
            return None
    else:
        for _ in range(WIDEST):
            low, high = low / 2, low
            if escapes(low):
                break
        else:
            return None
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if escapes(middle) else (low, middle)
    return low, high


def draw(borders: dict[tuple[float, int, int], tuple[float, float]], model: GPTConfig, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for p in sorted({p for p, _, _ in borders}):
        mine = [(R, pair) for (q, R, _), pair in borders.items() if q == p]
        rounds, ramps = [R for R, _ in mine], [math.sqrt(low * high) for _, (low, high) in mine]
        slope = f": R^{exponent(rounds, ramps):.2f}" if len(set(rounds)) > 1 else ""
        reach = [
            [r - low for r, (_, (low, _)) in zip(ramps, mine, strict=True)],
            [high - r for r, (_, (_, high)) in zip(ramps, mine, strict=True)],
        ]
        bars = axes.errorbar(rounds, ramps, yerr=reach, fmt="o", capsize=3, label=f"p = {p:g}{slope}")
        law = [(R, critical_ramp(model.blocks * R, ScalingRule(p), model.width)) for R in sorted(set(rounds))]
        label = f"expected, R^{float(ramp_exponent(p)):g}"
        axes.plot(*zip(*law, strict=True), "--", color=bars.lines[0].get_color(), label=label)
    axes.set(xscale="log", yscale="log", xlabel="rounds R", ylabel="steepest ramp that escapes")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    marks = [mark for e in range(-8, -2) for m in (1, 2, 3, 5, 7) if low < (mark := m * 10.0**e) < high]
    axes.set_yticks(marks, [f"{mark:.0e}" for mark in marks])
    axes.set_xticks(ticks := sorted({R for _, R, _ in borders}), [str(R) for R in ticks])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", choices=("gpu", "laptop"), default="laptop")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--p", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ramp", type=float, default=1.6e-5, help="the first one tried")
    parser.add_argument("--halvings", type=int, default=2)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks")
    parser.add_argument("--blocks", type=int, help="another K than the size's")
    parser.add_argument("--context", type=int, help="another context than the size's")
    parser.add_argument("--out", type=Path, default=Path("runs/ramp"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "ramp.json"
    rows: list[Start] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    known = {(row["p"], row["rounds"], row["seed"], row["ramp"]): row["escaped"] for row in rows}
    base = base_config(options.size, None, options.data, options.steps, options.ramp)
    model = replace(
        base.model,
        blocks=options.blocks or base.model.blocks,
        context=options.context or base.model.context,
    )
    borders: dict[tuple[float, int, int], tuple[float, float]] = {}
    cells = [(p, R, seed) for seed in options.seeds for p in options.p for R in options.rounds]
    with open_world(base.device) as world, tempfile.TemporaryDirectory() as folder:
        for p, R, seed in tqdm(cells, desc="borders", disable=None):

            def escapes(ramp: float, p: float = p, R: int = R, seed: int = seed) -> bool:
                ramp = float(f"{ramp:.4g}")
                key = (p, R, seed, ramp)
                if key not in known:
                    warmup = max(1, round(PEAK / ramp))
                    peak = ramp * warmup
                    optim = replace(base.optim, warmup_steps=warmup, peak_lr=peak, floor_lr=peak)
                    out = Path(folder) / f"{p}-{R}-{seed}-{ramp}"
                    config = replace(
                        base, seed=seed, model=replace(model, rounds=R, p=p), optim=optim, out=out
                    )
                    row = {"p": p, "rounds": R, "seed": seed, "ramp": ramp}
                    rows.append(row | start(config, world, options.every))
                    known[key] = rows[-1]["escaped"]
                    kept.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
                return bool(known[key])

            if border := close_in(options.ramp, escapes, options.halvings):
                borders[p, R, seed] = border
    table = [
        (f"{p:g}", str(R), str(seed), f"{low:.2e}", f"{high:.2e}")
        for (p, R, seed), (low, high) in sorted(borders.items())
    ]
    print(text_table(("p", "R", "seed", "escapes at", "stays at"), table))
    for p in options.p:
        mine = [(R, math.sqrt(low * high)) for (q, R, _), (low, high) in borders.items() if q == p]
        if len({R for R, _ in mine}) > 1:
            slope = exponent(*map(list, zip(*mine, strict=True)))
            print(f"p = {p:g}: r* ~ R^{slope:.2f}, expected R^{float(ramp_exponent(p)):.2f}")
    draw(borders, model, options.out / "ramp.png")


if __name__ == "__main__":
    main()
