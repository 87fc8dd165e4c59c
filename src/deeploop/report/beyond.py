"""Runs of iterated tasks: which rule learns in fewest steps, which one extrapolates furthest. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from deeploop.report.escapes import wilson
from deeploop.report.groups import Cell, Histories, cells, labels, letter, method
from deeploop.report.page import Part
from deeploop.report.plots import Chart, Line, Panel, looks
from deeploop.report.runs import Run
from deeploop.report.tables import MISSING, Table, number

LEARNED = RIGHT = 0.99  # share of whole answers inside the trained steps, of cells beyond them
FARTHEST = 2  # of the numbers of steps asked for, so many of the largest tell whether a loop extrapolates


def goes_on(shares: Mapping[int, float], trained: int) -> bool | None:
    """Return True if shares of right cells, by steps, stay near 1 beyond training; None without any."""
    far = sorted(steps for steps in shares if steps > trained)[-FARTHEST:]
    return all(shares[steps] >= RIGHT for steps in far) if far else None


@dataclass(frozen=True)
class Contender:
    """The finished runs of a task that differ in their seed alone."""

    name: str
    runs: tuple[Run, ...]

    @property
    def trained(self) -> int:
        return int(self.runs[0].fields["data.train_steps"])

    @property
    def steps(self) -> list[int]:
        """Numbers of steps that all its runs were asked for."""
        return sorted(set.intersection(*(set(run.validation["steps"]) for run in self.runs)))

    def shares(self, steps: int) -> list[float]:
        """Share of right cells of each run."""
        lasts = [run.validation for run in self.runs]
        return [last["cells_by_steps"][last["steps"].index(steps)] for last in lasts]

    def going_on(self) -> int | None:
        """Count the runs that extrapolate; None where it was not asked."""
        columns = [self.shares(steps) for steps in self.steps]
        found = [
            goes_on(dict(zip(self.steps, own, strict=True)), self.trained)
            for own in zip(*columns, strict=True)
        ]
        return None if None in found else sum(map(bool, found))

    def learned_at(self, histories: Histories) -> float | None:
        """Training step of the first validation that has the trained steps right, the median over runs."""
        firsts = [
            next(
                (one["step"] for one in histories[run].validations if (one.get("exact") or 0) >= LEARNED),
                None,
            )
            for run in self.runs
        ]
        found = [first for first in firsts if first is not None]
        return median(found) if len(found) == len(firsts) else None


def contenders(runs: Sequence[Run]) -> dict[str, list[Contender]]:
    """Task → its contenders, those that extrapolate furthest first."""
    tasks: dict[str, list[Cell]] = {}
    for cell in cells(filter(is_iterated, runs)):
        tasks.setdefault(task_name(cell.first), []).append(cell)
    found = {
        task: [Contender(name, cell.runs) for cell, name in zip(own, labels(own), strict=True)]
        for task, own in tasks.items()
    }
    for rivals in found.values():
        rivals.sort(key=lambda one: fmean(run.validation.get("beyond") or 0.0 for run in one.runs))
    return found


def is_iterated(run: Run) -> bool:
    told = {"data.task", "data.rule", "data.length", "data.train_steps"} <= run.fields.keys()
    return (
        told and run.stamp.get("task") == "iterate" and run.state == "finished" and "steps" in run.validation
    )


def task_name(run: Run) -> str:
    fields = run.fields
    rule = f" of rule {fields['data.rule']}" if fields["data.task"] == "automaton" else ""
    size, trained = fields["data.length"], fields["data.train_steps"]
    return f"{fields['data.task']}{rule}, length {size}, trained on 1 to {trained} steps"


def beyond_parts(runs: Sequence[Run], histories: Histories) -> list[Part]:
    """A table and a chart for each task."""
    parts: list[Part] = []
    for index, (task, own) in enumerate(contenders(runs).items()):
        name = f"beyond-{letter(index).lower()}"
        parts += [beyond_table(task, own, histories, name), beyond_chart(task, own, name)]
    return parts


def beyond_table(task: str, own: Sequence[Contender], histories: Histories, name: str) -> Table:
    steps = sorted(set.union(*(set(one.steps) for one in own)))
    return Table(
        name,
        f"Share of cells right by steps: {task}",
        ["rule", "seeds", "extrapolates", "95%", "learned at step", *(f"{h} steps" for h in steps)],
        [[*_head(one, histories), *(_shares(one, h) for h in steps)] for one in own],
        f"extrapolates: runs with {RIGHT:.0%} of the cells right at the {FARTHEST} largest numbers of steps, "
        f"95%: Wilson's interval; learned at step: the first validation with {LEARNED:.0%} of the whole "
        "answers right inside the trained steps, the median over seeds; then the mean share of right cells, "
        "and its lowest and highest seed where they differ.",
    )


def _head(one: Contender, histories: Histories) -> list[str]:
    count, seeds = one.going_on(), len(one.runs)
    low, high = wilson(count or 0, seeds)
    going = [MISSING, MISSING] if count is None else [f"{count}/{seeds}", f"{low:.2f} to {high:.2f}"]
    return [one.name, str(seeds), *going, number(one.learned_at(histories), ",.0f")]


def _shares(one: Contender, steps: int) -> str:
    if steps not in one.steps:
        return MISSING
    shares = one.shares(steps)
    ends = f" ({min(shares):.2f} to {max(shares):.2f})" if max(shares) - min(shares) >= 0.005 else ""
    return f"{fmean(shares):.3f}{ends}"


def beyond_chart(task: str, own: Sequence[Contender], name: str) -> Chart:
    """Mean share of right cells against steps, a line for the best settings of each method."""
    best = {method(one.runs[0]): one for one in reversed(own)}
    look = looks(one.name for one in best.values())
    lines = []
    for one in reversed(best.values()):
        colour, dashes = look[one.name]
        lines.append(
            Line(one.steps, [fmean(one.shares(h)) for h in one.steps], one.name, colour, f"o{dashes}")
        )
    panel = Panel(
        lines,
        x="steps asked for (shaded: trained)",
        y="share of cells right",
        log_x=2,
        y_range=(0, 1.03),
        shaded=(0.9, own[0].trained),
    )
    caption = f"Right cells against steps: a loop that learned one step stays at 1. {task}."
    return Chart(name, caption, [panel], height=4)
