"""How fast the rate may rise, over R at fixed K: the ramp beyond which a start does not come back.

    python -m research.experiments.escape_ramp --data data/text --blocks 4

For each R, exponent and seed the border between ramps that escape and ramps that stay collapsed is closed in
on: by factors of two from --ramp until both are seen, then by halves of the logarithm. The rate rises to
1e-3 and stays; a start escapes if its last look has that verdict (docs/training.md). Every start is kept in
--out/ramp.json and not repeated; the table and ramp.png have all borders on record beside the law that was
fitted over exponents, r* ∝ R^-(1-p) (docs/escape.md).
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deeploop.diagnose.collapse import SIMILARITY_LIMIT
from deeploop.models import GPTConfig
from deeploop.report.plots import save_png
from deeploop.report.tables import text_table
from deeploop.tasks.language.config import TrainConfig
from deeploop.theory.scaling import ScalingRule
from deeploop.train.distributed import World, open_world
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest
from research.escape import critical_ramp, ramp_exponent
from research.experiments.escape_threshold import base_config, exponent

PEAK = 1e-3  # as in the sweeps `escape` and `p-sweep`
CLEAR = 0.7  # a start that has merged and is below this again needs no more steps
WIDEST = 6  # doublings or halvings of the first ramp
OF_A_RECORD = ("size", "data", "blocks", "context", "steps", "every")
Start = dict[str, Any]
Border = tuple[float | None, float | None]
"""The steepest ramp seen to escape, and the gentlest above it seen to stay."""


def start(config: TrainConfig, world: World, every: int) -> Start:
    """Trains one start; `escaped` is None where positions have not merged yet, so that nothing is known."""
    run, highest = open_run(config, world), 0.0
    queue = StepQueue(run, StopRequest())
    looks: list[tuple[int, float, float]] = []
    escaped = False
    for step in range(config.optim.steps):
        queue.take()
        if (step + 1) % every == 0 or step + 1 == config.optim.steps:
            seen = run.task.evaluate(run.model)
            looks.append((step + 1, round(seen["loss"], 4), round(seen["similarity"], 4)))
            highest = max(highest, seen["similarity"])
            escaped = seen["verdict"] == "escaped"
            if escaped and highest > SIMILARITY_LIMIT and seen["similarity"] < CLEAR:
                break
    return {"escaped": escaped if escaped or highest > SIMILARITY_LIMIT else None, "looks": looks}


def close_in(first: float, escapes: Callable[[float], bool | None], halvings: int) -> Border:
    """Both sides at most a factor 2^(1 / 2^halvings) apart; None for a side that was not found."""
    low: float | None = None
    high: float | None = None
    ramp = first
    for _ in range(WIDEST + 1):
        answer = escapes(ramp)
        if answer is None:
            break
        low, high = (ramp, high) if answer else (low, ramp)
        if low and high:
            break
        ramp = ramp * 2 if answer else ramp / 2
    for _ in range(halvings if low and high else 0):
        middle = math.sqrt(low * high)  # type: ignore[operator]
        low, high = (middle, high) if escapes(middle) else (low, middle)
    return low, high


class Record:
    """ramp.json: the settings of its starts, and what became of each."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self.settings, self.starts = file, settings, list[Start]()
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["settings"] != settings:
                raise SystemExit(f"{file}: is of {kept['settings']}; choose another --out")
            self.starts = kept["starts"]

    def find(self, key: dict[str, Any]) -> Start | None:
        return next((one for one in self.starts if key.items() <= one.items()), None)

    def borders(self) -> list[tuple[dict[str, Any], Border]]:
        """Of every exponent, R and seed on record, as far as its starts tell."""
        cells = sorted({(one["p"], one["rounds"], one["seed"]) for one in self.starts})
        found = []
        for p, rounds, seed in cells:
            cell = {"p": p, "rounds": rounds, "seed": seed}
            mine = [one for one in self.starts if cell.items() <= one.items()]
            low = max((one["ramp"] for one in mine if one["escaped"]), default=None)
            stay = (one["ramp"] for one in mine if one["escaped"] is False and one["ramp"] > (low or 0))
            found.append((cell, (low, min(stay, default=None))))
        return found

    def add(self, one: Start) -> None:
        self.starts.append(one)
        lines = ",\n".join(map(json.dumps, self.starts))
        text = f'{{"settings": {json.dumps(self.settings)},\n"starts": [\n{lines}\n]}}\n'
        self.file.write_text(text, encoding="utf-8")


def border(
    base: TrainConfig, world: World, record: Record, options: argparse.Namespace, cell: dict[str, Any]
) -> Border:
    """Of one exponent, R and seed; starts that are on record are not trained again."""

    def escapes(ramp: float) -> bool | None:
        key = {**cell, "ramp": float(f"{ramp:.4g}")}
        if (known := record.find(key)) is None:
            warmup = max(1, round(PEAK / key["ramp"]))
            peak = key["ramp"] * warmup  # the ramp is exact, the peak nearly so
            config = replace(
                base,
                seed=cell["seed"],
                model=replace(base.model, rounds=cell["rounds"], rule=f"deeploop:p={cell['p']}"),
                optim=replace(base.optim, warmup_steps=warmup, peak_lr=peak, floor_lr=peak),
            )
            with tempfile.TemporaryDirectory() as folder:
                known = {**key, **start(replace(config, out=Path(folder) / "run"), world, options.every)}
            record.add(known)
        answer: bool | None = known["escaped"]
        return answer

    return close_in(options.ramp, escapes, options.halvings)


def draw(borders: list[tuple[dict[str, Any], Border]], model: GPTConfig, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    every = sorted({cell["rounds"] for cell, _ in borders})
    for index, p in enumerate(sorted({cell["p"] for cell, _ in borders})):
        colour = f"C{index}"
        law = [(R, critical_ramp(model.blocks * R, ScalingRule(p), model.width)) for R in every]
        label = f"p = {p:g}: r*, R^{float(ramp_exponent(p)):g}"
        axes.plot(*zip(*law, strict=True), "--", color=colour, label=label)
        for number, seed in enumerate(sorted({cell["seed"] for cell, _ in borders if cell["p"] == p})):
            mine = [
                (cell["rounds"], *pair) for cell, pair in borders if (cell["p"], cell["seed"]) == (p, seed)
            ]
            closed = [one for one in mine if all(one)]
            rounds, middles = [R for R, *_ in closed], [math.sqrt(low * high) for _, low, high in closed]
            slope = f", R^{exponent(rounds, middles):.2f}" if len(rounds) > 1 else ""
            reach = [
                [middle - low for middle, (_, low, _) in zip(middles, closed, strict=True)],
                [high - middle for middle, (_, _, high) in zip(middles, closed, strict=True)],
            ]
            style = {"fmt": "osDv"[number], "capsize": 3, "color": colour}
            axes.errorbar(rounds, middles, yerr=reach, label=f"p = {p:g}, seed {seed}{slope}", **style)
            if higher := [(R, low) for R, low, high in mine if low and not high]:
                label = f"p = {p:g}, seed {seed}: at least"
                axes.plot(*zip(*higher, strict=True), "^", color=colour, mfc="none", label=label)
    axes.set(xscale="log", yscale="log", xlabel="rounds R", ylabel="steepest ramp that comes back")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    marks = [mark for e in range(-8, -2) for m in (1, 2, 3, 5, 7) if low < (mark := m * 10.0**e) < high]
    axes.set_yticks(marks, [f"{mark:.0e}" for mark in marks])
    axes.set_xticks(every, [str(R) for R in every])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save_png(figure, path)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", choices=("gpu", "laptop"), default="laptop")
    parser.add_argument("--blocks", type=int, help="another K than the size's")
    parser.add_argument("--context", type=int, help="another context than the size's")
    parser.add_argument("--rounds", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--p", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ramp", type=float, default=1.2e-5, help="the first one tried")
    parser.add_argument("--halvings", type=int, default=2)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks")
    parser.add_argument("--out", type=Path, default=Path("runs/ramp"))
    return parser.parse_args()


def main() -> None:
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    base = base_config(options.size, None, options.data, options.steps, options.ramp)
    model = replace(
        base.model,
        blocks=options.blocks or base.model.blocks,
        context=options.context or base.model.context,
    )
    base = replace(base, model=model)
    given = {**vars(options), "blocks": model.blocks, "context": model.context, "data": options.data.name}
    record = Record(options.out / "ramp.json", {name: given[name] for name in OF_A_RECORD})
    cells = [
        {"p": p, "rounds": R, "seed": seed}
        for seed in options.seeds
        for p in options.p
        for R in options.rounds
    ]
    with open_world(base.device) as world:
        for cell in tqdm(cells, desc="borders", disable=None):
            border(base, world, record, options, cell)
    borders = record.borders()
    table = [
        (*(f"{cell[name]:g}" for name in ("p", "rounds", "seed")), *(f"{r:.2e}" if r else "–" for r in pair))
        for cell, pair in borders
    ]
    print(text_table(("p", "R", "seed", "escapes at", "stays at"), table))
    draw(borders, model, options.out / "ramp.png")


if __name__ == "__main__":
    main()
