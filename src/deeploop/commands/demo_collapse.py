"""The collapse that the demo's page shows: tiny looped models on the bytes of Python's standard library.

Pre-norm, DeepNorm (p = ¼) and DeepLoop (p = ½), each at R = 1 and at a looped depth, with the same seed,
data and schedule; at that depth also DeepNorm with the unigram bias. The ramp of the learning rate is steep
on purpose: of those tried, it is one at which the smaller exponent collapses to the unigram floor more often
than the larger (docs/results/demo-collapse has the counts, and how the ramp was picked).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deeploop.commands.demo import train_cells
from deeploop.commands.prepare import PrepareStdlib
from deeploop.commands.prepare import run as run_prepare
from deeploop.report.plots import series
from deeploop.runs.folder import load_config
from deeploop.sweep.grid import Axis, Grid
from deeploop.train.metrics import read_metrics

METHODS = {
    "pre-norm": ("pre-norm", {"model.rule": "prenorm"}),
    "deepnorm": ("DeepNorm p=1/4", {"model.rule": "deepnorm"}),
    "deeploop": ("DeepLoop p=1/2", {"model.rule": "deeploop"}),
}
CURES = {  # at the looped depth alone: an output bias that starts at the unigram frequencies
    "deepnorm-bias": (
        "DeepNorm p=1/4, unigram bias",
        {"model.rule": "deepnorm", "model.unigram_bias": True},
    ),
}
ROUNDS, STEPS = 12, 160
QUICK_ROUNDS, QUICK_STEPS = 2, 8
KEPT = ("step", "loss", "floor", "similarity", "verdict")
SETTINGS = {
    "model.context": 64,
    "model.unigram_bias": False,
    "data.validation_sequences": 128,
    "optim.peak_lr": 1.2e-2,  # rises by 1.2e-4 per step, picked among a few: docs/results/demo-collapse
    "optim.floor_lr": 1.2e-3,
    "checkpoint.keep": 1,
    "log.every": 2,
}


def grid(out: Path, seed: int, rounds: Sequence[int] = (1, ROUNDS), steps: int = STEPS) -> Grid:
    """Every method at these rounds, and the cure at the last of them."""
    settings = {
        **SETTINGS,
        "seed": seed,
        "data.path": str(out / "data"),
        "data.validate_every": max(1, steps // 4),
        "optim.steps": steps,
        "optim.warmup_steps": max(1, steps * 5 // 8),
        "checkpoint.every": steps,
    }
    methods = {name: own for name, (_, own) in (METHODS | CURES).items()}
    axes: dict[str, Axis] = {"r": {R: {"model.rounds": R} for R in rounds}, "method": methods}
    omit = tuple({"r": R, "method": name} for R in rounds[:-1] for name in CURES)
    return Grid("demo-collapse", "tiny", axes, settings, omit=omit)


def prepare_corpus(out: Path) -> str:
    return run_prepare(PrepareStdlib(out=out / "data"))


def train_all(out: Path, seed: int, *, quick: bool = False) -> dict[str, Any]:
    """Train the seven models; returns their record, as `demo_page` shows it."""
    looped, steps = (QUICK_ROUNDS, QUICK_STEPS) if quick else (ROUNDS, STEPS)
    print(f"\n{prepare_corpus(out)}\n", flush=True)
    runs = out / "runs" / f"collapse-seed{seed}-{steps}steps"
    cells = train_cells(runs, grid(out, seed, (1, looped), steps), here=quick).cells
    return {
        "source": f"this run, seed {seed}",
        "seed": seed,
        "steps": steps,
        "quick": quick,
        "runs": [run_record(cell.axes["method"], runs / cell.name) for cell in cells],
    }


def run_record(method: str, run: Path) -> dict[str, Any]:
    """A run's curves, and the scales of its residuals where they are not 1."""
    model = load_config(run).model
    scales = {"alpha": model.scales.alpha, "beta": model.scales.beta} if model.residual.law else {}
    steps, losses = series(read_metrics(run, "train"), "loss")
    validations = [{key: line[key] for key in KEPT} for line in read_metrics(run, "validation")]
    return {
        "method": (METHODS | CURES)[method][0],
        "rounds": model.rounds,
        "depth": model.depth,
        **scales,
        "train": [(step, round(loss, 4)) for step, loss in zip(steps, losses, strict=True)],
        "validations": validations,
    }
