"""Runs of iterated tasks in a report: which rule learns in fewest steps, which goes on furthest. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from deeploop.report.escapes import wilson
from deeploop.report.figures import finish
from deeploop.report.groups import Histories, method
from deeploop.report.page import MISSING
from deeploop.report.plots import INK, colours
from deeploop.report.runs import DEFINING, Run, differing
from deeploop.report.tables import Table

LEARNED = RIGHT = 0.99  # share of whole answers inside the trained steps, of cells beyond them
FARTHEST = 2  # of the numbers of steps asked for, so many of the largest tell whether a loop goes on


def goes_on(cells: Mapping[int, float], trained: int) -> bool | None:
    """Whether shares of right cells, by steps, stay near 1 beyond training; None: nothing was asked there."""
    far = sorted(steps for steps in cells if steps > trained)[-FARTHEST:]
    return all(cells[steps] >= RIGHT for steps in far) if far else None


@dataclass(frozen=True)
class Contender:
    """The finished runs of a task that differ in their seed alone."""

    task: str
    name: str
    runs: tuple[Run, ...]

    @property
    def trained(self) -> int:
        return int(self.runs[0].fields["data.train_steps"])

    @property
    def steps(self) -> list[int]:
        """What all its runs were asked for."""
        return sorted(set.intersection(*(set(run.validation["steps"]) for run in self.runs)))

    def shares(self, steps: int) -> list[float]:
        """Of right cells, a run each."""
        lasts = [run.validation for run in self.runs]
        return [last["cells_by_steps"][last["steps"].index(steps)] for last in lasts]

    def going_on(self) -> int | None:
        """How many runs do; None where it was not asked."""
        columns = [self.shares(steps) for steps in self.steps]
        found = [
            goes_on(dict(zip(self.steps, own, strict=True)), self.trained)
            for own in zip(*columns, strict=True)
        ]
        return None if None in found else sum(map(bool, found))

    def learned_at(self, histories: Histories) -> float | None:
        """Training step of the first validation that has the trained steps right, the median over runs."""
        firsts = [
            next((one["step"] for one in histories[run].validations if one.get("exact", 0) >= LEARNED), None)
            for run in self.runs
        ]
        found = [first for first in firsts if first is not None]
        return median(found) if len(found) == len(firsts) else None


def is_iterated(run: Run) -> bool:
    return run.stamp.get("task") == "iterate" and run.state == "finished" and "steps" in run.validation


def contenders(runs: Sequence[Run]) -> dict[str, list[Contender]]:
    """Task → its contenders, those that go on furthest first."""
    groups: dict[str, list[Run]] = {}
    for run in filter(is_iterated, runs):
        groups.setdefault(json.dumps(_defining(run), sort_keys=True), []).append(run)
    named: dict[tuple[str, str], list[tuple[Run, ...]]] = {}
    for own in groups.values():
        named.setdefault((task_name(own[0]), rule_name(own[0])), []).append(tuple(own))
    found: dict[str, list[Contender]] = {}
    for (task, name), alike in named.items():
        told = differing([own[0] for own in alike])
        for seeds in alike:
            more = [f"{field.partition('.')[2]} {seeds[0].fields.get(field)}" for field in told]
            found.setdefault(task, []).append(Contender(task, ", ".join([name, *more]), seeds))
    for rivals in found.values():
        rivals.sort(key=lambda one: fmean(run.validation.get("beyond") or 0.0 for run in one.runs))
    return found


def _defining(run: Run) -> dict[str, Any]:
    """All that tells it from other runs, but for the seed; the arithmetic too."""
    own = {name: value for name, value in run.fields.items() if name.startswith(DEFINING)}
    return {**own, "device.precision": _execution(run)}


def _execution(run: Run) -> str:
    execution = run.stamp.get("execution")
    return str(execution.get("precision")) if isinstance(execution, dict) else ""


def task_name(run: Run) -> str:
    fields = run.fields
    rule = f" of rule {fields['data.rule']}" if fields["data.task"] == "automaton" else ""
    size, trained = fields["data.length"], fields["data.train_steps"]
    return f"{fields['data.task']}{rule}, length {size}, trained on 1 to {trained} steps"


def rule_name(run: Run) -> str:
    """The block, and what else tells runs apart: stack or loop, rounds, rate, noise."""
    fields = run.fields
    blocks, rounds = fields["model.blocks"], fields["model.rounds"]
    parts: list[Any] = [method(run), f"{blocks} layers" if rounds == 1 else f"K={blocks}"]
    parts += [f"rounds {fields['rounds.sample']}"] * (rounds > 1 and fields["rounds.sample"] != "steps")
    parts += ["α of each R"] * bool(fields.get("model.recompute_alpha"))
    parts += [f"rate {fields['optim.peak_lr']:g}"]
    parts += [f"noise {fields['rounds.noise']:g}"] * bool(fields.get("rounds.noise"))
    return ", ".join(parts)


def beyond_table(task: str, own: Sequence[Contender], histories: Histories, name: str) -> Table:
    steps = sorted(set.union(*(set(one.steps) for one in own)))
    return Table(
        name,
        f"Share of cells right by steps: {task}",
        ["rule", "seeds", "extrapolates", "95%", "learned at step", *(str(h) for h in steps)],
        [[*_head(one, histories), *(_shares(one, h) for h in steps)] for one in own],
        f"extrapolates: runs with {RIGHT:.0%} of the cells right at the {FARTHEST} largest numbers of steps, "
        f"95%: Wilson's interval; learned at step: the first validation with {LEARNED:.0%} of the whole "
        "answers right inside the trained steps, the median over seeds; then the mean share of right cells, "
        "and its lowest and highest seed where they differ.",
    )


def _head(one: Contender, histories: Histories) -> list[str]:
    count, learned = one.going_on(), one.learned_at(histories)
    seeds = len(one.runs)
    low, high = wilson(count or 0, seeds)
    going = [MISSING, MISSING] if count is None else [f"{count}/{seeds}", f"{low:.2f}–{high:.2f}"]
    return [one.name, str(seeds), *going, MISSING if learned is None else f"{learned:,.0f}"]


def _shares(one: Contender, steps: int) -> str:
    if steps not in one.steps:
        return MISSING
    shares = one.shares(steps)
    spread = f" ({min(shares):.2f}–{max(shares):.2f})" if max(shares) - min(shares) >= 0.005 else ""
    return f"{fmean(shares):.3f}{spread}"


def beyond_figure(own: Sequence[Contender]) -> Figure:
    """Mean share of right cells against steps, a line for the best rate and noise of each rule."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    best = {rule_name(one.runs[0]).rpartition(", rate ")[0]: one for one in reversed(own)}
    for rule, colour in colours(reversed(best)).items():
        one = best[rule]
        means = [fmean(one.shares(h)) for h in one.steps]
        axes.plot(one.steps, means, "o-", ms=3, lw=1.4, color=colour, label=one.name)
    axes.axvspan(0.9, own[0].trained, color=INK, alpha=0.12, lw=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("steps asked for (shaded: trained)")
    axes.set_ylabel("share of cells right")
    return finish(figure, legend=axes)
