"""Give the cells of a sweep the settings of the best trial of another one.

A search is a sweep with an axis `trial`, such as `rules-search`. Its trials that agree in all other axes but
the seed compete, by the last validation loss of their worst seed: near a cliff one lucky seed must not win.
Runs of iterated tasks compete by their errors beyond the trained steps, which is what they are trained for.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeploop.report.runs import read_run
from deeploop.runs.sweeps import read_sweep
from deeploop.sweep.grid import Cell, Settings

TRIAL, SEED = "trial", "seed"
Axes = dict[str, Any]
Trials = dict[str, dict[str, Settings]]  # a trial's cells, one per seed, by their names


def tuned(cells: list[Cell], search: Path, overrides: Settings) -> list[Cell]:
    """Give each cell the settings of the best trial among those that share its labels.

    Fields in `overrides` are not changed.
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
        cells = read_sweep(search).cells
    except (OSError, ValueError):
        raise ValueError(f"tuned={search}: holds no sweep that can be read") from None
    groups: list[tuple[Axes, Trials]] = []
    for name, cell in cells.items():
        shared = {axis: label for axis, label in cell.axes.items() if axis not in (TRIAL, SEED)}
        settings = {path: value for path, value in cell.settings.items() if path != SEED}
        if TRIAL not in cell.axes:
            raise ValueError(f"tuned={search}: no search, for it has no axis {TRIAL}")
        trials = next((trials for axes, trials in groups if axes == shared), None)
        if trials is None:
            groups.append((shared, trials := {}))
        trials.setdefault(str(cell.axes[TRIAL]), {})[name] = settings
    return groups


def _best(search: Path, trials: Trials) -> Settings:
    """Return the settings that distinguish the trial whose worst seed is best."""
    worst = {trial: max(_loss(search / name) for name in seeds) for trial, seeds in trials.items()}
    if math.isinf(min(worst.values())):
        names = ", ".join(name for seeds in trials.values() for name in seeds)
        raise ValueError(f"tuned={search}: none of {names} came to its end with every seed")
    settings = {trial: next(iter(seeds.values())) for trial, seeds in trials.items()}
    best = settings[min(worst, key=lambda trial: worst[trial])]
    return {path: v for path, v in best.items() if any(s.get(path) != v for s in settings.values())}


def _loss(folder: Path) -> float:
    """The last validation loss (or error beyond training); infinite if the run broke off for good."""
    run = read_run(folder)
    if run.state not in ("finished", "collapsed", "failed"):
        raise ValueError(f"tuned={folder.parent}: its cell {folder.name} is {run.state}, not finished")
    if run.state != "finished":
        return math.inf
    beyond = run.validation.get("beyond")
    return float(run.validation["loss"] if beyond is None else beyond)
