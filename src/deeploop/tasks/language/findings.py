"""The text and the charts of `deeploop diagnose`, from the records of its runs. No torch."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from deeploop.models.gpt_config import GPTConfig
from deeploop.report.plots import COLOURS, INK, Chart, Line, Panel
from deeploop.report.tables import text_table

LEGEND = (
    "U maps a change that one visit reads to the output; G is the update that a visit asks for. A ratio is\n"
    "R where the visits do the same, about √R where they are unrelated. Own κ is the two ratios' product\n"
    "over R; κ has the largest visits of all sublayers below its line (docs/alignment.md)."
)


def text(record: dict[str, Any], model: GPTConfig, path: Path, conclusion: str, *, has_alpha: bool) -> str:
    """Format one run, conclusion first. With `has_alpha`, the audit checked α at every residual."""
    R = record["rounds"]
    rule = model.residual.title
    for name, value in zip("αβε", model.scales, strict=True):
        rule += f", {name} = {value:.4g}" if value != 1 else ""
    once = model.prelude + model.coda
    audited = f"audit: each of {model.blocks} blocks is visited {R} times"
    audited += f", prelude and coda ({once} blocks) once" if once else ""
    audited += f", α is right at all {2 * (model.blocks + once)} residuals" if has_alpha else ""
    ratios = [max(visits["ratio"]) for visits in record["stream"].values()]
    parts = [
        f"{path} at step {record['step']}: {model.blocks} blocks × {R} rounds, {rule}; "
        f"{record['updates']} updates G; probe of {record['tokens']:,} tokens of {record['probe']}",
        conclusion,
        "\n".join(record["audit"]) or audited,
        sublayer_table(record),
        LEGEND,
        f"κ_R = {record['kappa']:.2f} of at most {R} (raw gradients {record['kappa_raw']:.2f}); "
        f"token similarity {record['similarity']:.2f}; branch to skip at most {max(ratios):.3g}",
    ]
    if effect := record.get("step_effect"):
        parts.append(
            f"last step: ‖ΔF‖/‖F‖ = {effect['measured']:.2e}, to first order {effect['first_order']:.2e}, "
            f"bound (of the {len(record['sublayers'])} sublayers looked at, without momentum and clipping) "
            f"{effect['bound']:.2e}; largest update to weight "
            f"{max(effect['update_to_weight'].values()):.2%}"
        )
    parts.append(one_depth_verdict(record, "" if model.residual.law else str(model.residual)))
    return "\n\n".join(parts)


def sublayer_table(record: dict[str, Any]) -> str:
    """Make a table of the alignment of each sublayer."""
    rows = [
        (
            name,
            f"{_most(values, 'sensitivity'):.2f}",
            f"{_most(values, 'update'):.2f}",
            f"{values['own_kappa']:.2f}",
            f"{record['kappas'][name]:.2f}",
            f"{values['change']:.1%}",
        )
        for name, values in record["sublayers"].items()
    ]
    header = ("sublayer", "‖ΣU‖/max‖U‖", "‖ΣG‖/max‖G‖", "own κ", "κ", "last change of a norm")
    return text_table(header, rows)


def one_depth_verdict(record: dict[str, Any], block: str) -> str:
    """Interpret κ of a single R, between 1 (γ = 0) and R (γ = 1).

    `block` is the rule's name if the paper's exponent does not apply to it.
    """
    R, kappas = record["rounds"], [one["own_kappa"] for one in record["sublayers"].values()]
    if R == 1:
        return "One round: nothing is revisited, and ¼ is enough."
    where = f" ({block} has no β/α: its alignment, not its bound.)" if block else ""
    if max(kappas) <= 1:
        enough = "" if block else ", and p = ¼ is enough"
        return (
            f"Nothing grows with R{enough}: own κ is at most {max(kappas):.2f}, unrelated visits have 1. "
            f"For a fit, give runs at several R.{where}"
        )
    low, high = (
        min(1.0, max(0.0, math.log(k) / math.log(R))) if k > 0 else 0.0 for k in (min(kappas), max(kappas))
    )
    asks = (
        ""
        if block
        else f": read as growth from κ_1, it asks for p from {(1 + low) / 4:.2f} to {(1 + high) / 4:.2f}"
    )
    return (
        f"Sublayer by sublayer, own κ lies between R^{low:.2f} and R^{high:.2f}{asks}. "
        f"For a fit, give runs at several R.{where}"
    )


def _most(values: dict[str, Any], what: str) -> float:
    """The norm of the visits' sum over the largest norm of a visit."""
    return values[f"{what}_sum"] / max(max(values[f"{what}_norms"]), 1e-30)


# ── Charts ──────────────────────────────────────────────────────────────────────────────────────────────
def alignment_chart(record: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Chart:
    """Cosines between rounds for each sublayer, κ by sublayer, and κ_R over training where recorded."""
    sublayers = record["sublayers"]
    panels = [
        heat_map(f"{name}: {what}", values[key])
        for key, what in (("update_cosines", "updates G"), ("sensitivity_cosines", "sensitivities U"))
        for name, values in sublayers.items()
    ]
    panels.append(kappa_panel(record))
    if len(history) > 1:
        panels.append(history_panel(record["rounds"], history))
    caption = "Cosines between rounds (blue: opposed, red: aligned), κ by sublayer, and κ_R over training."
    return Chart("diagnose", caption, panels, max(2, len(sublayers)), height=2.8, shared_y=False)


def heat_map(title: str, cosines: Sequence[Sequence[float]]) -> Panel:
    """A panel of rounds × rounds, with numbers if they are legible."""
    ticks = {r: str(r + 1) for r in range(len(cosines))}
    texts = [
        (s, r, f"{value:.2f}", "white" if abs(value) > 0.6 else "black")
        for r, row in enumerate(cosines)
        for s, value in enumerate(row)
    ]
    style = {"vmin": -1, "vmax": 1, "cmap": "RdBu_r"}
    few = texts if len(cosines) <= 5 else []
    return Panel(
        title=title, y="round", x_ticks=ticks, y_ticks=ticks, image=cosines, image_style=style, texts=few
    )


def kappa_panel(record: Mapping[str, Any]) -> Panel:
    """Each sublayer's κ: by its own largest visits, and by those of all sublayers (the paper's)."""
    names = [*record["sublayers"]]
    places = range(len(names))
    kappas = [record["sublayers"][name]["own_kappa"] for name in names]
    shared = [record["kappas"][name] for name in names]
    return Panel(
        [
            Line(kappas, places, "κ by its own visits", COLOURS[0], "o", size=7),
            Line(shared, places, "κ in the paper's κ_R", COLOURS[1], "D", size=6),
        ],
        x=f"κ (at most R = {record['rounds']})",
        y_ticks=dict(enumerate(names)),
        x_range=(0, record["rounds"] * 1.05),
        y_range=(len(names) - 0.5, -0.5),
    )


def history_panel(rounds: int, history: Sequence[Mapping[str, Any]]) -> Panel:
    """κ_R and token similarity over training."""
    steps = [line["step"] for line in history]
    lines = [
        Line(steps, [line[key] for line in history], label, colour, style, size=3)
        for key, label, colour, style in (
            ("kappa", "κ_R, effective", COLOURS[1], "o-"),
            ("kappa_raw", "κ_R, raw", COLOURS[0], "o:"),
            ("similarity", "token similarity", INK, "-"),
        )
    ]
    return Panel(lines, x="training step", y="κ_R", y_range=(0, rounds * 1.1), level=(rounds, "R"))


def gamma_chart(points: Mapping[str, Sequence[tuple[int, float]]], title: str, gamma: float) -> Chart:
    """κ against R on logarithmic scales, a line for each series, between the slopes 0 and 1."""
    rounds = sorted({R for line in points.values() for R, _ in line})
    lines = [
        Line([1, rounds[-1]], [1, rounds[-1]], "κ = R (aligned, γ = 1)", style="--", width=1),
        Line([1, rounds[-1]], [1, 1], "κ = 1 (decorrelated, γ = 0)", style=":", width=1),
    ]
    for (name, line), colour in zip(points.items(), cycle(COLOURS), strict=False):
        lines.append(Line([R for R, _ in line], [kappa for _, kappa in line], name, colour))
    ticks = {R: str(R) for R in rounds}
    panel = Panel(
        lines,
        f"{title}: γ = {gamma:.2f}",
        "rounds R",
        "κ",
        log_x=10,
        log_y=True,
        x_ticks=ticks,
        y_ticks=ticks,
    )
    return Chart("gamma", "κ against R.", [panel], height=4.5)
