"""The picture of a reasoner's evaluation with more at test time than in training. No torch."""

from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from deeploop.report.plots import INK, quiet, round_colours


def accuracy_against_passes(record: dict[str, Any]) -> Figure:
    """Puzzles solved against forward passes, a panel for each file that they come from."""
    parts = record.get("sources") or {record["kind"]: record}
    figure = Figure(figsize=(5.2 * len(parts), 3.6), layout="constrained")
    panels = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for axes, (name, part) in zip(panels, parts.items(), strict=True):
        _draw(axes, part["passes"])
        axes.set_title(name)
        counts = dict.fromkeys(str(row["answers"]) for row in part["passes"])
        answers = f" ({', '.join(counts)} answers)" if len(counts) > 1 else ""
        axes.set_xlabel(f"forward passes per puzzle{answers}")
        quiet(axes)
    panels[0].set_ylabel("solved (%)")
    panels[-1].legend(frameon=False, labelcolor=INK)
    return figure


def _draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """A line for each number of segments, along its answers; a dashed one joins single answers."""
    curves = {segments: list(own) for segments, own in groupby(rows, key=lambda row: row["segments"])}
    firsts = [own[0] for own in curves.values()]
    axes.plot(*_points(firsts), "--", color=INK, lw=1, label="one answer" if len(firsts) > 1 else None)
    for (segments, own), colour in zip(curves.items(), round_colours(list(curves)).values(), strict=True):
        axes.plot(*_points(own), "o-", color=colour, label=f"{segments} segments", ms=4, lw=1.6)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _points(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["passes"] for row in rows], [100 * row["exact"] for row in rows]
