"""The paper's start at small sizes, looked at while it trains: for the studies of docs/escape.md."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deeploop.paper.grids import paper_grid
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.recipes import get_recipe
from deeploop.train.distributed import World
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

SIZES = ("laptop", "gpu")


def paper_start(size: str, data: Path, steps: int, ramp: float, **model: Any) -> TrainConfig:
    """A config without the unigram bias whose rate rises by `ramp` in every step; None leaves a field."""
    recipe = get_recipe("tiny" if size == "laptop" else "gpt2-small")
    assert isinstance(recipe, TrainConfig)
    settings = paper_grid("escape", "gpu")["settings"]
    batch = recipe.optim.batch if size == "laptop" else settings["optim"]["batch"]
    fields = {} if size == "laptop" else dict(settings["model"])
    fields |= {name: value for name, value in model.items() if value is not None}
    if model.get("width"):
        fields["hidden"] = 8 * -(-model["width"] // 3)
    return replace(
        recipe,
        model=replace(recipe.model, unigram_bias=False, **fields),
        data=replace(recipe.data, path=data, validation_sequences=8),
        optim=replace(
            recipe.optim, batch=batch, steps=steps, warmup_steps=steps, peak_lr=ramp * steps, floor_lr=0.0
        ),
        device=replace(recipe.device, micro_batch=0),
    )


def looks(
    config: TrainConfig, world: World, every: int, *, hold_embedding: bool = False
) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Train; yield step, sum of the rates so far and a validation: before, every few steps, at the end."""
    run, total = open_run(config, world), 0.0
    queue = StepQueue(run, StopRequest())
    run.model.get_parameter("embedding.weight").requires_grad_(not hold_embedding)
    yield 0, total, run.task.evaluate(run.model)
    for step in range(1, config.optim.steps + 1):
        total += queue.take().lr
        if step % every == 0 or step == config.optim.steps:
            yield step, total, run.task.evaluate(run.model)


def exponent(rounds: Iterable[float], values: Iterable[float]) -> float:
    """Slope of log value over log R, by least squares."""
    return linear_regression(np.log([*rounds]), np.log([*values])).slope


def log_log_figure(ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="rounds R", ylabel=ylabel)
    return figure, axes


def label_log_log(axes: Axes, rounds: Iterable[int]) -> None:
    """Ticks at the rounds and at round numbers, and a legend beside the axes."""
    axes.minorticks_off()
    axes.set_xticks(ticks := sorted(set(rounds)), [str(R) for R in ticks])
    low, high = axes.get_ylim()
    marks = [mark for e in range(-8, 0) for m in (1, 2, 3, 5, 7) if low < (mark := m * 10.0**e) < high]
    axes.set_yticks(marks, [f"{mark:.0e}" for mark in marks])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def json_lines(rows: Iterable[Any]) -> str:
    """A JSON list with a line for each entry."""
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
