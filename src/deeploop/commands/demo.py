"""The demo: six tiny looped models on two CPU cores, and what the exponent decides.

Pre-norm, DeepNorm (p = ¼) and DeepLoop (p = ½), each at R = 1 and at a looped depth, with the same seed,
data and schedule. The ramp of the learning rate is steep on purpose: of those tried, it is one at which
the smaller exponent collapses to the unigram floor more often than the larger (docs/results/demo has the
counts, and how the ramp was picked). Nothing is fixed in advance: the table shows what happened.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deeploop.commands.parsing import run_command
from deeploop.commands.prepare import PrepareStdlib
from deeploop.commands.prepare import run as run_prepare
from deeploop.recipes.gpt import tiny
from deeploop.report.demo import write
from deeploop.train.config import TrainConfig
from deeploop.train.metrics import LogConfig, read_metrics

METHODS: dict[str, dict[str, Any]] = {
    "pre-norm": {"block": "prenorm"},
    "DeepNorm p=1/4": {"block": "sandwich", "p": 0.25},
    "DeepLoop p=1/2": {"block": "sandwich", "p": 0.5},
}


@dataclass(frozen=True)
class DemoConfig:
    """Trains six tiny looped models on the bytes of Python's standard library and shows how they fare."""

    out: Path = Path("demo")
    """Folder of the corpus, the runs, the picture and the page."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    rounds: int = 12
    """The looped depth R that stands beside R = 1."""
    steps: int = 160
    """Steps of each run."""

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ValueError(f"rounds={self.rounds}: must be at least 2, R = 1 is trained anyway")
        if self.steps < 8:
            raise ValueError(f"steps={self.steps}: must be at least 8")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or more")


def cell(config: DemoConfig, method: str, rounds: int) -> TrainConfig:
    """The full config of one run."""
    base = tiny()
    name = f"{method.split()[0].lower()}-r{rounds}"
    return replace(
        base,
        out=config.out / "runs" / f"seed{config.seed}-{config.steps}steps" / name,
        resume=True,
        seed=config.seed,
        model=replace(base.model, rounds=rounds, context=64, **METHODS[method]),
        data=replace(
            base.data,
            path=config.out / "data",
            validation_sequences=128,
            validate_every=max(1, config.steps // 4),
        ),
        # The rate rises by 1.2e-4 a step, picked among a few: docs/results/demo.
        optim=replace(
            base.optim,
            steps=config.steps,
            peak_lr=1.2e-2,
            floor_lr=1.2e-3,
            warmup_steps=max(1, config.steps * 5 // 8),
        ),
        checkpoint=replace(base.checkpoint, every=config.steps, keep=1),
        log=LogConfig(every=2),
    )


def prepare_corpus(config: DemoConfig) -> str:
    return run_prepare(PrepareStdlib(out=config.out / "data"))


def run(config: DemoConfig) -> str:
    """Trains the six models and returns what to print at the end."""
    from deeploop.train.loop import train

    print(prepare_corpus(config), flush=True)
    cells = {(method, r): cell(config, method, r) for r in (1, config.rounds) for method in METHODS}
    for number, ((method, r), settings) in enumerate(cells.items(), start=1):
        print(f"\n[{number}/{len(cells)}] {method}, {settings.model.blocks} blocks × {r} rounds", flush=True)
        if train(settings)["ended"] == "stopped":
            raise KeyboardInterrupt  # the run is saved; whoever asked to stop means the whole demo
    results = {key: read_result(settings) for key, settings in cells.items()}
    folders = {key: settings.out for key, settings in cells.items()}
    return write(config.out, results, folders, rounds=config.rounds, seed=config.seed)


def read_result(settings: TrainConfig) -> dict[str, Any]:
    """A run's last validation, and the scales of its residuals where they are not 1."""
    model = settings.model
    scales = {"alpha": model.scales.alpha, "beta": model.scales.beta} if model.rule else {}
    return {**read_metrics(settings.out, "validation")[-1], "depth": model.depth, **scales}


def main(arguments: list[str]) -> int:
    return run_command(DemoConfig, run, arguments, prog="deeploop demo")
