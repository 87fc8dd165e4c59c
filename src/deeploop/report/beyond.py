"""Iterated tasks: the share of right cells at more steps than were trained. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from deeploop.report.groups import (
    Cell,
    Histories,
    cells,
    labels,
    letter,
    method,
)
from deeploop.report.means import mean_of
from deeploop.report.page import Part
from deeploop.report.plots import Chart, Line, Panel, looks
from deeploop.report.runs import Run
from deeploop.report.tables import MISSING, Table, number

RIGHT = 0.99  # share of whole answers inside the trained steps, of cells beyond them
FARTHEST = 2  # of the numbers of steps asked for, so many of the largest tell whether a loop extrapolates
BEYOND_NOTE = (
    f"extrapolates: runs with {RIGHT:.0%} of the cells right at the {FARTHEST} largest numbers of steps. "
    f"learned at step: the first validation with {RIGHT:.0%} of the whole answers right inside the trained "
    "steps, the median over seeds. Then the share of right cells, mean ± standard deviation."
)


def goes_on(shares: Mapping[int, float], trained: int) -> bool | None:
    """Return True if shares of correct cells, by steps, stay near 1 beyond training; None without any."""
    far = sorted(steps for steps in shares if steps > trained)[-FARTHEST:]
    return all(shares[steps] >= RIGHT for steps in far) if far else None


def beyond_parts(runs: Sequence[Run], histories: Histories) -> list[Part]:
    """Make a table and a chart for each iterated task, the settings that extrapolate furthest first."""
    tasks: dict[str, list[Run]] = {}
    for run in filter(is_iterated, runs):
        tasks.setdefault(_task_name(run), []).append(run)
    parts: list[Part] = []
    for at, (task, own) in enumerate(tasks.items()):
        groups = sorted(cells(own), key=lambda cell: fmean(_error_beyond(run) for run in cell.runs))
        named = dict(zip(map(id, groups), labels(groups), strict=True))
        name = f"beyond-{letter(at).lower()}"
        table = _beyond_table(groups, named, histories)
        parts += [replace(table, name=name, title=f"Share of cells right by steps: {task}")]
        parts += [_beyond_chart(groups, named, name, task)]
    return parts


def is_iterated(run: Run) -> bool:
    known = {"data.task", "data.rule", "data.length", "data.train_steps"} <= run.fields.keys()
    return (
        known and run.stamp.get("task") == "iterate" and run.state == "finished" and "steps" in run.validation
    )


def _task_name(run: Run) -> str:
    fields = run.fields
    rule = f" of rule {fields['data.rule']}" if fields["data.task"] == "automaton" else ""
    size, trained = fields["data.length"], fields["data.train_steps"]
    return f"{fields['data.task']}{rule}, length {size}, trained on 1 to {trained} steps"


def _error_beyond(run: Run) -> float:
    return float(run.validation.get("beyond") or 0.0)


def _shares(run: Run) -> dict[int, float]:
    """Map steps to the share of correct cells at the last validation."""
    return dict(zip(run.validation["steps"], run.validation["cells_by_steps"], strict=True))


def _beyond_table(groups: Sequence[Cell], named: Mapping[int, str], histories: Histories) -> Table:
    def extrapolating(cell: Cell) -> str:
        found = [goes_on(_shares(run), run.fields["data.train_steps"]) for run in cell.runs]
        return MISSING if None in found else f"{sum(map(bool, found))}/{len(found)}"

    def learned_at(cell: Cell) -> str:
        right = [
            [one["step"] for one in histories[run].validations if (one.get("exact") or 0) >= RIGHT]
            for run in cell.runs
        ]
        return number(median(own[0] for own in right) if all(right) else None, ",.0f")

    columns: dict[str, Any] = {
        "rule": lambda cell: named[id(cell)],
        "seeds": lambda cell: str(len(cell.runs)),
        "extrapolates": extrapolating,
        "learned at step": learned_at,
    }
    for steps in sorted({steps for cell in groups for run in cell.runs for steps in _shares(run)}):
        columns[f"{steps} steps"] = mean_of(".3f", lambda run, steps=steps: _shares(run).get(steps))
    return Table.of("", "", groups, columns, BEYOND_NOTE)


def _beyond_chart(groups: Sequence[Cell], named: Mapping[int, str], name: str, task: str) -> Chart:
    """Plot the mean share of correct cells against steps, a line for the best settings of each method."""
    best = {method(cell.first): cell for cell in reversed(groups)}
    look = looks(named[id(cell)] for cell in best.values())
    lines = []
    for cell in reversed(best.values()):
        colour, dashes = look[named[id(cell)]]
        asked = sorted(set.intersection(*({*_shares(run)} for run in cell.runs)))
        means = [fmean(_shares(run)[steps] for run in cell.runs) for steps in asked]
        lines.append(Line(asked, means, named[id(cell)], colour, f"o{dashes}"))
    panel = Panel(
        lines,
        x="steps asked for (shaded: trained)",
        y="share of cells right",
        log_x=2,
        y_range=(0, 1.03),
        shaded=(0.9, groups[0].first.fields["data.train_steps"]),
    )
    caption = f"Right cells against steps: a loop that learned one step stays at 1. {task}."
    return Chart(name, caption, [panel], height=4)
