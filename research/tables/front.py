"""README's picture, docs/figures/front.png.

Left: loss against peak learning rate of five rules in long training on one seed, and the mean of four others.
Right: loops trained on 1 to 4 steps of an automaton, run for 200 (`docs/results/demo-seeds`: seeds that were
named before they were run).
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from deeploop.report.beyond import goes_on
from deeploop.report.plots import INK, RULE_COLOURS, quiet
from deeploop.report.runs import Run
from deeploop.rules import as_rule
from research.study import runs_of
from research.tables.long_training import chosen_rates, losses_of_seeds, losses_of_the_search

SHOWN = ("averaged", "factored", "deeploop", "flat", "prenorm")
TRAINED = 4  # steps
TEXT = "#404040"
LABEL: dict[str, Any] = {"fontsize": 11, "fontweight": "bold"}


def front_figure(results: Path) -> Figure:
    """Loss against rate in long training, and accuracy against steps."""
    layout = ConstrainedLayoutEngine(rect=(0.006, 0.01, 0.988, 0.98), wspace=0.06)
    figure = Figure(figsize=(9.2, 3.5), layout=layout)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.25, 1]})
    draw_rates(left, results / "long-training")
    draw_depth(right, runs_of(results / "demo-seeds"))
    for axes in (left, right):
        axes.tick_params(labelsize=10, colors=TEXT)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_color(TEXT)
    return figure


def draw_rates(axes: Axes, folder: Path) -> None:
    """A rule's losses at every rate of the search, and the mean of its four seeds as a diamond."""
    quiet(axes)
    searched, seeds, rates = losses_of_the_search(folder), losses_of_seeds(folder), chosen_rates(folder)
    for rule in SHOWN:
        name = as_rule(rule).label
        colour, curve = RULE_COLOURS[name], searched[rule]
        axes.plot([*curve], [*curve.values()], "-o", color=colour, lw=1.8, ms=4, alpha=0.75)
        axes.plot(rates[rule], fmean(seeds[rule].values()), "D", color=colour, ms=8, mec="white", zorder=3)
        lowest, loss = next(iter(curve.items()))
        axes.annotate(name, (lowest / 1.06, loss), color=colour, va="center", ha="right", **LABEL)
    axes.plot([], [], "-o", color=TEXT, lw=1.8, ms=4, label="search, one seed")
    axes.plot([], [], "D", color=TEXT, ms=8, mec="white", label="mean of 4 others")
    axes.legend(frameon=False, labelcolor=TEXT, fontsize=10, loc="upper right")
    axes.set_xscale("log", base=2)
    axes.set_xlim(3.2e-3, 7.5e-2)
    axes.xaxis.set_major_locator(FixedLocator([8e-3, 1.6e-2, 3.2e-2, 6.4e-2]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("held-out loss (nats per byte)")
    axes.set_title("R = 7, trained on 151 bytes per parameter", fontsize=12, fontweight="bold")


def curve_of(run: Run) -> dict[int, float]:
    """Steps → share of right cells."""
    return dict(zip(run.validation["steps"], run.validation["cells_by_steps"], strict=True))


def draw_depth(axes: Axes, runs: list[Run]) -> None:
    """Share of right cells against steps, a line per seed, for the flat and the pre-norm loop."""
    quiet(axes)
    names = {"flat": "flat", "prenorm": "pre-norm"}
    axes.axvspan(1, TRAINED, color=INK, alpha=0.18, lw=0)
    axes.annotate("trained", (2, 0.03), ha="center", fontsize=10, color=TEXT)
    for (rule, name), height in zip(names.items(), (0.93, 0.24), strict=True):
        own = [curve_of(run) for run in runs if run.axes["rule"] == rule]
        for shares in own:
            axes.plot([*shares], [*shares.values()], "-", color=RULE_COLOURS[name], lw=1.6, alpha=0.8)
        reached = sum(bool(goes_on(shares, TRAINED)) for shares in own)
        label = f"{name}: {reached} of {len(own)}"
        axes.annotate(label, (190, height), ha="right", va="center", color=RULE_COLOURS[name], **LABEL)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.04)
    axes.set_xlim(1, 200)
    axes.xaxis.set_major_locator(FixedLocator([1, 4, 16, 64, 200]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title("200 rounds, trained on 1 to 4", fontsize=12, fontweight="bold")
    axes.set_xlabel("rounds = steps of the automaton")
    axes.set_ylabel("share of cells right (5 seeds each)")
