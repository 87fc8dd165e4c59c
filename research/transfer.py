"""Does a rule keep its learning rate as R grows? What research/rates.py finds, as two tables and a figure.

python -m research.transfer runs/sweeps/transfer-gpu
"""

import math
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from deeploop.report.groups import Histories
from deeploop.report.plots import INK, graded, plain, quiet
from deeploop.report.runs import find_runs
from deeploop.report.tables import MISSING, Table, number
from research.rates import (
    JUDGED_AT,
    MOST_REGRET,
    MOST_SLOPE,
    Cell,
    Curve,
    Interval,
    Optimum,
    Study,
    Transfer,
    find_studies,
)

CRITERION = f"|slope| < {MOST_SLOPE:g} and a regret of at most {MOST_REGRET:g} nats at R = {JUDGED_AT}"


# ── Tables ──────────────────────────────────────────────────────────────────────────────────────────────
def rules_table(study: Study) -> Table:
    """A row for each rule: best rates, their slope, the regrets, the verdict."""
    rounds = study.rounds
    later = [R for R in rounds if R > 1]
    rows = [
        [
            rule.rule,
            *(best_rate(rule.optima.get(R)) for R in rounds),
            *slope_cells(rule),
            *(regret(rule.regret(R)) for R in later),
            *(number(rule.optima[R].loss if R in rule.optima else None, ".4f") for R in rounds),
            rule.verdict,
        ]
        for rule in study.rules.values()
    ]
    header = [
        "rule",
        *(f"η* R={R}" for R in rounds),
        "slope",
        "95%",
        "95% over",
        *(f"regret R={R}" for R in later),
        *(f"best loss R={R}" for R in rounds),
        "keeps its rate?",
    ]
    note = (
        "η*: best peak rate, by a parabola in log rate through the best cell and its neighbours, [95%] over "
        "seeds. edge: no rate was run beyond the best, or none with its seeds; cliff: a seed beside it was "
        "lost; both are the rate of that cell. slope: d ln η*/d ln R by least squares over all R, 95% by "
        "Student's t over the slopes of single seeds, else (the fit) over what least squares leave. regret: "
        "loss at R with R = 1's η*, minus the best loss at R, in nats per token. best loss: the parabola's "
        "lowest value, over the seeds that its three cells share, so it may lie below every run; at an edge "
        f"or a cliff the mean of that cell over all its seeds. The criterion: {CRITERION}."
    )
    return Table("rates", f"Does the best learning rate hold as R grows? {study.title}", header, rows, note)


def losses_table(study: Study) -> Table:
    """Loss for each rule, R and peak rate."""
    peaks = study.peaks
    rows = []
    for rule in study.rules.values():
        for R, curve in rule.curves.items():
            cells = {cell.peak: cell for cell in curve.cells}
            rows.append([rule.rule, str(R), *(loss(cells.get(peak)) for peak in peaks)])
    note = (
        "Mean over the seeds that trained (how many); a rate at which a seed collapsed or diverged is no "
        "candidate for the best."
    )
    header = ["rule", "R", *(f"{peak:g}" for peak in peaks)]
    return Table("losses", f"Validation loss against peak rate: {study.title}", header, rows, note)


def best_rate(optimum: Optimum | None) -> str:
    if optimum is None:
        return MISSING
    interval = f" [{_range(optimum.interval, '.2g')}]" if optimum.interval else ""
    mark = f" ({optimum.mark})" if optimum.mark else ""
    return f"{optimum.peak:.2e}{interval}{mark}"


def slope_cells(rule: Transfer) -> list[str]:
    if rule.slope is None:
        return [MISSING] * 3
    interval = rule.slope.interval
    told = [_range(interval, ".2f"), rule.slope.of] if interval else [MISSING] * 2
    bound = "at the edge: " if "edge" in rule.marks.values() else ""
    return [f"{bound}{rule.slope.value:+.3f}", *told]


def _range(interval: Interval, form: str) -> str:
    return " to ".join(format(end, form) for end in interval)


def regret(value: float | None) -> str:
    return "lost" if value == math.inf else number(value, ".4f")


def loss(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    lost = f"{len(cell.lost)} of {len(cell.lost) + len(cell.losses)} lost" if cell.lost else ""
    if not cell.losses:
        return "lost"
    return f"{cell.mean():.4f} ({lost or len(cell.losses)})"


# ── Figure ──────────────────────────────────────────────────────────────────────────────────────────────
def transfer_figure(study: Study) -> Figure:
    """Loss against peak rate: a panel for each rule, a curve for each R, one scale for all."""
    low, high = y_range(study)
    wide = min(3, len(study.rules))
    tall = -(-len(study.rules) // wide)
    figure = Figure(figsize=(max(5.6, 3.4 * wide), 3.0 * tall + 0.6), layout="constrained")
    grid = figure.subplots(tall, wide, sharex=True, sharey=True, squeeze=False)
    colours = dict(zip(study.rounds, graded(len(study.rounds)), strict=True))
    for axes, rule in zip(grid.flat, study.rules.values(), strict=False):
        for place, (R, curve) in enumerate(rule.curves.items()):
            draw_curve(axes, curve, colours[R])
            # Collapsed cells stand above the scale, those of one rate one above the other.
            lost = [cell.peak for cell in curve.cells if cell.lost]
            top = high + (high - low) * (0.04 + 0.05 * place)
            axes.plot(lost, [top] * len(lost), "x", color=colours[R], ms=5, mew=1.4)
        if 1 in rule.optima:
            axes.axvline(rule.optima[1].peak, color=INK, ls=":", lw=1)
        axes.set_title(plain(rule.rule), fontsize=10)
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(study.rules) :]:
        axes.set_visible(False)
    axes = grid[0, 0]
    axes.set_ylim(low, high + (high - low) * (0.05 + 0.05 * len(study.rounds)))
    axes.set_xscale("log", base=2)
    for each in grid.flat:
        each.xaxis.set_major_locator(FixedLocator(study.peaks))
        each.xaxis.set_minor_locator(NullLocator())
        each.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        each.xaxis.set_minor_formatter(NullFormatter())
        each.tick_params(axis="x", labelsize=8)
    for row in grid:
        row[0].set_ylabel("validation loss (nats per token)")
    for each in grid.flat[len(study.rules) - wide : len(study.rules)]:
        each.set_xlabel("peak learning rate")
    draw_legend(figure, study, colours)
    for axes in figure.axes:
        quiet(axes)
    return figure


def y_range(study: Study) -> Interval:
    """The scale that shows every curve around its best; what lies higher leaves through the top."""
    shown = [
        cell.mean(curve.seeds)
        for rule in study.rules.values()
        for curve in rule.curves.values()
        for cell in curve.around
    ]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low)
    return low - margin, high + margin


def draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    """Means over seeds as a line, single runs as dots, the best rate as a diamond, open if it is marked."""
    whole = [cell for cell in curve.cells if not cell.lost]
    axes.plot([c.peak for c in whole], [c.mean(curve.seeds) for c in whole], ".-", color=colour, lw=1.5)
    for cell in whole:
        axes.plot([cell.peak] * len(cell.losses), [*cell.losses.values()], ".", color=colour, ms=3, alpha=0.5)
    if best := curve.optimum:
        face = "none" if best.mark else colour
        axes.plot([best.peak], [best.loss], "D", mec=colour, mfc=face, ms=6, zorder=5)


def draw_legend(figure: Figure, study: Study, colours: dict[int, str]) -> None:
    axes = figure.axes[0]
    handles = [axes.plot([], [], "-", color=colours[R], lw=1.5, label=f"R = {R}")[0] for R in study.rounds]
    for style, label, face in (
        ("D", "best rate η*", INK),
        ("D", "η* at an edge or a cliff", "none"),
        ("x", "a seed collapsed or diverged", INK),
    ):
        handles += axes.plot([], [], style, mec=INK, mfc=face, ms=5, label=label)
    handles += axes.plot([], [], ":", color=INK, lw=1, label="η* of R = 1")
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=8
    )


def caption(study: Study) -> str:
    """The caption: what the figure shows."""
    told = {
        word: [rule.rule for rule in study.rules.values() if rule.transfers is answer]
        for word, answer in (("keep it", True), ("do not", False), ("are open", None))
    }
    verdicts = "; ".join(f"{word}: {', '.join(names)}" for word, names in told.items() if names)
    return (
        "A rule that keeps its learning rate has its diamonds on the dotted line, R = 1's best rate, and its "
        f"curves do not rise with R. By the criterion ({CRITERION}) these {verdicts}. Crosses above "
        f"the scale: a seed collapsed or diverged. {study.title}."
    )


def main() -> None:
    """Print both tables of every study among the runs."""
    for study in find_studies(find_runs([Path(word) for word in sys.argv[1:]]), Histories()):
        if study.over_rounds:
            for table in (rules_table(study), losses_table(study)):
                print(f"\n{table.title}\n\n{table.text()}\n\n{table.note}")


if __name__ == "__main__":
    main()
