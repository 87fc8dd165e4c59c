"""An iterated task's evaluation: tables, the matrix of rounds and steps, the space–time diagram. No torch."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deeploop.report.page import MISSING, text_table
from deeploop.report.plots import COLOURS, quiet

CELL = 0.42  # inches of a cell of the matrix


def report(folder: str, record: dict[str, Any]) -> str:
    """The result for a terminal: what was trained for first, then every number of rounds."""
    rule = f" of rule {record['rule']}" if record["task"] == "automaton" else ""
    parts = [
        f"{folder} at {record['checkpoint']}: {record['task']}{rule}, length {record['length']}, "
        f"{record['examples']:,} held-out instances; trained on 1 to {record['trained_steps']} steps, "
        f"rounds: {record['sample']}",
        by_steps(record),
        f"share of cells that are right, rounds × steps:\n\n{matrix(record)}",
        f"{record['seconds']:,.1f} s on {record['device']} ({record['precision']})",
    ]
    return "\n\n".join(parts)


def by_steps(record: dict[str, Any]) -> str:
    """A line for each number of steps, at the rounds that go with it; copying is the baseline."""
    rows = []
    for column, steps in enumerate(record["steps"]):
        copied = record["copying"].get(str(steps))
        if (R := asked_rounds(record, steps)) in record["rounds"]:
            row = record["rounds"].index(R)
            own = [record[name][row][column] for name in ("cells", "exact", "loss")]
            rows.append((str(steps), str(R), *map(_share, (*own, copied))))
    return text_table(("steps", "rounds", "cells", "exact", "loss", "copying"), rows)


def asked_rounds(record: dict[str, Any], steps: int) -> int:
    """The rounds that go with a number of steps, by what was trained."""
    rounds: int = steps if record["sample"] == "steps" else record["trained_rounds"]
    return rounds


def matrix(record: dict[str, Any]) -> str:
    header = (
        "rounds",
        *(f"{steps} steps" if at == 0 else str(steps) for at, steps in enumerate(record["steps"])),
    )
    rows = [(str(R), *map(_share, own)) for R, own in zip(record["rounds"], record["cells"], strict=True)]
    copied = ("copying", *(_share(record["copying"].get(str(steps))) for steps in record["steps"]))
    return text_table(header, [*rows, copied])


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def accuracy_matrix(record: dict[str, Any]) -> Figure:
    """Share of cells that are right, as a heat map of rounds and steps; trained ones are framed."""
    rounds, steps = record["rounds"], record["steps"]
    figure = Figure(figsize=(2.2 + CELL * len(steps), 1.6 + CELL * len(rounds)), layout="constrained")
    axes = figure.subplots()
    shares = np.array(record["cells"], dtype=float)
    axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, origin="lower", aspect="auto")
    axes.set_xticks(range(len(steps)), [str(h) for h in steps])
    axes.set_yticks(range(len(rounds)), [str(R) for R in rounds])
    axes.set_xlabel("steps asked for")
    axes.set_ylabel("rounds")
    axes.set_title(f"{record['task']}: share of cells right\n(framed: trained)")  # fits three columns
    for column, h in enumerate(steps):
        if h <= record["trained_steps"] and (R := asked_rounds(record, h)) in rounds:
            corner = column - 0.5, rounds.index(R) - 0.5
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, ec=COLOURS[1], lw=2))
    quiet(axes)
    axes.grid(visible=False)
    for (row, column), share in np.ndenumerate(shares):
        colour = "black" if share > 0.6 else "white"
        axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return figure


def space_time(truth: np.ndarray, model: np.ndarray, trained: int) -> Figure:
    """The states of one row from the first step down: truth, the model's, and where they differ.

    Both are (steps, cells); above the line is what training went up to.
    """
    steps = len(truth)
    height = min(12.0, max(2.5, 7 * steps / max(steps, 60)))
    figure = Figure(figsize=(7.2, height), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    wrong = truth != model
    titles = ("truth", "the model, a round for each step", f"different: {wrong.mean():.1%} of cells")
    for axes, title, picture in zip(panels, titles, (truth, model, wrong), strict=True):
        _picture(axes, picture, red=picture is wrong)
        axes.axhline(trained + 0.5, color=COLOURS[1], lw=1)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("cell")
        quiet(axes)
        axes.grid(visible=False)
    panels[0].set_ylabel(f"steps (trained: 1 to {trained}, above the line)")
    return figure


def _picture(axes: Axes, cells: np.ndarray, *, red: bool) -> None:
    steps, width = cells.shape
    extent = (0.5, width + 0.5, steps + 0.5, 0.5)
    colours = ListedColormap(["white", COLOURS[1] if red else "black"])
    axes.imshow(cells, cmap=colours, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
