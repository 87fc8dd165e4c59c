"""The figures of a report. No torch. The paper's numbers are dashed, ours solid."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from deeploop.paper import published
from deeploop.paper.published import ROUNDS, TASKS
from deeploop.report.escapes import Outcome, tally
from deeploop.report.groups import Histories, Setup, cure, method
from deeploop.report.ledger import kappas, speed
from deeploop.report.plots import COLOURS, INK, colours, quiet, running_mean
from deeploop.report.runs import Run
from deeploop.report.tables import accuracy, outcomes, scores
from deeploop.rules import DEEPLOOP, PRENORM

PAPER_COLOURS = {rule.name: rule.colour for rule in (PRENORM, DEEPLOOP)}
RED = "#d62728"


def plain(text: str) -> str:
    """A label as it is: matplotlib reads formulas between dollars, and hides what begins with _."""
    return "\u200b" * text.startswith("_") + text.replace("$", r"\$")


def legend_names(setup: Setup) -> dict[str, str]:
    """Row label → what a legend calls it: its method alone where variants are more than there are colours."""
    many = len(setup.rows) > len(COLOURS)
    return {
        label: plain(method(next(iter(cells.values())).runs[0]) if many else label)
        for label, cells in setup.rows.items()
    }


def finish(figure: Figure, *, legend: Axes | None = None) -> Figure:
    for axes in figure.axes:
        quiet(axes)
    if legend is not None and legend.get_legend_handles_labels()[0]:
        legend.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def loss_against_rounds(setup: Setup, histories: Histories) -> Figure | None:
    """Left ours, right the paper: each on a scale of its own, for the data differ."""
    if len(setup.rounds) < 2:
        return None
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_rows(left, setup, histories)
    left.set_title("here: mean, and each run")
    left.set_ylabel(f"validation loss (nats per {setup.unit})")
    for block, colour in PAPER_COLOURS.items():
        losses = [published.LOSS[setup.size, block, R].number for R in ROUNDS]
        right.plot(ROUNDS, losses, "o--", color=colour, label=published.METHODS[block], ms=4, lw=1.4)
    right.set_title(f"paper, GPT-2 {setup.size}")
    right.set_ylabel("nats per GPT-2 token")
    for axes in (left, right):
        axes.set_xticks(sorted({*ROUNDS, *setup.rounds}))
        axes.set_xlabel("rounds R")
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return finish(figure)


def draw_rows(axes: Axes, setup: Setup, histories: Histories) -> None:
    """A line for each row of the table; what lies far above the better ones stands at the upper edge."""
    called = legend_names(setup)
    own = colours(dict.fromkeys(called.values()))
    found = {
        label: {R: losses for R, cell in cells.items() if (losses := cell.losses(histories))}
        for label, cells in setup.rows.items()
    }
    rows = [[y for losses in points.values() for y in (*losses, fmean(losses))] for points in found.values()]
    top = ceiling(rows)
    shown, above = set(), []
    for label, points in found.items():
        name = called[label]
        for R, losses in points.items():
            axes.plot([R] * len(losses), losses, ".", color=own[name], alpha=0.6)
            above += [(R, loss, own[name]) for loss in far_off(losses, top)]
        means = [fmean(losses) for losses in points.values()]
        first = name if name not in shown else None
        axes.plot([*points], means, "o-", color=own[name], label=first, ms=4, lw=1.6)
        shown.add(name)
    if above:
        mark_above(axes, above, [y for row in rows for y in row if y <= top])


def ceiling(rows: Sequence[Sequence[float]]) -> float:
    """The loss above which a scale would leave the better half of the rows less than a sixth of its height.

    That half has two rows at least, so a comparison of two is always shown whole.
    """
    ranked = sorted(filter(None, rows), key=max)
    better = [loss for row in ranked[: max(2, (len(ranked) + 1) // 2)] for loss in row]
    spread = max(better, default=0) - min(better, default=0)
    return min(better) + 6 * spread if spread else math.inf


def far_off(losses: Sequence[float], top: float) -> list[float]:
    """What of a cell is marked above the scale: its mean, or single runs where the mean is in sight."""
    mean = fmean(losses)
    return [mean] if mean > top else [loss for loss in losses if loss > top]


def mark_above(axes: Axes, above: Sequence[tuple[int, float, str]], kept: Sequence[float]) -> None:
    """A triangle over its value for each (R, loss, colour), the greatest highest; a scale for the others."""
    most = max(Counter(R for R, _, _ in above).values())
    step = min(0.1, 0.4 / most)  # of the height, most of which is for the losses in sight
    placed: Counter[int] = Counter()
    across = axes.get_xaxis_transform()  # x is R, y a share of the height
    for R, loss, colour in sorted(above, reverse=True):
        at = (R, 0.98 - step * placed[R])
        axes.plot(*at, "^", color=colour, ms=5, transform=across)
        axes.annotate(
            f"{loss:.2f}", at, xycoords=across, xytext=(0, -4), textcoords="offset points", ha="center",
            va="top", fontsize=8,
        )  # fmt: skip
        placed[R] += 1
    axes.plot([], [], "^", color=INK, ms=5, label="above the scale")
    low, high = min(kept), max(kept)
    share = 0.03 + step * most
    axes.set_ylim(low - 0.05 * (high - low), high + 1.05 * (high - low) * share / (1 - share))


def loss_curves(setup: Setup, histories: Histories) -> Figure:
    """Training loss, a panel for each R, a line for each run; validations as points, unigram floor dashed."""
    called = legend_names(setup)
    own = colours(dict.fromkeys(called.values()))
    panels = {
        f"R = {R}": [
            (called[label], own[called[label]], run)
            for label, cells in setup.rows.items()
            for run in (cells[R].runs if R in cells else ())
        ]
        for R in setup.rounds
    }
    return draw_curves(panels, histories)


def exponent_curves(sweeps: dict[str, list[Run]], histories: Histories) -> Figure:
    """Training loss, a panel for each ramp, a line for each run, coloured by its exponent."""
    exponents = sorted({run.rule.p for runs in sweeps.values() for run in runs})
    shades = matplotlib.colormaps["viridis"].resampled(len(exponents) + 2)  # both ends vanish on some page
    own = {p: to_hex(shades(index + 1)) for index, p in enumerate(exponents)}
    panels = {
        plain(ramp): [
            (f"p = {run.rule.p:g}", own[run.rule.p], run) for run in sorted(runs, key=lambda run: run.rule.p)
        ]
        for ramp, runs in sweeps.items()
    }
    return draw_curves(panels, histories)


def draw_curves(panels: dict[str, list[tuple[str, str, Run]]], histories: Histories) -> Figure:
    """Title → label, colour and run of each line; one legend for all panels."""
    wide = 3 if len(panels) in (5, 6) else min(4, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(max(5.2, 3.1 * wide), 3.0 * tall + 0.8), layout="constrained")
    grid = figure.subplots(tall, wide, sharex=True, sharey=True, squeeze=False).flat
    named: dict[str, Line2D] = {}
    for (title, lines), axes in zip(panels.items(), grid, strict=False):
        for label, colour, run in lines:
            curve = histories[run].curve
            losses = running_mean([loss for _, loss in curve], 5)
            (line,) = axes.plot([step for step, _ in curve], losses, color=colour, lw=1.1, alpha=0.85)
            named.setdefault(label, line)
            points = [(one["step"], one["loss"]) for one in histories[run].validations if one.get("loss")]
            if points:
                axes.plot(*zip(*points, strict=True), ".", color=colour, ms=5, alpha=0.85)
                named["validation"] = Line2D([], [], marker=".", ls="", color=INK)
        floors = [run.validation["floor"] for *_, run in lines if run.validation.get("floor")]
        if floors:
            named["unigram floor"] = axes.axhline(floors[0], color=INK, ls="--", lw=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)  # the panel below may be an empty place
    for axes in list(grid):
        axes.set_visible(False)
    unit = next((run.unit for lines in panels.values() for *_, run in lines), "token")
    figure.axes[0].set_ylabel(f"loss (nats per {unit})")
    ranked = sorted(named, key=("validation", "unigram floor").count)
    fit = int(
        14 * figure.get_figwidth() / (6 + max(map(len, ranked)))
    )  # letters of the legend's size per inch
    figure.legend(
        [named[label] for label in ranked], ranked, loc="outside lower center", ncols=max(1, min(6, fit)),
        frameon=False, labelcolor=INK, fontsize=8,
    )  # fmt: skip
    return finish(figure)


def p_sweep_figure(sweeps: dict[str, list[Run]]) -> Figure:
    """Pairs of panels: the loss of every run (circles escape, crosses do not), and the shares that do."""
    wide = min(3, len(sweeps))
    tall = -(-len(sweeps) // wide)
    figure = Figure(figsize=(max(5.6, 4.2 * wide), 5.2 * tall), layout="constrained")
    grid = figure.subplots(
        2 * tall, wide, sharex=True, sharey="row", squeeze=False, height_ratios=[2, 1] * tall
    )
    for index, (ramp, runs) in enumerate(sweeps.items()):
        row, column = divmod(index, wide)
        losses, shares = grid[2 * row : 2 * row + 2, column]
        found = outcomes(runs)
        draw_losses(losses, found)
        draw_shares(shares, found, beside_paper=not cure(runs[0]))
        floors = [run.validation["floor"] for run in runs if run.validation.get("floor")]
        if floors:
            losses.axhline(floors[0], color=INK, ls="--", lw=1, label="unigram floor")
        losses.set_title(plain(ramp), fontsize=10)
        shares.set_xlabel("exponent p")
        shares.tick_params(labelbottom=True)  # the panel below may be an empty place
    for index in range(len(sweeps), tall * wide):
        for axes in grid[-2:, index % wide]:
            axes.set_visible(False)
    unit = next(run.unit for runs in sweeps.values() for run in runs)
    for row in range(tall):
        grid[2 * row, 0].set_ylabel(f"validation loss (nats per {unit})")
        grid[2 * row + 1, 0].set_ylabel("share that escapes")
    for axes in grid[:2, 0]:
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return finish(figure)


def draw_losses(axes: Axes, found: Sequence[Outcome]) -> None:
    for escaped, style, colour, label in (
        (True, "o", COLOURS[0], "escapes"),
        (False, "x", RED, "does not"),
    ):
        points = [(one.axes["p"], one.loss) for one in found if one.escaped == escaped]
        draw_points(axes, points, style, color=colour, label=label, ms=5)
    counts = sorted(tally(found), key=lambda count: count.axes["p"])
    means = [(count.axes["p"], count.mean_loss) for count in counts]
    draw_points(axes, means, "-", color=COLOURS[0], lw=1.2, label="mean of those that escape")


def draw_points(axes: Axes, points: Sequence[tuple[float, float | None]], style: str, **options: Any) -> None:
    known = [(x, y) for x, y in points if y is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], style, **options)


def draw_shares(axes: Axes, found: Sequence[Outcome], *, beside_paper: bool) -> None:
    """With Wilson's intervals, and the paper's dashed."""
    counts = sorted(tally(found), key=lambda count: count.axes["p"])
    known = [count for count in counts if count.seeds]
    ps, share = [count.axes["p"] for count in known], [count.escaped / count.seeds for count in known]
    bars = [
        [s - count.escaped_interval[0] for s, count in zip(share, known, strict=True)],
        [count.escaped_interval[1] - s for s, count in zip(share, known, strict=True)],
    ]
    axes.errorbar(
        ps, share, yerr=bars, fmt="o-", color=COLOURS[0], ms=4, lw=1.4, elinewidth=0.8, label="here, 95%"
    )
    if beside_paper:
        theirs = [value.number / published.SWEEP_SEEDS for value in published.ESCAPES.values()]
        axes.plot([*published.ESCAPES], theirs, "s--", color=INK, ms=3, lw=1, label="paper")
    axes.set_ylim(-0.05, 1.05)


def accuracy_figure(setup: Setup, shots: int) -> Figure | None:
    """Accuracy against R, a panel for each task and the average."""
    ours = {
        (label, R): [scores(run) for run in cell.runs]
        for label, cells in setup.rows.items()
        for R, cell in cells.items()
    }
    if not any(key[0] == shots for own in ours.values() for one in own for key in one):
        return None
    figure = Figure(figsize=(10.0, 8.4), layout="constrained")
    grid = figure.subplots(3, 3, sharex=True)
    own_colours = colours(setup.rows)
    for axes, (task, title) in zip(grid.flat, [*TASKS.items(), ("average", "average")], strict=True):
        for block, colour in PAPER_COLOURS.items():
            theirs = [(R, published.ACCURACY.get((setup.size, shots, block, R, task))) for R in ROUNDS]
            points = [(R, value.number) for R, value in theirs if value]
            axes.plot(*zip(*points, strict=True), "o--", color=colour, ms=3, lw=1, alpha=0.7)
        for label in setup.rows:
            here = [(R, accuracy(own, shots, task)) for (name, R), own in ours.items() if name == label]
            known = [(R, value) for R, value in here if value is not None]
            axes.plot(
                [R for R, _ in known],
                [v for _, v in known],
                "o-",
                color=own_colours[label],
                ms=4,
                lw=1.6,
                label=plain(label),
            )
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[-1]:
        axes.set_xlabel("rounds R")
    grid[0, 0].set_ylabel("accuracy (%)")
    return finish(figure, legend=grid[0, 0])


def cost_against_rounds(groups: Sequence[Setup]) -> Figure | None:
    """Time per token relative to R = 1: linear would be R itself."""
    lines = {}
    for setup in groups:
        for label, cells in setup.rows.items():
            rates = {R: rate for R, cell in cells.items() if (rate := speed(cell))}
            if 1 in rates and len(rates) > 1:
                lines[f"{label}, set-up {setup.letter}"] = {R: rates[1] / rate for R, rate in rates.items()}
    if not lines:
        return None
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    most = max(R for line in lines.values() for R in line)
    axes.plot([1, most], [1, most], ls=":", color=INK, lw=1, label="R")
    for size, marker in (("small", "o"), ("medium", "s")):
        hours = [published.GPU_HOURS[size, R].number for R in ROUNDS]
        axes.plot(
            ROUNDS,
            [own / hours[0] for own in hours],
            f"{marker}--",
            color=INK,
            ms=3,
            lw=1,
            label=f"paper, {size}",
        )
    own = colours(lines)
    for label, line in lines.items():
        axes.plot(
            [*line],
            [*line.values()],
            "o-",
            color=own[label],
            ms=4,
            lw=1.6,
            label=plain(label),
        )
    axes.set_xlabel("rounds R")
    axes.set_ylabel("time per token, R = 1 is 1")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, legend=axes)


def kappa_figure(runs: Sequence[Run], histories: Histories) -> Figure | None:
    """κ_R over training and against R, a line for each run; colours tell methods, strength tells R."""
    lines = [(run, kappas(run, histories)) for run in runs]
    lines = [(run, found) for run, found in lines if found]
    if not lines:
        return None
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    over_steps, over_rounds = figure.subplots(1, 2)
    own = colours(sorted({method(run) for run, _ in lines}))
    depths = sorted({found[0]["rounds"] for _, found in lines})
    for run, found in lines:
        colour = own[method(run)]
        strength = 0.35 + 0.65 * (depths.index(found[0]["rounds"]) + 1) / len(depths)
        R = found[0]["rounds"]
        steps, values = [one["step"] for one in found], [one["kappa"] for one in found]
        over_steps.plot(steps, values, "o-", ms=2.5, lw=1, color=colour, alpha=strength)
        over_rounds.plot([R], values[-1:], "o", ms=5, color=colour, alpha=0.7)
    for name, colour in own.items():
        over_rounds.plot([], [], "o", color=colour, label=plain(name))
    if depths[-1] > 1:  # from R = 1 on, so that it is a line for a single depth too
        over_rounds.plot(
            [1, depths[-1]], [1, depths[-1]], "--", lw=1, color=INK, label="R, the most it can be"
        )
    over_rounds.set_xticks(sorted({1, *depths}))
    over_rounds.set_xlabel("rounds R")
    over_rounds.set_title("at the last diagnosis")
    over_steps.set_xlim(left=min(0, over_steps.get_xlim()[0]))
    over_steps.xaxis.set_major_locator(MaxNLocator(integer=True))
    over_steps.set_xlabel("step")
    over_steps.set_ylabel("κ_R")
    over_steps.set_title("over training (stronger: more rounds)")
    return finish(figure, legend=over_rounds)
