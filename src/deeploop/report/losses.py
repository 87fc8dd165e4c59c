"""Charts of losses over training, against R and the learning rate; a table over test-time depth. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from deeploop.report import listing
from deeploop.report.groups import (
    Cell,
    Histories,
    along,
    cells,
    in_legend,
    is_language,
    labels,
    letter,
    method,
    spread,
)
from deeploop.report.plots import INK, Chart, Line, Panel, looks, running_mean
from deeploop.report.results import read_depths
from deeploop.report.runs import Run
from deeploop.report.tables import MISSING, Table


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


START = 0.1  # of a run's steps: a scale from there on shows what runs differ in
FAINT = 0.25


def curves(runs: Sequence[Run], histories: Histories) -> list[Chart]:
    """Plot the training loss of every run, a panel for each R; validations are points, the unigram floor is
    dashed.

    Of the cells that share a name in the legend, those that do not end lowest are faint.
    """
    charts: list[Chart] = []
    for title, own in comparisons(runs).items():
        shown = [run for run in own if len(histories[run].curve) > 1]
        if not shown:
            continue
        by_rounds: dict[Any, list[Cell]] = {}
        for cell in cells(shown):
            by_rounds.setdefault(cell.first.fields.get("model.rounds"), []).append(cell)
        by_rounds = dict(sorted(by_rounds.items(), key=lambda item: item[0] or 0))
        groups = [cell for found in by_rounds.values() for cell in found]
        named = dict(zip(map(id, groups), labels(groups, but=("model.rounds",)), strict=True))
        called = in_legend(named.values())
        named = {key: called[name] for key, name in named.items()}
        look = looks(named.values())
        panels = []
        for R, found in by_rounds.items():
            lowest = _lowest(found, named, histories)
            lines = [
                line
                for cell in found
                for line in _curve(cell, named[id(cell)], look, histories, faint=id(cell) not in lowest)
            ]
            floors = [
                run.validation["floor"] for cell in found for run in cell.runs if run.validation.get("floor")
            ]
            panels.append(
                Panel(
                    lines,
                    f"R = {R}" if len(by_rounds) > 1 else "",
                    "training step",
                    f"loss (nats per {found[0].first.unit})",
                    level=(floors[0], f"unigram floor {floors[0]:.2f}") if floors else None,
                )
            )
        y_range = _after_the_start([line for panel in panels for line in panel.lines])
        caption = f"Training loss (lines, means of up to 5) and validation loss (points): {title}."
        if len({*named.values()}) < len(groups):
            caption += " Faint: settings of a method that do not end lowest."
        charts.append(
            Chart(
                f"curves-{letter(len(charts)).lower()}",
                caption,
                [replace(panel, y_range=y_range) for panel in panels],
                2 if len(panels) == 4 else 3,
                height=4,
            )
        )
    return charts


def _lowest(found: Sequence[Cell], named: Mapping[int, str], histories: Histories) -> set[int]:
    """The ids of the cells with the lowest final loss of their name."""
    best: dict[str, tuple[float, int]] = {}
    for cell in found:
        losses = cell.losses(histories)
        own = fmean(losses) if losses else math.inf, id(cell)
        best[named[id(cell)]] = min(own, best.get(named[id(cell)], own))
    return {one for _, one in best.values()}


def _after_the_start(lines: Sequence[Line]) -> tuple[float, float]:
    """The range of the losses without those of each line's first steps."""
    points = [(x / (max(line.x) or 1), y) for line in lines for x, y in zip(line.x, line.y, strict=True)]
    losses = [y for share, y in points if share >= START]
    low, high = min(losses), max(losses)
    room = 0.05 * (high - low or 1)
    return low - room, high + room


def _curve(
    cell: Cell, name: str, look: Mapping[str, tuple[str, str]], histories: Histories, *, faint: bool
) -> list[Line]:
    colour, dashes = look[name]
    strength = FAINT if faint else 0.9
    lines = []
    for run in cell.runs:
        steps, losses = zip(*histories[run].curve, strict=True)
        smooth = running_mean(losses, _window(steps))
        lines.append(Line(steps, smooth, "" if faint else name, colour, dashes, 1.3, strength=strength))
        points = [(one["step"], one["loss"]) for one in histories[run].validations if one.get("loss")]
        if points:
            steps, losses = zip(*points, strict=True)
            lines.append(Line(steps, losses, colour=colour, style=".", size=5, strength=strength))
    return lines


def _window(steps: Sequence[int]) -> int:
    """Number of logged losses to average: at most 5, over at most a twentieth of the run, so that a curve
    hardly lags.
    """
    return max(1, min(5, len(steps) // 20))


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
