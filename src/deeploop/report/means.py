"""Tables of runs, and of means over their seeds. No torch."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from deeploop.report import listing
from deeploop.report.groups import (
    OF_A_METHOD,
    Cell,
    Histories,
    cells,
    methods,
    repeats,
    spread,
)
from deeploop.report.runs import REASONERS, Run
from deeploop.report.tables import MISSING, Table, number


def runs_tables(runs: Sequence[Run]) -> list[Table]:
    """Make a table of the runs of each kind, with the settings in which they differ."""
    groups = listing.by_kind(runs)
    return [
        listing.runs_table(own, f"runs-{at}" if at > 1 else "runs", name.capitalize())
        for at, (name, own) in enumerate(groups.items(), start=1)
    ]


def seeds_tables(runs: Sequence[Run], histories: Histories) -> list[Table]:
    """Make tables of means over seeds, for each kind of run that has several seeds of the same settings."""
    found: list[Table] = []
    for name, own in listing.by_kind([run for run in runs if run.fields]).items():
        groups = cells(own)
        if len(groups) < len(own):
            groups.sort(key=lambda cell: _rank(cell, histories))
            suffix = f"-{len(found) + 1}" * bool(found)
            found.append(seeds_table(groups, histories, f"seeds{suffix}", f"Means over seeds: {name}"))
    return found


def _rank(cell: Cell, histories: Histories) -> tuple[str, float]:
    """Sort the better first, in each unit: more puzzles solved, a lower loss."""
    exact, losses = cell.of_trained(_exact), cell.losses(histories)
    best = -fmean(exact) if exact else fmean(losses) if losses else math.inf
    return f"{cell.first.unit} {cell.first.corpora if 'data.path' in cell.first.fields else ''}", best


def seeds_table(groups: Sequence[Cell], histories: Histories, name: str, title: str) -> Table:
    """Make a table with a row for each set of seeds: its method and settings, means ± standard deviations."""
    runs = [run for cell in groups for run in cell.runs]
    named = dict(zip(map(id, groups), methods([cell.first for cell in groups]), strict=True))
    settings = listing.setting_columns(runs, but=OF_A_METHOD)
    columns: dict[str, Any] = {"method": lambda cell: named[id(cell)]}
    columns |= {heading: _of_first(column) for heading, column in settings.items()}
    columns |= {
        "seeds": lambda cell: repeats(cell.runs) or str(len(cell.runs)),
        "unfinished": lambda cell: _count(not run.ended for run in cell.runs),
        "collapsed": lambda cell: _count(run in cell.collapsed for run in cell.runs),
    }
    for unit in sorted({run.unit for run in runs if run.ended and histories.loss(run) is not None}):
        columns[f"loss, nats/{unit}"] = mean_of(".4f", lambda run, unit=unit: _loss(run, unit, histories))
    columns |= {"solved, %": mean_of(".1f", _exact), "cells, %": mean_of(".1f", _cells)}
    columns |= {
        "tokens/s": lambda cell: number(speed(cell), ",.0f"),
        "GPU-h": lambda cell: number(_sum(run.gpu_hours for run in cell.runs), ".3f"),
    }
    return Table.of(name, title, groups, columns, SEEDS_NOTE).filled


SEEDS_NOTE = (
    "Mean ± standard deviation over the finished runs that did not collapse, one of each seed unless the row "
    "says otherwise. tokens/s is the mean of runs that had their device to themselves."
)


def _of_first(column: Any) -> Any:
    return lambda cell: column(cell.first)


def mean_of(form: str, value: Any) -> Any:
    return lambda cell: spread(found, form) if (found := cell.of_trained(value)) else MISSING


def _loss(run: Run, unit: str, histories: Histories) -> float | None:
    return histories.loss(run) if run.unit == unit else None


def _exact(run: Run) -> float | None:
    exact = run.validation.get("exact")
    return None if exact is None or run.stamp.get("task") not in REASONERS else 100 * exact


def _cells(run: Run) -> float | None:
    share = run.validation.get("cells")
    return None if share is None or run.stamp.get("task") not in REASONERS else 100 * share


def _count(those: Any) -> str:
    return str(sum(those) or MISSING)


def _sum(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def speed(cell: Cell) -> float | None:
    """Return the mean over the runs that had their device to themselves."""
    rates = [run.tokens_per_s for run in cell.runs if run.tokens_per_s and not run.shared]
    return fmean(rates) if rates else None
