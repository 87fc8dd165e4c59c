"""What a search found: the cells of a sweep take the settings of the best trial of another one.

A search is a sweep with an axis `trial`, such as `rules-search`. Its cells that agree in all other axes
compete, by their last validation loss.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from deeploop.experiments.grids import Cell, Settings, configure
from deeploop.train.metrics import read_metrics_tail

TRIAL = "trial"
Axes = dict[str, Any]


def tuned(cells: list[Cell], search: Path) -> list[Cell]:
    """The cells, each with the settings of the best trial among those that share its labels."""
    found = list(_best(search))
    result = []
    for cell in cells:
        fitting = [settings for axes, settings in found if axes.items() <= cell.axes.items()]
        if len(fitting) != 1:
            raise ValueError(f"tuned={search}: has {len(fitting)} searches for the cell {cell.name}, not one")
        result.append(replace(cell, settings={**cell.settings, **fitting[0]}))
    return result


def _best(search: Path) -> Iterator[tuple[Axes, Settings]]:
    """The other axes of each group of trials, and what the best of them sets that differs within it."""
    for axes, group in groupby(sorted(_trials(search), key=lambda t: json.dumps(t[0])), key=lambda t: t[0]):
        trials = [(_loss(search / name, config.optim.steps), settings) for _, name, config, settings in group]
        best = min(trials, key=lambda trial: trial[0])[1]
        yield axes, {path: v for path, v in best.items() if any(s.get(path) != v for _, s in trials)}


def _trials(search: Path) -> Iterator[tuple[Axes, str, Any, Settings]]:
    try:
        cells = json.loads((search / "sweep.json").read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        raise ValueError(f"tuned={search}: holds no sweep") from None
    for name, cell in cells.items():
        if TRIAL not in cell["axes"]:
            raise ValueError(f"tuned={search}: no search, for it has no axis {TRIAL}")
        axes = {axis: label for axis, label in cell["axes"].items() if axis != TRIAL}
        yield axes, name, configure(cell["recipe"], cell["settings"]), cell["settings"]


def _loss(folder: Path, steps: int) -> float:
    """The validation loss at the last step."""
    last = [r["loss"] for r in read_metrics_tail(folder) if r["kind"] == "validation" and r["step"] == steps]
    if not last:
        raise ValueError(f"tuned={folder.parent}: its cell {folder.name} is not finished")
    return float(last[-1])
