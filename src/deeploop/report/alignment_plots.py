"""Pictures of the visit alignment, from the records that a diagnosis leaves. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deeploop.report.plots import COLOURS, INK, quiet


def alignment_figure(record: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Figure:
    """Cosines between rounds for each sublayer, κ by sublayer, and κ_R over training where recorded."""
    sublayers = record["sublayers"]
    columns = max(2, len(sublayers))
    figure = Figure(figsize=(max(9.0, 2.5 * columns), 8.0), layout="constrained")
    grid = figure.add_gridspec(3, columns, height_ratios=[1, 1, 1.2])
    image: Any = None
    for column, (name, own) in enumerate(sublayers.items()):
        for row, (key, what) in enumerate(
            (("update_cosines", "updates G"), ("sensitivity_cosines", "sensitivities U"))
        ):
            axes = figure.add_subplot(grid[row, column])
            axes.set_title(name if row == 0 else "", fontsize=9, color=INK)
            if column == 0:
                axes.set_ylabel(f"{what}\nround")
            quiet(axes)
            axes.grid(visible=False)
            image = heat_map(axes, own[key])
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.6)
    bar.set_label("cosine between rounds", color=INK)
    bar.ax.tick_params(colors=INK)
    split = (columns + 1) // 2
    kappa_bars(figure.add_subplot(grid[2, :split]), record)
    kappa_history(figure.add_subplot(grid[2, split:]), record, history)
    return figure


def heat_map(axes: Axes, cosines: Sequence[Sequence[float]]) -> Any:
    """Rounds × rounds, blue for opposed, red for aligned; numbers where they can be read."""
    R = len(cosines)
    image = axes.imshow(cosines, vmin=-1, vmax=1, cmap="RdBu_r")
    axes.set_xticks(range(R), [str(r + 1) for r in range(R)])
    axes.set_yticks(range(R), [str(r + 1) for r in range(R)])
    if R <= 5:
        for r, row in enumerate(cosines):
            for s, value in enumerate(row):
                ink = "white" if abs(value) > 0.6 else "black"
                axes.text(s, r, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    return image


def kappa_bars(axes: Axes, record: Mapping[str, Any]) -> None:
    """Each sublayer's κ: by its own largest visits, and by those of all sublayers (the paper's)."""
    names = [*record["sublayers"]]
    own = [record["sublayers"][name]["own_kappa"] for name in names]
    shared = [record["kappas"][name] for name in names]
    places = range(len(names))
    axes.barh([y - 0.2 for y in places], own, height=0.38, color=COLOURS[0], label="by its own visits")
    axes.barh([y + 0.2 for y in places], shared, height=0.38, color=COLOURS[1], label="in the paper's κ_R")
    axes.axvline(record["rounds"], color=INK, ls="--", lw=1, label="R, the most it can be")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, record["rounds"] * 1.12)
    axes.set_xlabel("κ")
    axes.legend(
        frameon=False, labelcolor=INK, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1)
    )
    quiet(axes)


def kappa_history(axes: Axes, record: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
    """κ_R and token similarity over training, or a line that says how to record them."""
    if len(history) < 2:
        text = "κ_R over training:\nrecord it with --diagnose.every"
        axes.text(0.5, 0.5, text, ha="center", va="center", color=INK, transform=axes.transAxes)
        axes.set_axis_off()
        return
    steps = [line["step"] for line in history]
    axes.plot(
        steps, [line["kappa"] for line in history], "o-", color=COLOURS[1], ms=3, label="κ_R, effective"
    )
    axes.plot(steps, [line["kappa_raw"] for line in history], "o:", color=COLOURS[0], ms=3, label="κ_R, raw")
    axes.plot(steps, [line["similarity"] for line in history], "-", color=INK, lw=1, label="token similarity")
    axes.axhline(record["rounds"], color=INK, ls="--", lw=1)
    axes.set_ylim(0, record["rounds"] * 1.1)
    axes.set_xlabel("step")
    axes.legend(
        frameon=False, labelcolor=INK, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    quiet(axes)


def gamma_figure(points: Mapping[str, Sequence[tuple[int, float]]], title: str, gamma: float) -> Figure:
    """κ against R on logarithmic scales, a line a series, between the slopes 0 and 1."""
    figure = Figure(figsize=(5.2, 4.0), layout="constrained")
    axes = figure.subplots()
    most = max(R for own in points.values() for R, _ in own)
    axes.plot([1, most], [1, most], ls="--", lw=1, color=INK, label="κ = R (aligned, γ = 1)")
    axes.plot([1, most], [1, 1], ls=":", lw=1, color=INK, label="κ = 1 (decorrelated, γ = 0)")
    for index, (name, own) in enumerate(points.items()):
        axes.plot(
            *zip(*own, strict=True), "o-", ms=4, lw=1.2, color=COLOURS[index % len(COLOURS)], label=name
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({R for own in points.values() for R, _ in own})
    axes.set_xticks(ticks, [str(R) for R in ticks])
    axes.minorticks_off()
    axes.set_xlabel("rounds R")
    axes.set_ylabel("κ")
    axes.set_title(f"{title}: γ = {gamma:.2f}")
    axes.legend(frameon=False, labelcolor=INK, fontsize=7)
    quiet(axes)
    return figure
