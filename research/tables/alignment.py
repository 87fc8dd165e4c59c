"""The tables and figures of docs/alignment.md, of the diagnoses in the runs of docs/results/alignment."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deeploop.diagnose.collapse import LOSS_MARGIN, SIMILARITY_LIMIT
from deeploop.diagnose.exponent import GammaFit, Point, fit_gamma
from deeploop.report.plots import COLOURS, INK, quiet
from deeploop.runs.packed import opened, subfolders
from deeploop.train.metrics import read_metrics

ROUNDS, SEEDS = (1, 3, 5, 7), (0, 1)
Record = dict[str, Any]
Stage = Mapping[tuple[int, int], Record]
"""(R, seed) → record."""
STARTS = {
    "start-deeploop-warmup2000": "p = ½, 5e-7 a step",
    "start-deeploop-warmup600": "p = ½, 1.7e-6 a step",
    "start-deeploop-warmup100": "p = ½, 1e-5 a step",
    "start-deepnorm-warmup600": "p = ¼, 1.7e-6 a step",
    "start-p1-warmup100": "p = 1, 1e-5 a step",
}
SHOWN_STEPS = (0, 10, 20, 30, 40, 50, 100, 200, 250)  # of starts


# ── Records ─────────────────────────────────────────────────────────────────────────────────────────────
@cache
def records(folder: Path, cell: str) -> dict[int, Record]:
    """The diagnoses of a cell by step, each with the validation of that step."""
    validations = {line["step"]: line for line in read_metrics(opened(folder / cell), "validation")}
    lines = read_metrics(opened(folder / cell), "diagnose")
    return {line["step"]: line | {"validation": validations.get(line["step"], {})} for line in lines}


def stages(folder: Path, rule: str) -> Mapping[str, Stage]:
    """The records of a rule at init, at the floor (states most alike), and at the last step, if escaped."""
    found: dict[str, dict[tuple[int, int], Record]] = {}
    for R in ROUNDS:
        for seed in SEEDS:
            if not (own := records(folder, f"{rule}-r{R}-s{seed}")):
                continue
            found.setdefault("init", {})[R, seed] = own[0]
            if not rule.startswith("init-"):
                alike = max(own.values(), key=lambda line: line["similarity"])
                found.setdefault("floor", {})[R, seed] = alike
                if escaped(last := own[max(own)]):
                    found.setdefault("trained", {})[R, seed] = last
    return found


def escaped(line: Record) -> bool:
    seen: Record = line["validation"]
    return bool(seen["loss"] < seen["floor"] - LOSS_MARGIN and seen["similarity"] < SIMILARITY_LIMIT)


def chosen_stages(folder: Path) -> tuple[dict[str, Stage], dict[str, Stage]]:
    """Title → stage: those of the trained runs, and those of the published depth at init."""
    trained, prenorm = stages(folder, "deeploop"), stages(folder, "prenorm")
    chosen = {
        "DeepLoop at init": trained["init"],
        "DeepLoop most alike (step 100)": trained["floor"],
        "DeepLoop at step 500": trained["trained"],
        "pre-norm at init": prenorm["init"],
        "pre-norm at step 500": prenorm["trained"],
    }
    deep = {
        f"K = 12, {rule} at init": stages(folder, f"init-{rule}").get("init", {})
        for rule in ("deeploop", "deepnorm", "prenorm")
    }
    return chosen, {title: stage for title, stage in deep.items() if len({R for R, _ in stage}) > 1}


def own_kappas(line: Record, key: str = "sublayers") -> dict[str, float]:
    return {name: one["own_kappa"] for name, one in line[key].items()}


def fits(stage: Stage) -> dict[str, GammaFit]:
    """γ of several κ, by series. The theory takes the maximum over sublayers; own κ is 1 at R = 1."""

    def points(values: Callable[[Record], Mapping[str, float]], least: int = 1) -> GammaFit:
        return fit_gamma([
            Point(R, value, f"{name}, seed {seed}".removeprefix(", "))
            for (R, seed), line in stage.items()
            for name, value in values(line).items()
            if least <= R
        ])  # fmt: skip

    return {
        "own κ": points(own_kappas),
        "own κ, largest sublayer": points(lambda line: {"": max(own_kappas(line).values())}),
        "own κ, R ≥ 3": points(own_kappas, least=3),
        "own κ, raw gradients": points(lambda line: own_kappas(line, "raw")),
        "κ_R": points(lambda line: {"": line["kappa"]}),
    }


# ── Tables ──────────────────────────────────────────────────────────────────────────────────────────────
def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    head = [*map(str, header)]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def kappa_table(title: str, stage: Stage) -> Iterator[str]:
    """Own κ of every sublayer against R, mean over seeds; least and most over all of them; and κ_R."""
    names = [*next(iter(stage.values()))["sublayers"]]
    rows = []
    for R in ROUNDS:
        if not (lines := [line for (rounds, _), line in stage.items() if rounds == R]):
            continue
        kappas = [own_kappas(line) for line in lines]
        values = [value for own in kappas for value in own.values()]
        losses = [line["validation"].get("loss") for line in lines if line["validation"]]
        rows.append([
            R,
            *(f"{fmean(own[name] for own in kappas):.2f}" for name in names),
            f"{min(values):.2f} to {max(values):.2f}",
            ", ".join(f"{line['kappa']:.2f}" for line in lines),
            f"{fmean(line['similarity'] for line in lines):.2f}",
            f"{fmean(losses):.2f}" if losses else "–",
        ])  # fmt: skip
    yield f"**{title}**\n"
    yield from table(["R", *names, "least to most", "κ_R of the paper", "similarity", "loss"], rows)
    yield ""
    for name, fit in fits(stage).items():
        low, high = fit.p_range
        yield (
            f"γ of {name}: {fit.gamma:.2f} [{fit.low:.2f}, {fit.high:.2f}] over {len(fit.slopes)} series; "
            f"asks for p ≥ {fit.p:.2f} [{low:.2f}, {high:.2f}]  "
        )
    yield ""


def bound_table(folder: Path) -> Iterator[str]:
    rows = []
    for cell in [*(f"deeploop-r{R}-s{seed}" for seed in SEEDS for R in ROUNDS), *STARTS]:
        for step in (20, 100, 300, 500):
            if effect := records(folder, cell).get(step, {}).get("step_effect"):
                measured, bound = effect["measured"], effect["bound"]
                shown = f"{measured:.4f}", f"{effect['first_order']:.4f}", f"{bound:.2f}"
                rows.append([cell, step, *shown, f"{bound / measured:.0f}"])
    header = ["cell", "step", "‖ΔF‖/‖F‖ measured", "first order", "bound", "bound / measured"]
    yield from table(header, rows)
    yield ""


def error_lines(folder: Path) -> Iterator[str]:
    """First order against fact, and the bound against both, over every recorded step from the tenth on."""
    effects = [
        line["step_effect"]
        for cell in subfolders(folder)
        for step, line in records(folder, cell.name).items()
        if step >= 10 and "step_effect" in line
    ]
    errors = sorted(effect["error"] for effect in effects)
    ratios = sorted(effect["bound"] / effect["measured"] for effect in effects)
    far = sum(error > 0.15 for error in errors)
    yield (
        f"{len(effects)} steps from the tenth on (the `init` cells end before): the linear prediction is off "
        f"by {median(errors):.1%} (median), by more than 15% at {far} of them; bound / measured "
        f"{median(ratios):.0f} (median), {ratios[0]:.0f} to {ratios[-1]:.0f}\n"
    )


def largest(line: Record, norms: str) -> float:
    return max(max(one[norms]) for one in line["sublayers"].values())


def ratio_squared(line: Record) -> float:
    """(β/α)² from M κ (β/α)²; M counts the residual visits of all sublayers."""
    M = len(line["stream"]) * line["rounds"]
    return float(line["step_effect"]["bound_bare"] / line["kappa"] / M)


# Pre-norm has no β/α and no bound of its own, but the same norms and the same real step.
BOTH: dict[str, Callable[[Record], float]] = {
    "largest visits, max‖U‖": lambda line: largest(line, "sensitivity_norms"),
    "largest visits, max‖G‖": lambda line: largest(line, "update_norms"),
    "largest visits, max‖U‖·max‖G‖": lambda line: (
        largest(line, "sensitivity_norms") * largest(line, "update_norms")
    ),
    "κ_R": lambda line: line["kappa"],
    "‖ΔF‖/‖F‖ of the step": lambda line: line["step_effect"]["measured"],
}
DEEPLOOP_ALONE: dict[str, Callable[[Record], float]] = {
    "(β/α)², which the paper puts for it": ratio_squared,
    "bound with the constants measured": lambda line: line["step_effect"]["bound"],
}


def growth_table(folder: Path) -> Iterator[str]:
    """Growth of the parts of the bound with R at step 500: log-log slopes, by seed."""
    for rule, title, quantities in (
        ("deeploop", "p = ½", BOTH | DEEPLOOP_ALONE),
        ("prenorm", "pre-norm", BOTH),
    ):
        rows = []
        for name, value in quantities.items():
            for seed in SEEDS:
                lines = {R: records(folder, f"{rule}-r{R}-s{seed}")[500] for R in ROUNDS}
                found = [Point(R, value(line)) for R, line in lines.items()]
                slopes = (f"{fit_gamma(points).gamma:.2f}" for points in (found, found[1:]))
                rows.append([name, seed, *(f"{point.kappa:.3g}" for point in found), *slopes])
        header = [f"{title}, step 500", "seed", "R = 1", "3", "5", "7", "slope", "for R ≥ 3"]
        yield from table(header, rows)
        yield ""


def start_table(folder: Path) -> Iterator[str]:
    """The first hundred steps of runs that differ in ramp and exponent."""
    rows = []
    for cell, title in STARTS.items():
        rates = {line["step"]: line["lr"] for line in read_metrics(opened(folder / cell), "train")}
        for step, line in records(folder, cell).items():
            if step not in SHOWN_STEPS:
                continue
            moved, relative = (step_mean(line, key) for key in ("update_norms", "update_to_weight"))
            stream, kappas = line["stream"].values(), own_kappas(line).values()
            rows.append([
                title,
                step,
                f"{rates.get(step, 0):.1e}",
                "–" if moved is None else f"{moved:.3f}",
                "–" if relative is None else f"{relative:.2%}",
                f"{max(max(s['ratio']) for s in stream):.2g}",
                f"{fmean(s['common'][-1] for s in stream):.2f}",
                f"{min(kappas):.2f} to {max(kappas):.2f}",
                f"{line['similarity']:.2f}",
                f"{line['validation'].get('loss', float('nan')):.2f}",
            ])  # fmt: skip
    header = ["start", "step", "lr", "‖δ‖ a sublayer", "update / weight", "branch / skip", "common part"]
    yield from table([*header, "own κ", "similarity", "loss"], rows)
    yield ""


def step_mean(line: Record, key: str) -> float | None:
    """Mean over sublayers of what the last step did; None before the first."""
    values = line.get("step_effect", {}).get(key, {}).values()
    return fmean(values) if values else None


def tables_md(results: Path) -> str:
    folder = results / "alignment"
    chosen, deep = chosen_stages(folder)
    lines = [line for title, stage in (chosen | deep).items() for line in kappa_table(title, stage)]
    for make in (bound_table, error_lines, growth_table, start_table):
        lines += make(folder)
    return "\n".join(lines) + "\n"


def gamma_json(results: Path) -> str:
    chosen, deep = chosen_stages(results / "alignment")
    gammas = {
        title: {
            name: {"gamma": fit.gamma, "low": fit.low, "high": fit.high, "p": fit.p, "slopes": fit.slopes}
            for name, fit in fits(stage).items()
        }
        for title, stage in (chosen | deep).items()
    }
    return json.dumps(gammas, indent=1, ensure_ascii=False) + "\n"


# ── Figures ─────────────────────────────────────────────────────────────────────────────────────────────
def gamma_figure(results: Path) -> Figure:
    """Own κ over R of each sublayer and seed, a panel for each stage."""
    chosen, _ = chosen_stages(results / "alignment")
    figure = Figure(figsize=(10.5, 6.4), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for axes, (title, stage) in zip(grid, chosen.items(), strict=False):
        axes.plot([1, 7], [1, 7], "--", color=INK, lw=1, label="κ = R, γ = 1: asks for ½")
        axes.plot([1, 7], [1, 1], ":", color=INK, lw=1, label="κ = 1, γ = 0: asks for ¼")
        for index, name in enumerate(next(iter(stage.values()))["sublayers"]):
            for seed, style in zip(SEEDS, ("o-", "s-"), strict=True):
                points = [(R, own_kappas(line)[name]) for (R, s), line in stage.items() if s == seed]
                label = name if seed == 0 else None
                axes.plot(*zip(*points, strict=True), style, ms=3, lw=1, color=COLOURS[index], label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ROUNDS, [str(R) for R in ROUNDS])
        axes.set_yticks(ticks := [0.3, 0.5, 1, 2, 3, 5, 7], [str(tick) for tick in ticks])
        axes.minorticks_off()
        mean, most = (fits(stage)[name].gamma for name in ("own κ", "own κ, largest sublayer"))
        axes.set_title(f"{title}\nγ: mean {mean:.2f}, of the largest {most:.2f}", fontsize=10)
        axes.set_xlabel("rounds R")
        axes.set_ylabel("own κ")
        quiet(axes)
    for axes in grid[len(chosen) :]:
        axes.set_axis_off()
        axes.legend(*grid[0].get_legend_handles_labels(), frameon=False, labelcolor=INK, loc="center")
    return figure


def training_figure(results: Path) -> Figure:
    """Own κ / R and token similarity over training."""
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, R in enumerate(ROUNDS[1:]):
        for seed, style in zip(SEEDS, ("o-", "s:"), strict=True):
            own = records(results / "alignment", f"deeploop-r{R}-s{seed}")
            means = [fmean(own_kappas(line).values()) / R for line in own.values()]
            alike = [line["similarity"] for line in own.values()]
            label = f"R = {R}" if seed == 0 else None
            for axes, values in ((left, means), (right, alike)):
                axes.plot([*own], values, style, ms=3, lw=1.2, color=COLOURS[index], label=label)
    left.set_ylabel("own κ / R, mean over sublayers")
    right.set_ylabel("token similarity")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylim(0, 1.05)
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
        quiet(axes)
    return figure


PANELS: dict[str, Callable[[Record], float | None]] = {
    "validation loss": lambda line: line["validation"].get("loss"),
    "token similarity": lambda line: line["similarity"],
    "own κ, mean (R = 3)": lambda line: fmean(own_kappas(line).values()),
    "update norm ‖δ‖, mean": lambda line: step_mean(line, "update_norms"),
    "update / weight, mean": lambda line: step_mean(line, "update_to_weight"),
    "branch / skip, largest": lambda line: max(max(s["ratio"]) for s in line["stream"].values()),
}


def start_figure(results: Path) -> Figure:
    """Six measures of starts that differ in ramp and exponent; the lower three on logarithmic scales."""
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    grid: list[Axes] = [*figure.subplots(2, 3, sharex=True).ravel()]
    for axes, (title, value) in zip(grid, PANELS.items(), strict=True):
        for index, (cell, label) in enumerate(STARTS.items()):
            values = {step: value(line) for step, line in records(results / "alignment", cell).items()}
            shown = {step: one for step, one in values.items() if one is not None}
            axes.plot([*shown], [*shown.values()], "o-", ms=2, lw=1.2, color=COLOURS[index], label=label)
        axes.set_title(title, fontsize=10)
        quiet(axes)
    for axes in grid[3:]:
        axes.set_yscale("log")
        axes.set_xlabel("step")
    grid[0].legend(frameon=False, labelcolor=INK, fontsize=7)
    return figure
