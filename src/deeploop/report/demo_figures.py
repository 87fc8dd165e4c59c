"""The demo's two figures: the row as it was continued by each model, and accuracy against steps. No torch."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from deeploop.report.plots import COLOURS, INK, RULE_COLOURS, quiet

MODEL_COLOURS = {**RULE_COLOURS, "stack": COLOURS[3]}
WRONG = "#e0244e"  # no rule's colour
WRONG_CELLS = {1: (1.0, "wrong: says 1"), 0: (0.5, "wrong: says 0"), 2: (0.25, "wrong: says neither 0 nor 1")}
"""What a model says in place of the truth → how strong the red is, and its name in the legend."""
CLOSE = 16  # steps of the enlarged beginning


def tapes(record: dict[str, Any]) -> Figure:
    """A strip per model: cells from top to bottom, steps from left to right, wrong cells in red.

    To the left the beginning enlarged, with the trained steps shaded; to the right all steps.
    """
    truth, trained = _cells(record["truth"]), record["trained_steps"]
    strips = {"truth": truth}
    for name, own in record["models"].items():
        strips[name] = np.concatenate([truth[:1], _cells(own["states"])])  # the start is given
    figure = Figure(figsize=(11, 0.6 + 1.25 * len(strips)), layout="constrained")
    grid = figure.subplots(len(strips), 2, sharex="col", squeeze=False, gridspec_kw={"width_ratios": [2, 9]})
    for (name, cells), (left, right) in zip(strips.items(), grid, strict=True):
        for axes in (left, right):
            _draw_strip(axes, cells, cells != truth, trained)
        left.set_xlim(-0.5, CLOSE + 0.5)
        _mark_trained(left, trained)
        style = {"color": MODEL_COLOURS.get(name, INK), "fontweight": "bold", "fontsize": 11}
        left.set_ylabel(name, rotation=0, ha="right", va="center", **style)
        said = f"rule {record['rule']}" if name == "truth" else _first_wrong(cells, truth)
        right.set_title(said, loc="right", fontsize=9, color=INK, pad=3)
    grid[0, 0].set_title(f"trained: 1 to {trained}", loc="left", fontsize=9, color=INK, pad=7)
    for axes, steps in zip(grid[-1], ((9, CLOSE), (24, 50, 77, 100, 127, 150, len(truth) - 1)), strict=True):
        axes.xaxis.set_major_locator(FixedLocator([0, trained, *steps]))
        axes.set_xlabel("steps", color=INK)
    _draw_legend(figure, {int(value) for cells in strips.values() for value in cells[cells != truth]})
    return figure


def _draw_legend(figure: Figure, said: set[int]) -> None:
    """What the colours mean: that of a 1, and those of the wrong cells that there are."""
    patches = [Patch(color=INK, lw=0, label="1 (0 is white)")]
    patches += [
        Patch(color=to_rgba(WRONG, strength), lw=0, label=label)
        for value, (strength, label) in WRONG_CELLS.items()
        if value in said
    ]
    figure.legend(
        handles=patches,
        loc="outside lower right",
        ncols=len(patches),
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )


def _cells(states: list[str]) -> np.ndarray:
    """(steps, cells) of 0 and 1, 2 for what is neither."""
    return np.array([["01".find(cell) % 3 for cell in row] for row in states])


def _draw_strip(axes: Axes, cells: np.ndarray, wrong: np.ndarray, trained: int) -> None:
    """Ones in ink, zeros empty; where they are wrong in red, paler for a zero and palest for neither."""
    colours = np.zeros((*cells.shape, 4))
    colours[cells == 1] = to_rgba(INK)
    for value, (strength, _) in WRONG_CELLS.items():
        colours[wrong & (cells == value)] = to_rgba(WRONG, strength)
    axes.imshow(colours.swapaxes(0, 1), aspect="auto", interpolation="none")
    axes.axvspan(0.5, trained + 0.5, color=INK, alpha=0.3, lw=0, zorder=0)  # behind the cells
    quiet(axes)
    axes.grid(visible=False)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _mark_trained(axes: Axes, trained: int) -> None:
    """A bar above the trained steps."""
    above = axes.get_xaxis_transform()
    axes.plot((0.5, trained + 0.5), (1.05, 1.05), color=INK, lw=2.5, clip_on=False, transform=above)


def _first_wrong(cells: np.ndarray, truth: np.ndarray) -> str:
    """Where a model first errs on the drawn row, and how often it does."""
    wrong = cells != truth
    if not wrong.any():
        return f"no cell is wrong in {len(truth) - 1} steps"
    return f"first wrong cell at step {int(wrong.any(1).argmax())}; {wrong.mean():.0%} of all cells are wrong"


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
    axes.text(1, 0.03, "trained", transform=axes.get_xaxis_transform(), fontsize=9)
    axes.legend(frameon=False, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)
    quiet(axes)
    return figure
