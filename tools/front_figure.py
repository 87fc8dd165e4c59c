"""Draws README's picture, docs/figures/front.png, from docs/results (`make results`).

Left: loss against peak learning rate by the number of rounds, a panel per rule. Right: loops trained on 1 to
4 steps of an automaton, run for 200 (`docs/results/demo-seeds`: seeds that were named before they were run).
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from deeploop.report.beyond import goes_on
from deeploop.report.groups import Histories
from deeploop.report.plots import INK, RULE_COLOURS, quiet, round_colours, save_png
from deeploop.report.runs import Run, find_runs
from deeploop.report.transfer import Study, find_studies
from deeploop.report.transfer_views import draw_curve

DOCS = Path(__file__).resolve().parent.parent / "docs"
RULES = {"pre-norm": "pre-norm", "pre-norm 1/N": "1/N", "flat": "flat"}  # name in the study → in the picture
SCALE = (5.05, 5.50)  # nats per token; what lies higher leaves through the top
LOST = 5.465  # where a rate at which a seed was lost is marked
TRAINED = 4  # steps
TEXT = "#404040"
IN_AXES = {"xycoords": ("axes fraction", "data")}
LABEL = {"fontsize": 11, "fontweight": "bold"}


def front_figure(results: Path) -> Figure:
    """Three panels of loss against rate, one of accuracy against steps."""
    figure = Figure(figsize=(11.2, 3.5), layout="constrained")
    figure.get_layout_engine().set(rect=(0.006, 0.01, 0.988, 0.98))
    grid = figure.subplots(1, 4, gridspec_kw={"width_ratios": [1, 1, 1, 1.35]})
    study = next(
        one for one in find_studies(find_runs([results / "transfer"]), Histories()) if one.over_rounds
    )
    for axes, (rule, name) in zip(grid, RULES.items(), strict=False):
        draw_rates(axes, study, rule)
        axes.set_title(name, fontsize=12, fontweight="bold")
    grid[0].set_ylabel("validation loss (nats per token)")
    for axes in grid[1:3]:
        axes.tick_params(labelleft=False)
    grid[1].set_xlabel("peak learning rate")
    grid[1].legend(frameon=False, labelcolor=TEXT, fontsize=10, loc="upper center")
    grid[2].annotate(
        "× a seed does not train", (0.98, LOST - 0.08), ha="right", color=TEXT, fontsize=10, **IN_AXES
    )
    draw_depth(grid[3], find_runs([results / "demo-seeds"]))
    for axes in grid:
        axes.tick_params(labelsize=10, colors=TEXT)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_color(TEXT)
    return figure


def draw_rates(axes: Axes, study: Study, rule: str) -> None:
    """One rule's loss against peak rate, a curve per R; × marks a rate at which a seed was lost."""
    quiet(axes)
    for place, (R, colour) in enumerate(round_colours(study.rounds).items()):
        curve = study.rules[rule].curves.get(R)
        if curve is None or len(curve.cells) < 3:  # no curve
            continue
        draw_curve(axes, curve, colour)
        axes.plot([], [], "-", color=colour, lw=2, label=f"R = {R}")
        lost = [cell.peak for cell in curve.cells if cell.lost]
        axes.plot(lost, [LOST - 0.018 * place] * len(lost), "x", color=colour, ms=6, mew=1.6)
    axes.set_xscale("log", base=2)
    axes.set_ylim(*SCALE)
    axes.set_xlim(study.peaks[0] / 1.25, study.peaks[-1] * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(study.peaks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 1e3:g}e-3"))


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
        label = f"{name}: {reached} of {len(own)} go on"
        axes.annotate(label, (190, height), ha="right", va="center", color=RULE_COLOURS[name], **LABEL)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.04)
    axes.set_xlim(1, 200)
    axes.xaxis.set_major_locator(FixedLocator([1, 4, 16, 64, 200]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title("200 rounds, trained on 4", fontsize=12, fontweight="bold")
    axes.set_xlabel("rounds = steps of the automaton")
    axes.set_ylabel("share of cells right (5 seeds each)")


if __name__ == "__main__":
    (DOCS / "figures").mkdir(exist_ok=True)
    save_png(front_figure(DOCS / "results"), DOCS / "figures" / "front.png")
