"""What a search found: the cells of a sweep take the settings of the best trial of another one.

A search is a sweep with an axis `trial`, such as `rules-search`. Its cells that agree in all other axes
compete, by their last validation loss.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeploop.experiments.endings import ending, log_error
from deeploop.experiments.grids import Cell, Settings, configure
from deeploop.train.config import TrainConfig
from deeploop.train.metrics import read_metrics_tail

TRIAL = "trial"
Axes = dict[str, Any]
Trials = dict[str, dict[str, Any]]  # name → recipe, settings, axes


def tuned(cells: list[Cell], search: Path, overrides: Settings) -> list[Cell]:
    """The cells, each with the settings of the best trial among those that share its labels.

    What the `overrides` set stays as it is.
    """
    groups = _groups(search)
    result = []
    for cell in cells:
        fitting = [trials for axes, trials in groups if axes.items() <= cell.axes.items()]
        if len(fitting) != 1:
            raise ValueError(f"tuned={search}: has {len(fitting)} searches for the cell {cell.name}, not one")
        result.append(replace(cell, settings={**cell.settings, **_best(search, fitting[0]), **overrides}))
    return result


def _groups(search: Path) -> list[tuple[Axes, Trials]]:
    """The trials that compete, by the labels that they share."""
    try:
        cells = json.loads((search / "sweep.json").read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        raise ValueError(f"tuned={search}: holds no sweep") from None
    groups: list[tuple[Axes, Trials]] = []
    for name, cell in cells.items():
        if TRIAL not in cell["axes"]:
            raise ValueError(f"tuned={search}: no search, for it has no axis {TRIAL}")
        shared = {axis: label for axis, label in cell["axes"].items() if axis != TRIAL}
        trials = next((trials for axes, trials in groups if axes == shared), None)
        if trials is None:
            groups.append((shared, trials := {}))
        trials[name] = cell
    return groups


def _best(search: Path, trials: Trials) -> Settings:
    """What the best trial sets that not all of them do."""
    losses = {name: _loss(search, name, cell) for name, cell in trials.items()}
    if math.isinf(min(losses.values())):
        raise ValueError(f"tuned={search}: none of {', '.join(trials)} came to its end")
    best = trials[min(losses, key=lambda name: losses[name])]["settings"]
    everyone = [cell["settings"] for cell in trials.values()]
    return {path: value for path, value in best.items() if any(s.get(path) != value for s in everyone)}


def _loss(search: Path, name: str, cell: dict[str, Any]) -> float:
    """The validation loss at the last step; infinite if the run broke off for good."""
    config = configure(cell["recipe"], cell["settings"])
    validations = [r for r in read_metrics_tail(search / name) if r["kind"] == "validation"]
    last = validations[-1] if validations else {}
    optim, stops = config.optim, isinstance(config, TrainConfig) and config.guard.stop
    ended = ending(last, steps=optim.steps, since=optim.warmup_steps, stops=stops)
    if ended is None and log_error(search / f"{name}.log") is None:
        raise ValueError(f"tuned={search}: its cell {name} is not finished")
    return float(last["loss"]) if ended == "finished" else math.inf
