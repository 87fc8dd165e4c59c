"""The tables behind docs/rules.md: learning rates over R, and differences between cells.

Each is part of the README of its results; docs/rules.md says how to read them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from deeploop.report.beside_paper import Escapes, count_escapes
from deeploop.report.groups import Histories, method
from deeploop.report.runs import Run, find_runs
from deeploop.report.tables import MISSING, markdown_table, markdown_text
from deeploop.rules import DEEPLOOP
from deeploop.train.metrics import read_metrics
from research import transfer as views
from research.contrasts import Family, Losses, Sum, spread_within
from research.rates import BIAS, Curve, Study, final_loss, find_studies
from research.study import runs_of

LOST = "lost"
FEW = 3  # rates, below which a best one says little
PICKED = 0  # the seed by which the rates of results/transfer were picked
Key = tuple[Any, ...]
Curves = dict[Key, Curve]


# ── Runs into curves ────────────────────────────────────────────────────────────────────────────────────
def curves_of(runs: Iterable[Run], key: Callable[[Run], Key | None]) -> Curves:
    """Loss against rate for each key, in their order; of runs of one cell and seed the first counts."""
    histories, seen = Histories(), set()
    found: dict[Key, list[tuple[Run, float]]] = {}
    for run in runs:
        name, loss = key(run), final_loss(run, histories)
        cell = (name, peak(run), run.seed)
        if name is not None and loss is not None and cell not in seen:
            seen.add(cell)
            found.setdefault(name, []).append((run, loss))
    return {name: Curve.of(results) for name, results in sorted(found.items(), key=lambda item: item[0])}


def rounds(run: Run) -> int:
    return int(run.fields["model.rounds"])


def peak(run: Run) -> float:
    return float(run.fields["optim.peak_lr"])


def biased(run: Run) -> bool:
    return bool(run.fields.get("model.unigram_bias"))


def rule_and_rounds(run: Run) -> Key:
    return rule_name(run), rounds(run)


def rule_name(run: Run) -> str:
    """The rule without what all runs of a table have."""
    name = method(run).replace(" + Muon", "").replace(BIAS, "")
    return name if biased(run) else f"{name}, no bias"


SCHEDULE = ("blocks", "width", "context", "vocabulary"), ("steps", "batch", "warmup_steps", "floor_lr")


def same_training(run: Run, like: Run) -> bool:
    """True if it differs from another run only in rule, rounds, rate and optimizer."""
    fields = [
        f"{part}.{name}" for part, names in zip(("model", "optim"), SCHEDULE, strict=True) for name in names
    ]
    return all(run.fields.get(name) == like.fields.get(name) for name in fields)


# ── Cells ───────────────────────────────────────────────────────────────────────────────────────────────
def family(curves: Iterable[Curve]) -> Family:
    """The differences of a table; the best cells of all its curves give the spread of seeds."""
    return Family(spread_within(curve.best.losses for curve in curves if curve.best))


def minus(one: Curve | None, other: Curve | None, among: Family, *, tuned: bool = False) -> Sum | str:
    """Best loss minus best loss; `tuned`: the rates were chosen elsewhere, so one is enough."""
    if one is None or other is None or one is other:
        return MISSING
    if one.best is None or other.best is None:
        return LOST
    note = ""
    if not tuned and min(len(one.cells), len(other.cells)) < FEW:
        apart = f" ({one.best.peak:g} against {other.best.peak:g})" * (one.best.peak != other.best.peak)
        note = f", few rates{apart}"
    return among.minus(one.best.losses, other.best.losses, note)


def best_rate(curve: Curve) -> str:
    """η* by a parabola, where there are rates enough for one; else the best rate that was run."""
    if curve.best is None:
        return LOST
    if curve.optimum is not None:
        return views.best_rate(curve.optimum)
    return f"{curve.best.peak:.2e}" + (f" ({curve.mark})" if curve.mark else "")


def octaves(curve: Curve, other: Curve | None) -> str:
    """The ratio of its best rate to another's; a bound if one of them is at an edge of its grid."""
    one, two = ((one.optimum or one.best) if one else None for one in (curve, other))
    if other is None or other is curve or one is None or two is None:
        return MISSING
    own, others = beyond(curve), beyond(other)
    if own and own == others:
        return MISSING
    bound = "" if own == others else "≥ " if own > others else "≤ "
    return f"{bound}{math.log2(one.peak / two.peak):+.1f}"


def beyond(curve: Curve) -> int:
    """1: the best rate may lie above the highest that was run; -1: below the lowest; 0: it lies between."""
    if curve.best is None or curve.mark != "edge":
        return 0
    return 1 if curve.best is curve.cells[-1] else -1


def peaks_of(curves: Curves) -> list[float]:
    return sorted({cell.peak for curve in curves.values() for cell in curve.cells})


def loss_cells(curve: Curve, peaks: Sequence[float]) -> list[str]:
    cells = {cell.peak: cell for cell in curve.cells}
    return [views.loss(cells.get(peak)) for peak in peaks]


def table(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    named = [f"{name:g}" if isinstance(name, float) else str(name) for name in header]
    return markdown_table(named, [[str(cell) for cell in row] for row in rows])


# ── Learning rates over R ───────────────────────────────────────────────────────────────────────────────
def study_of(results: Path) -> Study:
    """The study of results/transfer that spans R."""
    (study,) = [one for one in find_studies(runs_of(results / "transfer"), Histories()) if one.over_rounds]
    return study


def rates(results: Path) -> str:
    """The best rates of every rule, and their figure."""
    study = study_of(results)
    table, caption = views.rules_table(study), markdown_text(views.caption(study))
    alt = "Validation loss against peak learning rate, by rule and R"
    parts = [markdown_text(table.title), markdown_table(table.header, table.rows), markdown_text(table.note)]
    return "\n\n".join([*parts, f"![{alt}](rates-a.png)", f"*What to see: {caption}*"])


def losses(results: Path) -> str:
    """The losses at every rate."""
    table = views.losses_table(study_of(results))
    return f"{markdown_table(table.header, table.rows)}\n\n{markdown_text(table.note)}"


def rates_figure(results: Path) -> Figure:
    return views.transfer_figure(study_of(results))


# ── Rules, shapes, parts ────────────────────────────────────────────────────────────────────────────────
def pairs(results: Path) -> str:
    """Every rule of results/transfer minus flat, at each R, and without the seed that picked the rates."""
    curves = curves_of(runs_of(results / "transfer"), rule_and_rounds)
    depths = sorted({R for _, R in curves})
    flat = {R: curve for (name, R), curve in curves.items() if name == "flat"}
    again = [R for R, curve in flat.items() if len(unpicked(curve)) > 1]
    every = family(curves.values())
    without = Family(spread_within(filter(None, map(unpicked, curves.values()))))

    def later(name: str, R: int) -> Sum | str:
        """The difference over the seeds that did not pick the rates."""
        one = unpicked(curves.get((name, R)))
        return without.minus(one, unpicked(flat[R])) if one else MISSING

    rows = [
        [
            name,
            *(minus(curves.get((name, R)), flat.get(R), every) for R in depths),
            *(later(name, R) for R in again),
        ]
        for name in sorted({name for name, _ in curves} - {"flat"})
    ]
    later_columns = [f"R = {R} without seed {PICKED}" for R in again]
    return table(["rule minus flat", *(f"R = {R}" for R in depths), *later_columns], rows)


def unpicked(curve: Curve | None) -> Losses:
    """The best losses of the seeds that did not pick the rates."""
    best = curve.best if curve else None
    return {seed: loss for seed, loss in best.losses.items() if seed != PICKED} if best else {}


def shapes(results: Path) -> str:
    """Loss against rate over K and width, and how far the best rate moves."""
    curves = curves_of(
        runs_of(results / "shapes"),
        lambda run: (run.fields["model.width"], rule_name(run), run.fields["model.blocks"]),
    )
    peaks, narrow = peaks_of(curves), min(width for width, _, _ in curves)
    rows = []
    for (width, rule, K), curve in curves.items():
        fewest = min(blocks for w, name, blocks in curves if (w, name) == (width, rule))
        others = curves.get((width, rule, fewest)), curves.get((narrow, rule, K))
        moved = [octaves(curve, other) for other in others]
        rows.append([str(width), rule, str(K), *loss_cells(curve, peaks), best_rate(curve), *moved])
    moved = ["octaves from least K", f"octaves from width {narrow}"]
    return table(["width", "rule", "K", *peaks, "best rate", *moved], rows)


# Place in the key of `part_key` → what it is, the paper's choice, and the other one.
PARTS = {
    1: ("bias", "yes", "no"),
    2: ("α", "(2N)^½", "R√K"),
    3: ("β", "on", "off"),
    4: ("outer gain", "yes", "no"),
}


def part_key(run: Run) -> Key | None:
    """R, then for each of PARTS whether it is the other choice."""
    rule = run.rule
    if not rule.has_alpha or rule.p != DEEPLOOP.p:
        return None
    return rounds(run), not biased(run), rule.alpha == "flat", not rule.beta, not rule.outer_gain


def part_curves(results: Path) -> Curves:
    own = runs_of(results / "parts")
    cells = {(rounds(run), biased(run), peak(run)) for run in own}
    # Flat and DeepLoop are there too, with the same settings.
    known = [run for run in runs_of(results / "transfer") if same_training(run, own[0])]
    known = [run for run in known if (rounds(run), biased(run), peak(run)) in cells]
    return curves_of([*own, *known], part_key)


def parts(results: Path) -> str:
    """Loss of every combination of parts."""
    curves = part_curves(results)
    peaks, differences = peaks_of(curves), family(curves.values())
    rows = []
    for key, curve in curves.items():
        chosen = [PARTS[place][1 + key[place]] for place in PARTS]
        flat = curves.get((*key[:2], True, True, True))
        apart = minus(curve, flat, differences)
        rows.append([key[0], *chosen, *loss_cells(curve, peaks), best_rate(curve), apart])
    header = ["R", *(name for name, *_ in PARTS.values()), *peaks, "best rate", "minus flat"]
    return table(header, rows)


def part_effects(results: Path) -> str:
    """Each part changed alone, all else held, by R."""
    curves = part_curves(results)
    depths, differences = sorted({key[0] for key in curves}), family(curves.values())
    found: dict[tuple[str, str], dict[int, Sum | str]] = {}
    for place, (name, papers, other) in PARTS.items():
        for key, curve in curves.items():
            changed = curves.get((*key[:place], True, *key[place + 1 :]))
            if key[place] or changed is None:
                continue
            held = [f"{PARTS[at][0]} {PARTS[at][1 + key[at]]}" for at in PARTS if at != place]
            row = f"{name}: {other} in place of {papers}", ", ".join(held)
            found.setdefault(row, {})[key[0]] = minus(changed, curve, differences)
    rows = [[*row, *(by_depth.get(R, MISSING) for R in depths)] for row, by_depth in found.items()]
    return table(["part", "held", *(f"R = {R}" for R in depths)], rows)


# ── The bias, and λ ─────────────────────────────────────────────────────────────────────────────────────
def ends_by_peak(runs: Sequence[Run], head: Sequence[str], key: Callable[[Run], tuple[Any, ...]]) -> str:
    """Last loss and similarity of token states, by seed; the last of a key are its words in the table."""
    found: dict[tuple[Any, ...], dict[float, dict[int, str]]] = {}
    for run in runs:
        last = run.validation
        by_peak = found.setdefault(key(run), {})
        by_peak.setdefault(peak(run), {})[run.fields["seed"]] = (
            f"{last['loss']:.3f} ({last['similarity']:.2f})"
        )
    peaks = sorted({peak(run) for run in runs})
    rows = []
    for own, by_peak in sorted(found.items()):
        cells = (by_peak.get(one, {}) for one in peaks)
        told = (", ".join(cell[seed] for seed in sorted(cell)) or MISSING for cell in cells)
        rows.append([*own[-len(head) :], *told])
    return table([*head, *peaks], rows)


def bias(results: Path) -> str:
    """Short runs, most of them still above the floor."""

    def key(run: Run) -> tuple[Any, ...]:
        steps, rule, with_bias = int(run.fields["optim.steps"]), run.rule.title, biased(run)
        return steps, rule, not with_bias, f"{steps:,}", rule, "yes" if with_bias else "no"

    runs = [run for part in ("short", "long", "longer") for run in runs_of(results / "bias" / part)]
    return ends_by_peak(runs, ["steps", "rule", "bias"], key)


def flat_cures(results: Path) -> str:
    """Flat by λ and warm-up, beside 1/N."""

    def key(run: Run) -> tuple[Any, ...]:
        rule, warmup = run.rule, int(run.fields["optim.warmup_steps"])
        return rule.alpha != "flat", warmup, rule.gain, rule.title, str(warmup)

    return ends_by_peak(runs_of(results / "flat-cures"), ["rule", "warm-up"], key)


# ── Muon ────────────────────────────────────────────────────────────────────────────────────────────────
def muon(results: Path) -> str:
    """The rules under Muon, beside AdamW and beside flat."""
    own = runs_of(results / "muon")
    curves = curves_of(own, rule_and_rounds)
    known = [run for run in runs_of(results / "transfer") if same_training(run, own[0])]
    adamw = curves_of(known, rule_and_rounds)
    peaks, among = peaks_of(curves), family(curves.values())
    rows = []
    for (rule, R), curve in curves.items():
        least = min(depth for name, depth in curves if name == rule)
        others = curves.get(("flat", R)), curves.get((rule, least)), adamw.get((rule, R))
        differences = [minus(curve, other, among) for other in others]
        rows.append([rule, R, *loss_cells(curve, peaks), best_rate(curve), *differences])
    return table(["rule", "R", *peaks, "best rate", "minus flat", "minus least R", "minus AdamW"], rows)


RAMPS = {"1e-5": 100, "2e-5": 50}  # results/escape-laptop has its warm-ups as rates per step


def muon_escape(results: Path) -> str:
    """Which p escapes under Muon, beside AdamW's results/p-sweep."""
    return escape_table(results / "muon-escape", results / "p-sweep")


def muon_escape_laptop(results: Path) -> str:
    """Muon's table in the shape of results/escape-laptop."""
    return escape_table(results / "muon-escape" / "laptop", results / "escape-laptop")


def escape_table(muon: Path, adamw: Path) -> str:
    """Escapes of the paper's start by warm-up and p, of two sweeps that differ in the optimizer."""
    under_muon, under_adamw = escapes_of(muon), escapes_of(adamw)
    rows = []
    for warm, p in sorted(under_muon, key=lambda corner: (-corner[0], corner[1])):
        one, other = under_muon[warm, p], under_adamw.get((warm, p))
        *counts, _, cut_off = one.cells
        others = other.cells[:3] if other else [MISSING] * 3
        rows.append([str(warm), f"{p:g}", *counts, views.number(one.loss, ".3f"), cut_off, *others])
    header = ["warm-up", "p", "below floor", "escaped", "95%", "mean loss", "cut off"]
    return table([*header, "AdamW: below floor", "AdamW: escaped", "95%"], rows)


def escapes_of(sweep: Path) -> dict[tuple[int, float], Escapes]:
    """Escapes of the paper's start by warm-up and p."""
    corners: dict[tuple[int, float], list[Run]] = {}
    for run in find_runs([sweep]):
        if run.axes.get("start") != "stable":
            warm = run.axes.get("warmup_steps") or RAMPS[run.axes["ramp"]]
            corners.setdefault((int(warm), float(run.axes["p"])), []).append(run)
    return {corner: count_escapes(runs, Histories()) for corner, runs in corners.items()}


# ── The effect of a step ────────────────────────────────────────────────────────────────────────────────
SHOWN = "blocks.0.mlp"
BySublayer = dict[str, list[float]]  # a value per seed


def step_effect(results: Path) -> str:
    """The change of the output by a step, and the sums over visits, against R."""
    values: dict[tuple[str, int, str], dict[int, BySublayer]] = {}
    for run in runs_of(results / "step-effect"):
        for record in read_metrics(run.files, "diagnose"):
            for what, sublayer, value in _measured(record):
                by_rounds = values.setdefault((what, record["step"], rule_name(run)), {})
                by_rounds.setdefault(rounds(run), {}).setdefault(sublayer, []).append(value)
    depths = sorted({R for by_rounds in values.values() for R in by_rounds})
    rows = []
    for (what, step, rule), by_rounds in sorted(values.items(), key=lambda item: item[0]):
        shown = [by_rounds.get(R, {}).get(SHOWN) or by_rounds.get(R, {}).get("") for R in depths]
        cells = [f"{_short(fmean(own))} ({len(own)})" if own else MISSING for own in shown]
        rows.append([what, str(step), rule, *cells, *_growth(by_rounds)])
    return table(
        ["", "step", "rule", *(f"R = {R}" for R in depths), "most R / R = 1", "over sublayers"], rows
    )


def _measured(record: Mapping[str, Any]) -> Iterable[tuple[str, str, float]]:
    """What, sublayer (or none), value."""
    for name, one in record["sublayers"].items():
        yield f"‖ΣU‖, {record['updates']}", name, one["update_sum"]
        yield "‖ΣJ‖", name, one["sensitivity_sum"]
    if "step_effect" in record:
        yield "‖ΔF‖/‖F‖", "", record["step_effect"]["measured"]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _growth(by_rounds: Mapping[int, BySublayer]) -> list[str]:
    """At the most rounds over R = 1: of the sublayer that is shown, and least and largest of all."""
    most = max(by_rounds)
    if most == 1 or 1 not in by_rounds:
        return [MISSING, MISSING]
    ratios = {
        name: fmean(by_rounds[most][name]) / fmean(own)
        for name, own in by_rounds[1].items()
        if name in by_rounds[most]
    }
    every = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}" if len(ratios) > 1 else MISSING
    return [f"{ratios.get(SHOWN, ratios.get('', math.nan)):.2f}", every]


# ── Tokens per parameter ────────────────────────────────────────────────────────────────────────────────
def tokens(results: Path) -> str:
    """The losses, and whether the gain over pre-norm grows with R."""
    final = curves_of(runs_of(results / "tokens-per-parameter" / "grid"), rule_and_rounds)
    return "\n\n".join(final_tables(final))


def tokens_search(results: Path) -> str:
    """The search that the rates of these losses come from."""
    curves = curves_of(runs_of(results / "tokens-per-parameter" / "search"), rule_and_rounds)
    peaks = peaks_of(curves)
    rows = [
        [rule, str(R), *loss_cells(curve, peaks), best_rate(curve)] for (rule, R), curve in curves.items()
    ]
    return table(["search", "R", *peaks, "best rate"], rows)


def final_tables(curves: Curves) -> list[str]:
    """Losses with the peak rate that each cell was given, and gains over pre-norm."""
    names, depths = sorted({name for name, _ in curves}), sorted({R for _, R in curves})
    least, most = depths[0], depths[-1]

    def of(name: str, R: int) -> Curve | None:
        return curves.get((name, R))

    falls, gained, biases = (family(curves.values()) for _ in range(3))
    losses = [
        [
            name,
            *(_final(of(name, R)) for R in depths),
            minus(of(name, most), of(name, least), falls, tuned=True),
        ]
        for name in names
    ]
    gains = [
        [
            name,
            *(minus(of("pre-norm", R), of(name, R), gained, tuned=True) for R in depths),
            _growth_of_gain(curves, name, (least, most), gained),
        ]
        for name in names
        if name != "pre-norm"
    ]
    bias = [minus(of("flat, no bias", R), of("flat", R), biases, tuned=True) for R in depths]
    over = [f"R = {R}" for R in depths]
    return [
        table(["loss", *over, f"R = {most} minus R = {least}"], losses),
        table(["gain over pre-norm", *over, f"growth, R = {least} to {most}"], gains),
        table(["flat", *over], [["no bias minus bias", *bias]]),
    ]


def _final(curve: Curve | None) -> str:
    """At the rate that the search found; several, if it was changed between the starts."""
    return ", ".join(f"{views.loss(cell)} at {cell.peak:g}" for cell in curve.cells) if curve else MISSING


def _growth_of_gain(curves: Curves, name: str, ends: tuple[int, int], among: Family) -> Sum | str:
    """The gain at the most rounds minus that at the least."""
    corners = [curves.get((rule, R)) for R in ends for rule in (name, "pre-norm")]
    best = [curve.best for curve in corners if curve]
    if len(best) < len(corners):
        return MISSING
    if None in best:
        return LOST
    own, others, own_later, others_later = (cell.losses for cell in best if cell)
    return among.sum((1, others_later), (-1, own_later), (-1, others), (1, own))


# ── Reasoners in FP8 ────────────────────────────────────────────────────────────────────────────────────
SCORES = {"exact": "exact accuracy", "cells": "cells that are right", "loss": "test loss"}


def sudoku_fp8(results: Path) -> str:
    """The last scores of both precisions, by seed, and FP8 minus bf16."""
    rows = []
    for model in ("hrm", "trm"):
        scores: dict[str, dict[int, Mapping[str, Any]]] = {"bf16": {}, "fp8": {}}
        for run in runs_of(results / "sudoku6-fp8" / model):
            *_, last = read_metrics(run.files, "validation")
            scores[run.fields["device.precision"]][run.fields["seed"]] = last
        for name, title in SCORES.items():
            both = [{seed: line[name] for seed, line in scores[p].items()} for p in ("bf16", "fp8")]
            seeds = [", ".join(f"{own[seed]:.3f}" for seed in sorted(own)) for own in both]
            bf16, fp8 = both
            apart = Family(spread_within(both)).minus(fp8, bf16) if fp8 != bf16 else MISSING
            rows.append([model.upper(), title, *seeds, apart])
    return table(["", "", "bf16, by seed", "FP8, by seed", "FP8 minus bf16"], rows)


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "transfer": {"rates": rates, "pairs": pairs, "losses": losses},
    "shapes": {"shapes": shapes},
    "parts": {"part-effects": part_effects, "parts": parts},
    "bias": {"bias": bias},
    "flat-cures": {"flat-cures": flat_cures},
    "muon": {"muon": muon},
    "muon-escape": {"muon-escape": muon_escape, "muon-escape-laptop": muon_escape_laptop},
    "step-effect": {"step-effect": step_effect},
    "sudoku6-fp8": {"sudoku-fp8": sudoku_fp8},
    "tokens-per-parameter": {"tokens-search": tokens_search, "tokens": tokens},
}
