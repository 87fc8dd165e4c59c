"""Pictures, and what all of them share. Nothing here imports torch."""

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from deeploop.files import atomic_file
from deeploop.rules import RULES

# Okabe and Ito's colours: told apart by colour-blind readers too, on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# One colour per rule in every figure; the labels of a rule begin with its name.
RULE_COLOURS = {rule.label: rule.colour for rule in RULES}
OTHER_COLOURS = ("#9467BD", "#8C564B", "#AA3377")  # of rules that have none of their own
SHADES = (0.0, -0.4, 0.45, -0.6, 0.7, -0.2)  # of a rule's colour: towards black below 0, towards white above
INK = "#7f7f80"  # frame and text; replaced by the page's own text colour in inline SVG


def rule_of(label: str) -> str:
    """The rule that a label begins with, such as "pre-norm 1/N + unigram bias, peak_lr 0.001"."""
    known = max((rule for rule in RULE_COLOURS if label.startswith(rule)), key=len, default="")
    return known or label.partition(" + ")[0].partition(", ")[0]


def colours(labels: Iterable[str]) -> dict[str, str]:
    """Label → its rule's colour; where several labels share a rule, shades of it."""
    others, found = cycle(OTHER_COLOURS), dict(RULE_COLOURS)
    seen: Counter[str] = Counter()
    named = {}
    for label in labels:
        rule = rule_of(label)
        if rule not in found:
            found[rule] = next(others)
        named[label] = _shaded(found[rule], SHADES[seen[rule] % len(SHADES)])
        seen[rule] += 1
    return named


def _shaded(colour: str, shade: float) -> str:
    target = 1.0 if shade > 0 else 0.0
    red, green, blue = (part + abs(shade) * (target - part) for part in to_rgb(colour))
    return to_hex((red, green, blue)).upper()


def round_colours(rounds: Sequence[int]) -> dict[int, str]:
    """R → colour, from violet to orange as R grows: no rule has these."""
    shades = matplotlib.colormaps["plasma"].resampled(len(rounds) + 2)  # both ends vanish on some page
    return {R: to_hex(shades(index + 1)) for index, R in enumerate(rounds)}


@dataclass(frozen=True)
class Curve:
    """One run in a picture: its (step, value) pairs."""

    label: str
    colour: str
    losses: Sequence[tuple[int, float]]
    similarities: Sequence[tuple[int, float]]


def loss_and_similarity(panels: Sequence[tuple[str, Sequence[Curve]]], floor: float) -> Figure:
    """Training loss above, token similarity below, one column per panel, scales shared along a row."""
    figure = Figure(figsize=(5.2 * len(panels), 5.6), layout="constrained")
    grid = figure.subplots(
        2, len(panels), sharex=True, sharey="row", squeeze=False, gridspec_kw={"height_ratios": [2, 1]}
    )
    for column, (title, curves) in enumerate(panels):
        loss, similarity = grid[0, column], grid[1, column]
        for curve in curves:
            steps, losses = zip(*curve.losses, strict=True)
            loss.plot(steps, running_mean(losses, 5), color=curve.colour, label=curve.label, lw=1.6)
            steps, values = zip(*curve.similarities, strict=True)
            similarity.plot(steps, values, color=curve.colour, marker="o", ms=3, lw=1.6)
        loss.axhline(floor, color=INK, ls="--", lw=1, label="unigram floor")
        loss.set_title(title)
        similarity.set_ylim(-0.05, 1.05)
        similarity.set_xlabel("step")
        for axes in (loss, similarity):
            quiet(axes)
    grid[0, 0].set_ylabel("training loss (nats per token)")
    grid[1, 0].set_ylabel("token similarity")
    grid[0, -1].legend(frameon=False, labelcolor=INK)  # the last panel has every curve
    return figure


def loss_against_rounds(records: Sequence[dict[str, Any]]) -> Figure:
    """Validation loss against rounds, of a run's depth.json; adaptive depth at its mean rounds."""
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    _draw_loss(axes, records)
    axes.set_xlabel("rounds R")
    quiet(axes)
    return figure


def accuracy_against_rounds(record: dict[str, Any], losses: Sequence[dict[str, Any]] = ()) -> Figure:
    """Mean accuracy against rounds, of an evaluation; above it the loss, where there is a depth.json."""
    panels = 2 if losses else 1
    figure = Figure(figsize=(5.2, 3.6 * panels), layout="constrained")
    grid = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
    if losses:
        _draw_loss(grid[0], losses)
    axes = grid[-1]
    for shots, colour in zip(record["shots"], COLOURS * len(record["shots"]), strict=False):
        rows = [row for row in record["average"] if row["shots"] == shots]
        points = [row["rounds"] for row in rows], [100 * row["acc"] for row in rows]
        axes.plot(*points, "o-", color=colour, label=f"{shots}-shot", ms=4, lw=1.6)
    _mark_trained(axes, record["trained_rounds"])
    axes.set_xlabel("rounds R")
    tasks = len({row["task"] for row in record["results"]})
    axes.set_ylabel(f"accuracy (%), mean of {tasks} tasks" if tasks > 1 else "accuracy (%)")
    axes.legend(frameon=False, labelcolor=INK)
    for axes in grid:
        quiet(axes)
    return figure


def _draw_loss(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    for colour, (label, curve) in zip(cycle(COLOURS), _loss_curves(records).items(), strict=False):
        style = "s:" if label.startswith("adaptive") else "o-"
        axes.plot(*zip(*sorted(curve.items()), strict=True), style, color=colour, label=label, ms=4, lw=1.6)
    _mark_trained(axes, records[-1]["trained_rounds"])
    # Both units are shares of the same summed loss, so one scale serves them.
    first = records[-1]["rounds"][0]
    factor = first["bits_per_byte"] / first["loss"]
    right = axes.secondary_yaxis("right", functions=(lambda y: y * factor, lambda y: y / factor))
    axes.set_ylabel("validation loss (nats per token)")
    right.set_ylabel("bits per byte", color=INK)
    right.spines["right"].set_color(INK)
    right.tick_params(colors=INK)
    axes.legend(frameon=False, labelcolor=INK)


def _loss_curves(records: Sequence[dict[str, Any]]) -> dict[str, dict[float, float]]:
    """Label → rounds → loss; records that differ in nothing but their rounds make one curve."""
    curves: dict[str, dict[float, float]] = {}
    for record in records:
        alpha = ", α recomputed" if record["recompute_alpha"] else ""
        for row in record["rounds"]:
            curves.setdefault(f"fixed rounds{alpha}", {})[row["rounds"]] = row["loss"]
        for row in record["adaptive"]:
            label = f"adaptive by {row['criterion']}, at most {record['rounds'][-1]['rounds']}{alpha}"
            curves.setdefault(label, {})[row["mean_rounds"]] = row["loss"]
    return curves


def _mark_trained(axes: Axes, rounds: int) -> None:
    """Marks the trained depth in a picture that has its curves already: the word goes where there is room."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no half a round
    axes.axvline(rounds, color=INK, ls="--", lw=1)
    side = "right" if rounds > sum(axes.get_xlim()) / 2 else "left"
    axes.annotate(" trained ", (rounds, 1), xycoords=("data", "axes fraction"), ha=side, va="top")


def series(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was recorded."""
    pairs = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    starts = (max(0, end - window) for end in range(1, len(values) + 1))
    return [sum(values[a:b]) / (b - a) for b, a in enumerate(starts, start=1)]


def save_png(figure: Figure, path: Path) -> None:
    """With a palette: a third of the bytes, and lines and letters look the same."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    palette = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with atomic_file(path) as file:
        palette.save(file, format="png", optimize=True)


def inline_svg(figure: Figure) -> str:
    """The figure as an SVG element that takes the text colour of the page around it."""
    buffer = io.StringIO()
    # With a fixed salt the same figure is the same text, so a page made again differs only where runs do.
    with matplotlib.rc_context({"svg.hashsalt": "deeploop"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    # As wide as the page, but not so wide that its letters outgrow the page's. On a phone two panels shrink
    # until both are in sight; more of them scroll.
    inches = figure.get_figwidth()
    style = f'<svg style="min-width: {min(2.1 * inches, 36):.1f}rem; max-width: {7 * inches:.1f}rem"'
    return text[text.index("<svg") :].replace("<svg", style, 1).replace(INK, "currentColor")


def quiet(axes: Axes) -> None:
    """Thin frame, light grid, all in the colour that the page may replace."""
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts):
        text.set_color(INK)
