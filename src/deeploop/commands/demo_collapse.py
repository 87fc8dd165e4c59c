"""The collapse that the demo's page shows: tiny looped models on the bytes of Python's standard library.

Pre-norm, DeepNorm (p = ¼) and DeepLoop (p = ½), each at R = 1 and at a looped depth, with the same seed,
data and schedule; at that depth also DeepNorm with the unigram bias. The ramp of the learning rate is steep
on purpose: of those tried, it is one at which the smaller exponent collapses to the unigram floor more often
than the larger (docs/results/demo-collapse has the counts, and how the ramp was picked).
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from deeploop.commands.prepare import PrepareStdlib
from deeploop.commands.prepare import run as run_prepare
from deeploop.config.run import LogConfig
from deeploop.report.plots import series
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.recipes import tiny
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

METHODS: dict[str, dict[str, Any]] = {
    "pre-norm": {"rule": "prenorm"},
    "DeepNorm p=1/4": {"rule": "deepnorm"},
    "DeepLoop p=1/2": {"rule": "deeploop"},
}
# At the looped depth alone: an output bias that starts at the unigram frequencies.
CURES: dict[str, dict[str, Any]] = {
    "DeepNorm p=1/4, unigram bias": {"rule": "deepnorm", "unigram_bias": True},
}
ROUNDS, STEPS = 12, 160
QUICK_ROUNDS, QUICK_STEPS = 2, 8
KEPT = ("step", "loss", "floor", "similarity", "verdict")


def cell(out: Path, seed: int, method: str, rounds: int, steps: int = STEPS) -> TrainConfig:
    """The full config of one run."""
    base = tiny()
    name = f"{method.split()[0].lower()}{'-bias' * (method in CURES)}-r{rounds}"
    return replace(
        base,
        out=out / "runs" / f"collapse-seed{seed}-{steps}steps" / name,
        resume=True,
        seed=seed,
        model=replace(base.model, rounds=rounds, context=64, **(METHODS | CURES)[method]),
        data=replace(
            base.data, path=out / "data", validation_sequences=128, validate_every=max(1, steps // 4)
        ),
        # The rate rises by 1.2e-4 per step, picked among a few: docs/results/demo-collapse.
        optim=replace(
            base.optim,
            steps=steps,
            peak_lr=1.2e-2,
            floor_lr=1.2e-3,
            warmup_steps=max(1, steps * 5 // 8),
        ),
        checkpoint=replace(base.checkpoint, every=steps, keep=1),
        log=LogConfig(every=2),
    )


def prepare_corpus(out: Path) -> str:
    return run_prepare(PrepareStdlib(out=out / "data"))


def train_all(out: Path, seed: int, *, quick: bool = False) -> dict[str, Any]:
    """Trains the seven models; returns their record, as `report.collapse` shows it."""
    looped, steps = (QUICK_ROUNDS, QUICK_STEPS) if quick else (ROUNDS, STEPS)
    print(f"\n{prepare_corpus(out)}", flush=True)
    named = [*product((1, looped), METHODS), *product((looped,), CURES)]
    cells = {(method, R): cell(out, seed, method, R, steps) for R, method in named}
    for number, ((method, R), settings) in enumerate(cells.items(), start=1):
        print(f"\n[{number}/{len(cells)}] {method}, {settings.model.blocks} blocks × {R} rounds", flush=True)
        if train(settings)["ended"] == "stopped":
            raise KeyboardInterrupt  # the run is saved; whoever asked to stop means the whole demo
    return {
        "source": f"this run, seed {seed}",
        "seed": seed,
        "steps": steps,
        "quick": quick,
        "runs": [run_record(method, R, settings) for (method, R), settings in cells.items()],
    }


def run_record(method: str, rounds: int, settings: TrainConfig) -> dict[str, Any]:
    """A run's curves, and the scales of its residuals where they are not 1."""
    model = settings.model
    scales = {"alpha": model.scales.alpha, "beta": model.scales.beta} if model.residual.law else {}
    steps, losses = series(read_metrics(settings.out, "train"), "loss")
    validations = [{key: line[key] for key in KEPT} for line in read_metrics(settings.out, "validation")]
    return {
        "method": method,
        "rounds": rounds,
        "depth": model.depth,
        **scales,
        "train": [(step, round(loss, 4)) for step, loss in zip(steps, losses, strict=True)],
        "validations": validations,
    }
