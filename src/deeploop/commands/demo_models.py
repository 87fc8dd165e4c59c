"""The demo's four models of an automaton, and their answers far beyond the trained steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deeploop.commands.demo_page import TABLE
from deeploop.models.accounting import parameter_count
from deeploop.models.gpt import LoopedGPT
from deeploop.sweep.grid import Grid
from deeploop.tasks.iterate.config import IterateTrainConfig
from deeploop.tasks.iterate.load import load_iterate
from deeploop.tasks.iterate.problems.base import solve
from deeploop.tasks.iterate.problems.examples import held_out
from deeploop.tasks.iterate.scoring import copying, read_outs

DRAWN = tuple(sorted({*TABLE, 5, 6, 7, 11, 18, 34, 47, 60, 100, 150}))
"""Steps of the curves."""
ROWS = 256  # held-out rows that are scored; the first of them is drawn


@dataclass(frozen=True)
class Model:
    """One of the four models: a recipe, and the demo's changes to it."""

    recipe: str
    rule: str
    peak_lr: float
    noise: float
    steps: int
    title: str


# DeepLoop's rate and noise: of five trials the best on two seeds (docs/results/demo-rule). Flat's: both of
# two rates went on in 10 of 10 seeds. Pre-norm's rate: of five the best at nine steps, where it still has
# something right. The stack's was tried at two. docs/depth.md.
MODELS = {
    "DeepLoop": Model("automaton", "deeploop", 2e-3, 0.3, 2_000, "one block, looped: DeepLoop"),
    "flat": Model("automaton", "flat", 4e-3, 0.3, 2_000, "one block, looped: flat"),
    "pre-norm": Model("automaton", "prenorm", 3e-3, 0.0, 2_000, "one block, looped: pre-norm"),
    "stack": Model("automaton-stack", "flat", 3e-3, 0.0, 1_000, "four layers, no loop"),
}
TRAINED_STEPS = 4
QUICK_STEPS, QUICK_LENGTH, QUICK_BATCH, QUICK_ROWS = 24, 8, 16, 32


def grid(seed: int, *, quick: bool) -> Grid:
    """Return the four runs in the order in which they start."""
    return Grid("demo", "automaton", {"model": {name: _settings(name, seed, quick) for name in MODELS}})


def _settings(name: str, seed: int, quick: bool) -> dict[str, Any]:
    model = MODELS[name]
    steps = QUICK_STEPS if quick else model.steps
    small = {"data.length": QUICK_LENGTH, "optim.batch": QUICK_BATCH, "optim.warmup_steps": 2}
    return {
        "recipe": model.recipe,
        "seed": seed,
        "model.rule": model.rule,
        # What one sees while waiting: the longest that is trained, and the longest that is shown.
        "data.test_steps": [TRAINED_STEPS] if quick else [TRAINED_STEPS, max(TABLE)],
        "data.test_examples": QUICK_ROWS if quick else 64,
        "data.validate_every": steps if quick else steps // 4,
        "optim.steps": steps,
        "optim.peak_lr": model.peak_lr,
        "optim.floor_lr": model.peak_lr / 10,
        "rounds.noise": model.noise,
        "checkpoint.every": steps // 4,
        "checkpoint.keep": 1,
        "device.kind": "cpu",
        "log.every": max(1, steps // 100),
        **(small if quick else {}),
    }


def shared_record(config: IterateTrainConfig, *, quick: bool) -> dict[str, Any]:
    """Return what all models share: the task, the truth of the row that is drawn, the baseline."""
    task, trained = config.examples.task, config.data.train_steps
    rows = held_out(task, QUICK_ROWS if quick else ROWS)
    every = range(max(TABLE) + 1)
    return {
        "rule": config.data.rule,
        "length": config.data.length,
        "trained_steps": trained,
        "rows": len(rows),
        "steps": DRAWN,
        "copying": copying(task, rows, DRAWN, trained),
        "truth": _as_text(np.stack([answer[0] for answer in solve(task, rows[:1], every).values()])),
    }


def model_record(name: str, run: Path, *, quick: bool) -> dict[str, Any]:
    """Evaluate a trained model on held-out rows: shares of correct cells and rows, and one continuation."""
    model, config = load_iterate(run)
    task = config.examples.task
    rows = held_out(task, QUICK_ROWS if quick else ROWS)
    truth, every = solve(task, rows, DRAWN), range(1, max(TABLE) + 1)
    looped = not config.rounds.tells_steps
    found = answers(model, config, rows, every if looped else DRAWN)
    states = found if looped else answers(model, config, rows[:1], every)
    right = {h: found[h] == truth[h] for h in DRAWN}
    return {
        "title": MODELS[name].title,
        "rule": config.model.rule,
        "blocks": config.model.blocks,
        "looped": looped,
        "parameters": parameter_count(config.model),
        "peak_lr": config.optim.peak_lr,
        "noise": config.rounds.noise,
        "optim_steps": config.optim.steps,
        "batch": config.optim.batch,
        "cells": {h: float(right[h].mean()) for h in DRAWN},
        "exact": {h: float(right[h].all(1).mean()) for h in DRAWN},
        "states": _as_text(np.stack([states[h][0] for h in every])),
    }


@torch.no_grad()
def answers(
    model: LoopedGPT, config: IterateTrainConfig, instances: np.ndarray, steps: Sequence[int]
) -> dict[int, np.ndarray]:
    """Compute a model's answers after each number of steps: steps → (instances, cells).

    A loop continues from one to the next; a model that reads the number of steps starts anew.
    """
    shown = config.examples
    places = range(shown.tokens)[-config.data.length :]

    def read(logits: torch.Tensor) -> np.ndarray:
        return logits.argmax(-1)[:, places].numpy()

    if shown.tells_steps:
        inputs = torch.cat([torch.from_numpy(shown.inputs(instances, h)) for h in steps])
        found = read(model.logits(model(inputs).states)).reshape(len(steps), len(instances), -1)
        return dict(zip(steps, found, strict=True))
    inputs = torch.from_numpy(shown.inputs(instances, 0))
    return {h: read(logits) for h, logits in read_outs(model, inputs, steps)}


def _as_text(states: np.ndarray) -> list[str]:
    """Format rows of cells as 0 and 1; any other token, which an untrained model may give, is ?."""
    return ["".join("01"[cell] if cell in (0, 1) else "?" for cell in row) for row in states.tolist()]
