"""The fastest warm-up without a lasting collapse, over R at fixed K.

    python -m research.experiments.escape_ramp --data data/text --blocks 4

For each R, exponent and seed the border between ramps that escape and ramps that stay collapsed is closed in
on: by factors of two from --ramp until both are seen, then by halves of the logarithm. The rate rises to
1e-3 and stays; a start escapes if its last look has that verdict (docs/training.md). Every start is kept in
--out/ramp.json and not repeated; the table and ramp.png have all borders on record beside the law that was
fitted over exponents, r* ∝ R^-(1-p) (docs/escape.md).
"""

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from deeploop.diagnose.collapse import SIMILARITY_LIMIT
from deeploop.models import GPTConfig
from deeploop.report.plots import save_png
from deeploop.report.tables import text_table
from deeploop.tasks.language.config import TrainConfig
from deeploop.theory.scaling import ScalingRule
from deeploop.train.distributed import World, open_world
from research.escape import critical_ramp, ramp_exponent
from research.experiments import starts

PEAK = 1e-3  # as in the sweeps `escape` and `p-sweep`
CLEAR = 0.7  # a start that has merged and is below this again needs no more steps
WIDEST = 6  # doublings or halvings of the first ramp
OF_A_RECORD = ("size", "data", "blocks", "context", "steps", "every")
Cell = tuple[float, int, int]  # p, R, seed
Start = dict[str, Any]
Border = tuple[float | None, float | None]
"""The steepest ramp seen to escape, and the gentlest above it seen to stay."""


def start(config: TrainConfig, world: World, every: int) -> Start:
    """Train one start; `escaped` is None where positions have not merged yet, so that nothing is known."""
    highest, found, escaped = 0.0, [], False
    for step, _, seen in itertools.islice(starts.looks(config, world, every), 1, None):
        found.append((step, round(seen["loss"], 4), round(seen["similarity"], 4)))
        highest = max(highest, seen["similarity"])
        escaped = seen["verdict"] == "escaped"
        if escaped and highest > SIMILARITY_LIMIT and seen["similarity"] < CLEAR:
            break
    return {"escaped": escaped if escaped or highest > SIMILARITY_LIMIT else None, "looks": found}


def close_in(first: float, escapes: Callable[[float], bool | None], halvings: int) -> None:
    """Ask for ramps until both sides are known, at most a factor 2^(1 / 2^halvings) apart."""
    low, high, ramp = 0.0, math.inf, first
    for _ in range(WIDEST + 1):
        answer = escapes(ramp)
        if answer is None:
            return
        low, high = (ramp, high) if answer else (low, ramp)
        if low and high < math.inf:
            break
        ramp = ramp * 2 if answer else ramp / 2
    for _ in range(halvings if low and high < math.inf else 0):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if escapes(middle) else (low, middle)


class Record:
    """ramp.json: the settings of its starts, and what became of each."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self.settings, self.starts = file, settings, list[Start]()
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["settings"] != settings:
                raise SystemExit(f"{file}: is of {kept['settings']}; choose another --out")
            self.starts = kept["starts"]

    def of(self, cell: Cell) -> list[Start]:
        return [one for one in self.starts if (one["p"], one["rounds"], one["seed"]) == cell]

    def borders(self) -> dict[Cell, Border]:
        """Of every exponent, R and seed on record, as far as its starts tell."""
        found: dict[Cell, Border] = {}
        for cell in sorted({(one["p"], one["rounds"], one["seed"]) for one in self.starts}):
            own = self.of(cell)
            low = max((one["ramp"] for one in own if one["escaped"]), default=None)
            stay = (one["ramp"] for one in own if one["escaped"] is False and one["ramp"] > (low or 0))
            found[cell] = low, min(stay, default=None)
        return found

    def add(self, one: Start) -> None:
        self.starts.append(one)
        lines = starts.json_lines(self.starts)
        text = f'{{"settings": {json.dumps(self.settings)},\n"starts": {lines}}}\n'
        self.file.write_text(text, encoding="utf-8")


def find_border(
    base: TrainConfig, world: World, record: Record, options: argparse.Namespace, cell: Cell
) -> None:
    """Close in on one border; starts that are on record are not trained again."""
    p, R, seed = cell

    def escapes(ramp: float) -> bool | None:
        ramp = float(f"{ramp:.4g}")
        known = next((one for one in record.of(cell) if one["ramp"] == ramp), None)
        if known is None:
            warmup = max(1, round(PEAK / ramp))
            peak = ramp * warmup  # the ramp is exact, the peak nearly so
            with tempfile.TemporaryDirectory() as folder:
                config = replace(
                    base,
                    out=Path(folder) / "run",
                    seed=seed,
                    model=replace(base.model, rounds=R, rule=f"deeploop:p={p}"),
                    optim=replace(base.optim, warmup_steps=warmup, peak_lr=peak, floor_lr=peak),
                )
                own = start(config, world, options.every)
            known = {"p": p, "rounds": R, "seed": seed, "ramp": ramp, **own}
            record.add(known)
        answer: bool | None = known["escaped"]
        return answer

    close_in(options.ramp, escapes, options.halvings)


def draw(borders: dict[Cell, Border], model: GPTConfig) -> Figure:
    figure, axes = starts.log_log_figure("steepest ramp that comes back")
    every = sorted({R for _, R, _ in borders})
    for index, p in enumerate(sorted({p for p, *_ in borders})):
        law = [critical_ramp(model.blocks * R, ScalingRule(p), model.width) for R in every]
        label = f"p = {p:g}: r*, R^{float(ramp_exponent(p)):g}"
        axes.plot(every, law, "--", color=f"C{index}", label=label)
        for number, seed in enumerate(sorted({seed for one, _, seed in borders if one == p})):
            own = {R: pair for (one, R, other), pair in borders.items() if (one, other) == (p, seed)}
            closed = {R: (low, high) for R, (low, high) in own.items() if low and high}
            middles = [math.sqrt(low * high) for low, high in closed.values()]
            slope = f", R^{starts.exponent(closed, middles):.2f}" if len(closed) > 1 else ""
            sides = [*zip(closed.values(), middles, strict=True)]
            reach = [
                [middle - low for (low, _), middle in sides],
                [high - middle for (_, high), middle in sides],
            ]
            label, mark = f"p = {p:g}, seed {seed}{slope}", "osDv"[number]
            axes.errorbar([*closed], middles, yerr=reach, label=label, fmt=mark, capsize=3, color=f"C{index}")
            if higher := {R: low for R, (low, high) in own.items() if low and not high}:
                label = f"p = {p:g}, seed {seed}: at least"
                axes.plot([*higher], [*higher.values()], "^", color=f"C{index}", mfc="none", label=label)
    starts.label_log_log(axes, every)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", choices=starts.SIZES, default="laptop")
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
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    own = {"blocks": options.blocks, "context": options.context}
    base = starts.paper_start(options.size, options.data, options.steps, options.ramp, **own)
    shape = {"blocks": base.model.blocks, "context": base.model.context}
    given = {**vars(options), **shape, "data": options.data.name}
    record = Record(options.out / "ramp.json", {name: given[name] for name in OF_A_RECORD})
    cells = [(p, R, seed) for seed in options.seeds for p in options.p for R in options.rounds]
    with open_world(base.device) as world:
        for cell in tqdm(cells, desc="borders", disable=None):
            find_border(base, world, record, options, cell)
    borders = record.borders()
    table = [
        (*map("{:g}".format, cell), *(f"{r:.2e}" if r else "–" for r in pair))
        for cell, pair in borders.items()
    ]
    print(text_table(("p", "R", "seed", "escapes at", "stays at"), table))
    save_png(draw(borders, base.model), options.out / "ramp.png")


if __name__ == "__main__":
    main()
