"""The tables of docs/results/recurrent: loops whose number of rounds is drawn, each setting changed alone."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from deeploop.report.runs import Run
from deeploop.report.tables import MISSING, markdown_table
from deeploop.train.metrics import read_metrics
from research.study import runs_of

BASE, TRAINED = "base", 4  # the cell that others are compared with, and the mean of its rounds
BACKPROP = 4  # rounds in the graph of the second study
COMPARED_WITH = {"prenorm-fixed": "fixed", "deeploop-fixed": "fixed", "none": "grad-all"}  # others: the base
RULE_DEPTHS = {"full": "R", "star": "√(R·R_g)", "graph": "R_g"}

Cells = dict[str, dict[int, Run]]  # cell → seed → run


def cells_of(folder: Path) -> Cells:
    """The runs of a sweep by cell and seed, in the order of the grid."""
    found: Cells = {}
    for run in runs_of(folder):
        found.setdefault(run.folder.name.rsplit("-seed", 1)[0], {})[run.fields["seed"]] = run
    return found


def losses_of(run: Run) -> dict[int, float]:
    """The last validation at each number of rounds."""
    *_, last = read_metrics(run.files, "validation")
    return dict(zip(last["validation_rounds"], last["loss_by_rounds"], strict=True))


def one_factor(results: Path) -> str:
    """Loss of every cell at every depth, and what its change does at the mean, in each seed."""
    losses = {
        name: {seed: losses_of(run) for seed, run in seeds.items()}
        for name, seeds in cells_of(results / "one-factor").items()
    }
    depths = [*next(iter(losses[BASE].values()))]
    rows = []
    for name, seeds in losses.items():
        means = [f"{fmean(own[R] for own in seeds.values()):.4f}" for R in depths]
        other = COMPARED_WITH.get(name, BASE)
        both = sorted(seeds.keys() & losses[other].keys())
        change = ", ".join(f"{seeds[seed][TRAINED] - losses[other][seed][TRAINED]:+.3f}" for seed in both)
        rows.append([name, *means, MISSING if name == BASE else f"{other}: {change}"])
    return markdown_table(["", *(f"R = {R}" for R in depths), f"at R = {TRAINED} minus, by seed"], rows)


def step_effect(results: Path) -> str:
    """‖ΔF‖/‖F‖ of a step for each depth that the rule is taken at, as a share of that at R = R_g."""
    cells = cells_of(results / "step-effect")
    effects = {name: {seed: effects_of(run) for seed, run in seeds.items()} for name, seeds in cells.items()}
    shallow = effects[f"R{BACKPROP}"]
    steps = [*next(iter(shallow.values()))]
    rows = []
    for name, seeds in effects.items():
        R, _, kind = name.removeprefix("R").partition("-")
        shares = [
            ", ".join(f"{effect[step] / shallow[seed][step]:.2f}" for seed, effect in seeds.items())
            for step in steps
        ]
        last = [[*read_metrics(run.files, "validation")][-1]["loss"] for run in cells[name].values()]
        depth = RULE_DEPTHS[kind] if kind else f"R = R_g = {BACKPROP}"
        rows.append([R, depth, *shares, ", ".join(f"{loss:.3f}" for loss in last)])
    return markdown_table(["R", "α of", *(f"effect at step {step}" for step in steps), "loss"], rows)


def effects_of(run: Run) -> dict[int, float]:
    records = (record for record in read_metrics(run.files, "diagnose") if "step_effect" in record)
    return {record["step"]: record["step_effect"]["measured"] for record in records}


def cache(results: Path) -> str:
    """Loss against the rounds whose keys and values are kept, for each model that was decoded."""
    models = {
        path.stem.removeprefix("cache-"): evaluation(path)["cache"]
        for path in sorted(results.glob("cache-*.json"))
    }
    rows = []
    for scores in zip(*models.values(), strict=True):
        first = scores[0]
        kept = str(first["cache_rounds"] or "all")
        rows.append([kept, str(first["slots"]), f"{first['bytes_per_token']:,.0f}",
                     *(f"{score['loss']:.4f}" for score in scores)])  # fmt: skip
    return markdown_table(["rounds kept", "slots", "bytes per token", *models], rows)


def gate(results: Path) -> str:
    """Loss against mean rounds for each way of stopping, and the line between fixed depths."""
    found = evaluation(results / "gate.json")
    fixed = [["fixed", str(row["rounds"]), f"{row['loss']:.4f}", MISSING] for row in found["rounds"]]
    stopped = [
        [f"{row['criterion']} {row['threshold']:g}", f"{row['mean_rounds']:.2f}", f"{row['loss']:.4f}",
         f"{row['loss'] - row['line']:+.4f}"]
        for row in found["adaptive"]
    ]  # fmt: skip
    return markdown_table(["stops by", "mean rounds", "loss", "minus the line"], fixed + stopped)


def evaluation(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["evaluations"][-1]
    return found


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "recurrent": {
        "one-factor": lambda results: one_factor(results / "recurrent"),
        "truncation": lambda results: step_effect(results / "recurrent"),
        "cache": lambda results: cache(results / "recurrent"),
        "gate": lambda results: gate(results / "recurrent"),
    }
}
