"""The demo's two figures: the row as it was continued by each model, and accuracy against steps. No torch."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from deeploop.report.plots import COLOURS, INK, RULE_COLOURS, quiet

MODEL_COLOURS = {**RULE_COLOURS, "stack": COLOURS[3]}
WRONG = "#e0244e"  # no rule's colour
CLOSE = 16  # steps of the enlarged beginning


def tapes(record: dict[str, Any]) -> Figure:
    """A strip per model: cells from top to bottom, steps from left to right, wrong cells in red.

    To the left the beginning enlarged, with the trained steps shaded; to the right all steps.
    """
    truth, models = _cells(record["truth"]), record["models"]
    strips = [("truth", INK, truth)]
    strips += [(name, MODEL_COLOURS[name], _cells(own["states"])) for name, own in models.items()]
    figure = Figure(figsize=(11, 0.4 + 1.25 * len(strips)), layout="constrained")
    grid = figure.subplots(len(strips), 2, sharex="col", squeeze=False, gridspec_kw={"width_ratios": [2, 9]})
    for (name, colour, cells), (left, right) in zip(strips, grid, strict=True):
        right_cells = cells if name == "truth" else np.concatenate([truth[:1], cells])  # the start is given
        for axes in (left, right):
            _draw_cells(axes, right_cells, right_cells != truth)
            _shade_trained(axes, record["trained_steps"])
            quiet(axes)
            axes.grid(visible=False)
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
        left.set_xlim(-0.5, CLOSE + 0.5)
        left.set_ylabel(
            name, rotation=0, ha="right", va="center", color=colour, fontweight="bold", fontsize=11
        )
        note = (
            "where each row goes by rule " + str(record["rule"])
            if name == "truth"
            else _share(right_cells, truth)
        )
        right.set_title(note, loc="left", fontsize=9, color=INK, pad=3)
    grid[0, 0].set_title(f"trained: 1 to {record['trained_steps']}", loc="left", fontsize=9, color=INK, pad=6)
    for axes in grid[-1]:
        axes.set_xlabel("steps", color=INK)
    last = len(truth) - 1
    grid[-1, 1].xaxis.set_major_locator(
        FixedLocator([0, record["trained_steps"], 24, 50, 77, 100, 127, 150, last])
    )
    grid[-1, 0].xaxis.set_major_locator(FixedLocator([0, record["trained_steps"], 9, CLOSE]))
    return figure


def _cells(states: list[str]) -> np.ndarray:
    """(steps, cells) of 0 and 1, 2 for what is neither."""
    return np.array([["01".find(cell) % 3 for cell in row] for row in states])


def _draw_cells(axes: Axes, cells: np.ndarray, wrong: np.ndarray) -> None:
    """Ones in ink, zeros empty; where they are wrong in red, a pale one for a zero."""
    colours = np.zeros((*cells.shape, 4))
    colours[cells == 1] = to_rgba(INK)
    colours[wrong & (cells == 1)] = to_rgba(WRONG)
    colours[wrong & (cells != 1)] = to_rgba(WRONG, 0.45)
    axes.imshow(colours.swapaxes(0, 1), aspect="auto", interpolation="none")


def _shade_trained(axes: Axes, trained: int) -> None:
    """A tint behind the cells, and a bar above them."""
    axes.axvspan(0.5, trained + 0.5, color=INK, alpha=0.3, lw=0, zorder=0)
    axes.plot(
        (0.5, trained + 0.5),
        (1.04, 1.04),
        color=INK,
        lw=2.5,
        clip_on=False,
        solid_capstyle="butt",
        transform=axes.get_xaxis_transform(),
    )


def _share(cells: np.ndarray, truth: np.ndarray) -> str:
    wrong = (cells != truth).any(1)
    if not wrong.any():
        return f"no cell is wrong in {len(truth) - 1} steps"
    share = (cells != truth).mean()
    return f"first wrong cell at step {int(wrong.argmax())}; {share:.0%} of all cells are wrong"


def accuracy(record: dict[str, Any]) -> Figure:
    """Share of cells right against steps, on a logarithmic axis; copying is the baseline."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps = record["steps"]
    for name, own in record["models"].items():
        shares = [own["cells"][str(h)] for h in steps]
        axes.plot(steps, shares, "o-", color=MODEL_COLOURS[name], ms=3.5, lw=1.8, label=name)
    beyond = [h for h in steps if str(h) in record["copying"]]
    copied = [record["copying"][str(h)] for h in beyond]
    axes.plot(beyond, copied, "--", color=INK, lw=1.2, label="copying one of the first rows")
    axes.set_xscale("log")
    axes.axvspan(0.9, record["trained_steps"] * 1.1, color=INK, alpha=0.15, lw=0)
    axes.set_xlim(0.9, max(steps) * 1.1)
    low = min(0.4, *(min(own["cells"].values()) for own in record["models"].values()))
    axes.set_ylim(low - 0.02, 1.03)
    axes.xaxis.set_major_locator(FixedLocator([1, 2, 4, 9, 13, 24, 47, 77, 127, 200]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("steps = rounds")
    axes.set_ylabel("share of cells right")
    axes.text(1, 1, " trained", transform=axes.get_xaxis_transform(), va="top", fontsize=9)
    axes.legend(frameon=False, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)
    quiet(axes)
    return figure
