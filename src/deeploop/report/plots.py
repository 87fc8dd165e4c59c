"""A chart: panels of lines, points and images as data, and the one style that draws them. No torch.

Matplotlib is imported when a chart is drawn, so that code that only describes charts starts fast.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from deeploop.files import atomic_file
from deeploop.rules import RULES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RULE_COLOURS = {rule.label: rule.colour for rule in RULES}
"""One colour per rule in every figure; the labels of a rule begin with its name."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CF6FE0", "#D9A400", "#8A3324")
"""Colours of lines that belong to no rule."""
OTHERS = ("#A98467", "#6B6FD6", "#7D8A3C", "#C2185B")
"""Colours of labels without a rule's name, in a chart where others have one."""
GRADED = ("#6A11A5", "#CC4778", "#F2A93B")
"""Colours of lines that differ in a number, from small to large."""
DASHES = ("-", "--", ":", "-.")
"""Dashes that distinguish the lines of one rule."""
INK = "#7f7f80"
"""Frame and text; replaced by the page's own text colour in inline SVG."""
WIDE, NARROW = 11.0, 4.4
"""Inches of a figure on a page, and on a phone."""


# ── What a chart is ─────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Line:
    """A line, or points."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    """Empty: not in the legend."""
    colour: str = INK
    style: str = "o-"
    width: float = 1.6
    size: float = 4.0
    strength: float = 1.0


@dataclass(frozen=True)
class Panel:
    """A pair of axes, whose labels have units."""

    lines: Sequence[Line] = ()
    title: str = ""
    x: str = ""
    y: str = ""
    log_x: int = 0
    """Base of a logarithmic axis."""
    log_y: bool = False
    whole_x: bool = False
    """Ticks at whole numbers only."""
    x_ticks: Mapping[Any, str] | None = None
    y_ticks: Mapping[Any, str] | None = None
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    shaded: tuple[float, float] | None = None
    """A part of the x axis."""
    level: tuple[float, str] | None = None
    """A dashed horizontal line and its name."""
    at: tuple[float, str] | None = None
    """A dashed vertical line and its name."""
    right: tuple[str, float] | None = None
    """A second y axis: its label, and the factor from the first."""
    image: Any = None
    """Rows × columns of colours or of numbers."""
    image_style: Mapping[str, Any] | None = None
    texts: Sequence[tuple[float, float, str, str]] = ()
    """x, y, text and colour."""


@dataclass(frozen=True)
class Chart:
    """A figure with its name and a caption that says what to see."""

    name: str
    caption: str
    panels: Sequence[Panel]
    columns: int = 3
    """Panels per row on a page; a phone shows one per row."""
    height: float = 3.4
    """Inches of a row of panels."""
    shared_y: bool = True
    ratios: Sequence[float] | None = None
    """Widths of the columns."""
    names: Sequence[tuple[str, str]] = ()
    """Colours and names that the legend lists in addition to the lines."""


# ── Colours ─────────────────────────────────────────────────────────────────────────────────────────────
def rule_of(label: str) -> str:
    """Return the rule that a label begins with, such as "averaged + unigram bias, peak_lr 0.001"."""
    label = re.sub("^(HRM|TRM) ", "", label)
    known = max((rule for rule in RULE_COLOURS if label.startswith(rule)), key=len, default="")
    return known or re.split(r" \+ |, | · ", label)[0]


def looks(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Map labels to colours and dashes: a rule has one colour, and each of its labels other dashes.

    If all labels belong to one rule, or to none, colours tell them apart, from the first to the last.
    """
    labels = list(dict.fromkeys(labels))
    rules = {rule_of(label) for label in labels}
    if len(labels) > 1 and (len(rules) == 1 or not rules & RULE_COLOURS.keys()):
        return {label: (colour, "-") for label, colour in zip(labels, graded(len(labels)), strict=True)}
    found, seen, named = dict(RULE_COLOURS), Counter[str](), {}
    for label in labels:
        rule = rule_of(label)
        taken = {*found.values()}
        found.setdefault(rule, next((c for c in OTHERS if c not in taken), INK))
        named[label] = found[rule], DASHES[seen[rule] % len(DASHES)]
        seen[rule] += 1
    return named


def graded(count: int) -> list[str]:
    """Return `count` colours from violet to orange."""
    if count == 1:
        return [GRADED[1]]
    places = [(len(GRADED) - 1) * index / (count - 1) for index in range(count)]
    pairs = [(min(int(place), len(GRADED) - 2), place) for place in places]
    return [_mixed(GRADED[low], GRADED[low + 1], place - low) for low, place in pairs]


def _mixed(one: str, other: str, share: float) -> str:
    pairs = [(int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + share * (b - a)):02X}" for a, b in pairs)


# ── Drawing ─────────────────────────────────────────────────────────────────────────────────────────────
def draw(chart: Chart, width: float = WIDE) -> "Figure":
    """Draw the figure, with as many panels in a row as fit."""
    from matplotlib.figure import Figure

    columns = 1 if width < WIDE else min(chart.columns, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    labels = [line.label for panel in chart.panels for line in panel.lines if line.label]
    legend = 0.3 * len({*labels, *chart.names}) * (WIDE / width) / 3
    figure = Figure(figsize=(width, rows * chart.height + min(legend, 2.5)), layout="constrained")
    grid = figure.subplots(
        rows,
        columns,
        sharey=chart.shared_y,
        squeeze=False,
        width_ratios=chart.ratios if columns > 1 else None,
    )
    for axes, panel in zip(grid.flat, chart.panels, strict=False):
        _draw_panel(axes, panel)
        if chart.shared_y and axes is not grid[0, 0] and axes.get_subplotspec().is_first_col() is False:
            axes.set_ylabel("")
    for axes in grid.flat[len(chart.panels) :]:
        axes.set_visible(False)
    _draw_legend(figure, chart, width)
    return figure


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    for line in panel.lines:
        axes.plot(
            line.x,
            line.y,
            line.style,
            color=line.colour,
            lw=line.width,
            ms=line.size,
            alpha=line.strength,
            label=plain(line.label) if line.label else "_",
        )
    if panel.image is not None:
        axes.imshow(panel.image, aspect="auto", interpolation="none", **(panel.image_style or {}))
    for x, y, words, colour in panel.texts:
        axes.annotate(words, (x, y), ha="center", va="center", fontsize=8, color=colour)
    if panel.level:
        axes.axhline(panel.level[0], color=INK, ls="--", lw=1, label=panel.level[1])
    if panel.shaded:
        axes.axvspan(*panel.shaded, color=INK, alpha=0.15, lw=0, zorder=0)
    if panel.log_x:
        axes.set_xscale("log", base=panel.log_x)
        axes.xaxis.set_major_formatter("{x:g}")
    if panel.log_y:
        axes.set_yscale("log")
    if panel.whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, ticks in ((axes.xaxis, panel.x_ticks), (axes.yaxis, panel.y_ticks)):
        if ticks is not None:
            axis.set_ticks([*ticks], [*ticks.values()])
            axis.set_minor_locator(NullLocator())
    axes.set(title=plain(panel.title), xlabel=panel.x, ylabel=panel.y)
    axes.set(**{k: v for k, v in (("xlim", panel.x_range), ("ylim", panel.y_range)) if v})
    if panel.at:
        _draw_mark(axes, *panel.at)
    quiet(axes)
    if panel.right:
        label, factor = panel.right
        right = axes.secondary_yaxis("right", functions=(scaled(factor), scaled(1 / factor)))
        right.set_ylabel(label, color=INK)
        right.spines["right"].set_color(INK)
        right.tick_params(colors=INK)
    if panel.image is not None:
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)


def scaled(factor: float) -> Any:
    return lambda y: y * factor


def _draw_mark(axes: "Axes", x: float, words: str) -> None:
    """Draw a vertical line, with its name where there is room."""
    axes.axvline(x, color=INK, ls="--", lw=1)
    side = "right" if x > sum(axes.get_xlim()) / 2 else "left"
    axes.annotate(f" {words} ", (x, 1), xycoords=("data", "axes fraction"), ha=side, va="top", color=INK)


def _draw_legend(figure: "Figure", chart: Chart, width: float) -> None:
    """Draw one legend for all panels, below them."""
    from matplotlib.patches import Patch

    named: dict[str, Any] = {}
    for axes in figure.axes:
        named |= {k: v for v, k in zip(*axes.get_legend_handles_labels(), strict=True) if k not in named}
    named |= {name: Patch(color=colour, lw=0) for colour, name in chart.names}
    if named:
        letters = int(14 * width)  # of the legend's size, beside each other
        names = [fill(name, letters - 6) for name in named]
        longest = max(len(line) for name in names for line in name.splitlines())
        columns = max(1, min(6, letters // (6 + longest)))
        figure.legend(
            [*named.values()], names, loc="outside lower center", ncols=columns,
            frameon=False, labelcolor=INK, fontsize=9,
        )  # fmt: skip


def quiet(axes: "Axes") -> None:
    """Set a thin frame and a light grid, in the colour that the page may replace."""
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.title.set_fontsize(10.5)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(INK)


def plain(text: str) -> str:
    """Escape a label: matplotlib reads formulas between dollars, and hides labels that begin with _."""
    return "\u200b" * text.startswith("_") + text.replace("$", r"\$")


def save_png(figure: "Figure | Chart", path: Path) -> None:
    """Save the image with a palette: a third of the bytes, and no visible difference."""
    from PIL import Image

    if isinstance(figure, Chart):
        figure = draw(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    palette = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with atomic_file(path) as file:
        palette.save(file, format="png", optimize=True)


def inline_svg(chart: Chart) -> str:
    """Draw the chart for two widths, in the page's text colour; the page shows the one that fits."""
    return _svg(draw(chart), "page") + _svg(draw(chart, NARROW), "phone")


def _svg(figure: "Figure", kind: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    # With a fixed salt the same figure is the same text, so a page made again differs only where runs do.
    with matplotlib.rc_context({"svg.hashsalt": f"deeploop {kind}", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg", f'<svg class="{kind}"', 1).replace(INK, "currentColor")


# ── Numbers for lines ───────────────────────────────────────────────────────────────────────────────────
def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to `window` - 1 before it."""
    starts = (max(0, end - window) for end in range(1, len(values) + 1))
    return [sum(values[a:b]) / (b - a) for b, a in enumerate(starts, start=1)]
