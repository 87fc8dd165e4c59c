"""The views of a report on any runs: their tables, curves, comparisons, alignment and commands. No torch.

A view is a function of runs that returns tables and charts. `document.py` puts them in order.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from deeploop.report import listing
from deeploop.report.groups import (
    OF_A_METHOD,
    Cell,
    Histories,
    along,
    cells,
    in_legend,
    is_language,
    labels,
    letter,
    method,
    methods,
    repeats,
    setting,
    spread,
)
from deeploop.report.page import Part
from deeploop.report.plots import INK, Chart, Line, Panel, looks, running_mean
from deeploop.report.results import read_depths, read_diagnosis, read_evaluations, read_validations
from deeploop.report.runs import REASONERS, Run
from deeploop.report.tables import MISSING, Table, number


# ── Runs, and means over their seeds ────────────────────────────────────────────────────────────────────
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
        columns[f"loss, nats/{unit}"] = _mean_of(".4f", lambda run, unit=unit: _loss(run, unit, histories))
    columns |= {"solved, %": _mean_of(".1f", _exact), "cells, %": _mean_of(".1f", _cells)}
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


def _mean_of(form: str, value: Any) -> Any:
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


# ── Charts of losses ────────────────────────────────────────────────────────────────────────────────────
def comparisons(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Map titles to runs with comparable losses: one kind, one unit, the same data; the most runs first."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.fields and "data.path" in run.fields:
            found.setdefault(
                f"{listing.kind(run)} on {' '.join(run.corpora)}, nats per {run.unit}", []
            ).append(run)
        elif run.fields:
            task = run.fields.get("data.task", run.stamp.get("task"))
            found.setdefault(f"{listing.kind(run)}: {task}, nats per {run.unit}", []).append(run)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def curves(runs: Sequence[Run], histories: Histories) -> list[Chart]:
    """Plot the training loss of every run, a panel for each R; validations are points, the unigram floor is
    dashed.
    """
    charts: list[Chart] = []
    for title, own in comparisons(runs).items():
        shown = [run for run in own if len(histories[run].curve) > 1]
        if not shown:
            continue
        by_rounds: dict[Any, list[Cell]] = {}
        for cell in cells(shown):
            by_rounds.setdefault(cell.first.fields.get("model.rounds"), []).append(cell)
        groups = [cell for R in sorted(by_rounds, key=lambda R: R or 0) for cell in by_rounds[R]]
        named = dict(zip(map(id, groups), labels(groups, but=("model.rounds",)), strict=True))
        called = in_legend(named.values())
        named = {key: called[name] for key, name in named.items()}
        look = looks(named.values())
        panels = []
        for R in sorted(by_rounds, key=lambda R: R or 0):
            lines = [line for cell in by_rounds[R] for line in _curve(cell, named[id(cell)], look, histories)]
            floors = [run.validation["floor"] for cell in by_rounds[R] for run in cell.runs
                      if run.validation.get("floor")]  # fmt: skip
            unit = by_rounds[R][0].first.unit
            panels.append(
                Panel(
                    lines,
                    f"R = {R}" if len(by_rounds) > 1 else "",
                    "training step",
                    f"loss (nats per {unit})",
                    level=(floors[0], "unigram floor") if floors else None,
                )
            )
        caption = f"Training loss (lines, means of 5) and validation loss (points): {title}."
        charts.append(
            Chart(
                f"curves-{letter(len(charts)).lower()}",
                caption,
                panels,
                2 if len(panels) == 4 else 3,
                height=4,
            )
        )
    return charts


def _curve(cell: Cell, name: str, look: Mapping[str, tuple[str, str]], histories: Histories) -> list[Line]:
    colour, dashes = look[name]
    lines = []
    for run in cell.runs:
        steps, losses = zip(*histories[run].curve, strict=True)
        lines.append(Line(steps, running_mean(losses, 5), name, colour, dashes, 1.3, strength=0.9))
        points = [(one["step"], one["loss"]) for one in histories[run].validations if one.get("loss")]
        if points:
            steps, losses = zip(*points, strict=True)
            lines.append(Line(steps, losses, colour=colour, style=".", size=5))
    return lines


AXES = {"model.rounds": ("rounds", "rounds R"), "optim.peak_lr": ("rate", "peak learning rate")}


def against(runs: Sequence[Run], histories: Histories, field: str) -> list[Chart]:
    """Plot final loss against R or the peak rate, for settings run at several: means, and each run."""
    word, axis = AXES[field]
    charts: list[Chart] = []
    but = ["optim.floor_lr"] if field == "optim.peak_lr" else []
    for title, own in comparisons(runs).items():
        lines: dict[str, dict[float, list[float]]] = {}
        ended = [cell for cell in cells(own) if cell.losses(histories)]
        for name, found in along(ended, field, but=but).items():
            points = lines.setdefault(name, {})
            for cell in found:
                points.setdefault(cell.first.fields[field], []).extend(cell.losses(histories))
        if not lines:
            continue
        panel = loss_panel(lines, axis, own[0].unit, log=field == "optim.peak_lr")
        caption = f"Final validation loss against {axis}: {title}. Means, and each run as a dot."
        charts.append(
            Chart(f"loss-against-{word}-{letter(len(charts)).lower()}", caption, [panel], height=4.2)
        )
    return charts


def loss_panel(
    lines: Mapping[str, Mapping[Any, Sequence[float]]], axis: str, unit: str, *, log: bool
) -> Panel:
    """Plot mean losses, and each run as a dot; runs far above the better ones are triangles at the upper
    edge.
    """
    called = in_legend(lines)
    look = looks(called.values())
    losses = [[y for own in points.values() for y in (*own, fmean(own))] for points in lines.values()]
    top = ceiling(losses)
    kept = [y for own in losses for y in own if y <= top]
    low, room = min(kept), max(kept) - min(kept)
    edge = max(kept) + 0.12 * room
    drawn, texts = [], []
    for label, points in lines.items():
        colour, dashes = look[called[label]]
        means = {x: fmean(points[x]) for x in sorted(points)}
        shown = [y if y <= top else math.nan for y in means.values()]
        drawn.append(Line([*means], shown, called[label], colour, f"o{dashes}"))
        for x, own in points.items():
            inside = [y for y in own if y <= top]
            drawn.append(Line([x] * len(inside), inside, colour=colour, style=".", strength=0.6))
            if len(inside) < len(own):
                drawn.append(Line([x], [edge], colour=colour, style="^", size=6))
                texts.append((x, edge + 0.06 * room, f"{max(own):.2f}", INK))
    return Panel(
        drawn,
        x=axis,
        y=f"validation loss (nats per {unit})",
        log_x=2 if log else 0,
        x_ticks={x: f"{x:g}" for x in sorted({x for points in lines.values() for x in points})},
        y_range=(low - 0.06 * room, edge + 0.14 * room) if texts else None,
        texts=texts,
    )


def ceiling(rows: Sequence[Sequence[float]]) -> float:
    """Return the loss above which a scale would leave the better half of the rows less than a sixth of its
    height.

    That half has at least two rows, so a comparison of two is always shown whole.
    """
    ranked = sorted(filter(None, rows), key=max)
    better = [loss for row in ranked[: max(2, (len(ranked) + 1) // 2)] for loss in row]
    difference = max(better, default=0) - min(better, default=0)
    return min(better) + 6 * difference if difference else math.inf


# ── Loss at other depths ────────────────────────────────────────────────────────────────────────────────
DEPTHS_NOTE = (
    "Training: the last validation, at each R of data.validation_rounds. validate: what deeploop validate "
    "wrote, by checkpoint and text. A row has the same weights at every R. "
    "Mean ± standard deviation where a cell was run with several seeds."
)


def depths_table(runs: Sequence[Run]) -> Table | None:
    """Make a table with a row for each cell of a sweep or single run, by source of its losses; a column for
    each R.
    """
    found: dict[tuple[str, ...], list[dict[int, float]]] = {}
    for run in runs:
        if is_language(run) and run.ended:
            for read, losses in {"training": _by_rounds(run), **_validated(run)}.items():
                if losses:
                    found.setdefault((_place(run), method(run), run.unit, read), []).append(losses)
    if not found:
        return None
    depths = sorted({R for own in found.values() for losses in own for R in losses})
    columns: dict[str, Any] = {
        heading: lambda row, at=at: row[0][at]
        for at, heading in enumerate(("run", "method", "nats per", "measured by"))
    }
    columns |= {"seeds": lambda row: str(len(row[1]))}
    columns |= {f"R={R}": lambda row, R=R: _mean([own.get(R) for own in row[1]]) for R in depths}
    return Table.of("depths", "Validation loss at other rounds", found.items(), columns, DEPTHS_NOTE)


def _validated(run: Run) -> dict[str, dict[int, float]]:
    """Return what `deeploop validate` measured beyond the loss at the trained R."""
    trained = run.fields["model.rounds"]
    return {read: losses for read, losses in read_depths(run.files).items() if {*losses} - {trained}}


def _place(run: Run) -> str:
    return " ".join(str(own) for axis, own in run.axes.items() if axis != "seed") or run.name


def _by_rounds(run: Run) -> dict[int, float]:
    """Map R to loss; empty if the two lists are not what a validation writes."""
    depths, losses = (run.validation.get(name) for name in ("validation_rounds", "loss_by_rounds"))
    if not (isinstance(depths, list) and isinstance(losses, list) and len(depths) == len(losses)):
        return {}
    pairs = zip(depths, losses, strict=True)
    return {R: loss for R, loss in pairs if type(R) is int and isinstance(loss, int | float)}


def _mean(losses: Sequence[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    return spread(known) if known else MISSING


# ── Iterated tasks: deeper than trained ─────────────────────────────────────────────────────────────────
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
        columns[f"{steps} steps"] = _mean_of(".3f", lambda run, steps=steps: _shares(run).get(steps))
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


# ── κ_R ─────────────────────────────────────────────────────────────────────────────────────────────────
def kappas(run: Run, histories: Histories) -> list[dict[str, Any]]:
    """Return the diagnoses in the metrics, and the one of diagnose.json."""
    found = [record for record in histories[run].kappas if record.get("kappa") is not None]
    own = read_diagnosis(run.files)
    if own.get("kappa") is not None and "rounds" in own:
        found = [*(record for record in found if record["step"] != own.get("step")), own]
    return sorted(found, key=lambda record: record.get("step") or 0)


def kappa_parts(runs: Sequence[Run], histories: Histories) -> list[Part]:
    """Show κ_R of each run at its first and last diagnosis, over training and against R."""
    found = {run.name: (run, kappas(run, histories)) for run in runs if is_language(run)}
    found = {name: (run, own) for name, (run, own) in found.items() if own}
    if not found:
        return []
    rows = [(run, record) for run, own in found.values() for record in own[:1] + own[1:][-1:]]
    columns = {
        "run": lambda row: row[0].name,
        "method": lambda row: method(row[0]),
        "R": lambda row: str(row[1]["rounds"]),
        "step": lambda row: str(row[1].get("step", MISSING)),
        "updates": lambda row: str(row[1].get("updates", MISSING)),
        "κ_R": lambda row: number(row[1]["kappa"], ".3f"),
        "κ_R raw": lambda row: number(row[1].get("kappa_raw"), ".3f"),
        "token similarity": lambda row: number(row[1].get("similarity"), ".3f"),
    }
    title = "Visit alignment κ_R, first and last diagnosis of each run"
    note = "κ_R is at most R: visits that pull together give R, orthogonal ones at most 1."
    return [Table.of("kappa", title, rows, columns, note), kappa_chart([*found.values()])]


def kappa_chart(found: Sequence[tuple[Run, list[dict[str, Any]]]]) -> Chart:
    """Plot κ_R over training on the left, and against R at the last diagnosis on the right."""
    look = looks(sorted({method(run) for run, _ in found}))
    over_steps, over_rounds, most = [], [], max(own[0]["rounds"] for _, own in found)
    for run, own in found:
        colour, dashes = look[method(run)]
        steps, values = [one["step"] for one in own], [one["kappa"] for one in own]
        over_steps.append(Line(steps, values, method(run), colour, f"o{dashes}", 1.2, 3, strength=0.8))
        over_rounds.append(Line([own[0]["rounds"]], values[-1:], "", colour, "o", size=5, strength=0.8))
    if most > 1:
        over_rounds.append(Line([1, most], [1, most], "R, the most it can be", style="--", width=1))
    panels = [
        Panel(over_steps, "over training", "training step", "κ_R", whole_x=True),
        Panel(over_rounds, "at the last diagnosis", "rounds R", "κ_R", whole_x=True),
    ]
    return Chart("kappa", "κ_R, one line and one dot for each run.", panels, columns=2)


# ── Commands ────────────────────────────────────────────────────────────────────────────────────────────
def commands_table(runs: Sequence[Run], histories: Histories) -> Table:
    """Make a table of the command behind every number: training, resumes, validation, scoring, diagnosis."""
    rows = []
    for run in runs:
        found = [("train", words_of(run.stamp))]
        found += [("train", resumed(*resume)) for resume in histories[run].resumes]
        found += [("validate", words_of(record)) for record in read_validations(run.files)]
        found += [("eval", words_of(record)) for record in read_evaluations(run.files)]
        found.append(("diagnose", words_of(read_diagnosis(run.files))))
        code = str(run.stamp.get("git") or MISSING)[:10]
        rows += [[run.name, what, text, code] for what, text in found if text]
    return Table("commands", "The command behind every number", ["run", "for", "command", "code"], rows)


def words_of(record: Mapping[str, Any]) -> str:
    """Return the command line that a record keeps; empty if it keeps none."""
    words = record.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def resumed(step: int, changes: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={setting(new)} (was {setting(old)})" for name, (old, new) in changes.items())
    return f"then --resume at step {step:,} with {text}"
