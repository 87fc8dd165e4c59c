"""Tables and figures of docs/alignment.md, from the metrics that research/experiments/alignment.py left.

    python -m research.experiments.alignment_report docs/results/alignment

The folder holds CELL/metrics.jsonl; tables.md, gamma.json and the pictures are written beside them.
"""

import argparse
import json
from collections.abc import Iterator
from math import prod as product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deeploop.diagnose.collapse import LOSS_MARGIN, SIMILARITY_LIMIT
from deeploop.diagnose.exponent import GammaFit, Point, fit_gamma
from deeploop.report.plots import COLOURS, INK, quiet, save_png
from deeploop.runs.packed import opened, subfolders
from deeploop.train.metrics import read_metrics

ROUNDS = (1, 3, 5, 7)
Record = dict[str, Any]
STARTS = {
    "start-deeploop-warmup2000": "p = ½, 5e-7 a step",
    "start-deeploop-warmup600": "p = ½, 1.7e-6 a step",
    "start-deeploop-warmup100": "p = ½, 1e-5 a step",
    "start-deepnorm-warmup600": "p = ¼, 1.7e-6 a step",
    "start-p1-warmup100": "p = 1, 1e-5 a step",
}


def records(folder: Path, cell: str) -> dict[int, Record]:
    """The diagnoses of a cell by step, each with the validation of that step."""
    validations = {line["step"]: line for line in read_metrics(opened(folder / cell), "validation")}
    found = {}
    for line in read_metrics(opened(folder / cell), "diagnose"):
        found[line["step"]] = line | {"validation": validations.get(line["step"], {})}
    return found


def stages(folder: Path, rule: str, prefix: str = "") -> dict[str, dict[tuple[int, int], Record]]:
    """Stage → (R, seed) → record: at init, at the floor (most alike), and at the last step, if escaped."""
    chosen: dict[str, dict[tuple[int, int], Record]] = {}
    for R in ROUNDS:
        for seed in (0, 1):
            own = records(folder, f"{prefix}{rule}-r{R}-s{seed}")
            if not own:
                continue
            chosen.setdefault("init", {})[R, seed] = own[0]
            if prefix:
                continue
            if rule != "prenorm":
                alike = max(own.values(), key=lambda line: line["similarity"])
                chosen.setdefault("floor", {})[R, seed] = alike
            last = own[max(own)]
            if escaped(last):
                chosen.setdefault("trained", {})[R, seed] = last
    return chosen


def escaped(line: Record) -> bool:
    seen = line["validation"]
    return seen["loss"] < seen["floor"] - LOSS_MARGIN and seen["similarity"] < SIMILARITY_LIMIT


def fits(stage: dict[tuple[int, int], Record]) -> dict[str, GammaFit]:
    own = [
        Point(R, one["own_kappa"], f"{name}, seed {seed}")
        for (R, seed), line in stage.items()
        for name, one in line["sublayers"].items()
    ]
    raw = [
        Point(R, one["own_kappa"], f"{name}, seed {seed}")
        for (R, seed), line in stage.items()
        for name, one in line["raw"].items()
    ]
    shared = [Point(R, line["kappa"], f"seed {seed}") for (R, seed), line in stage.items()]
    # The theory takes the maximum over sublayers; and R = 1, where own κ is 1 by definition, anchors a slope.
    largest = [
        Point(R, max(one["own_kappa"] for one in line["sublayers"].values()), f"seed {seed}")
        for (R, seed), line in stage.items()
    ]
    return {
        "own κ": fit_gamma(own),
        "own κ, largest sublayer": fit_gamma(largest),
        "own κ, R ≥ 3": fit_gamma([point for point in own if point.rounds >= 3]),
        "own κ, raw gradients": fit_gamma(raw),
        "κ_R": fit_gamma(shared),
    }


def kappa_table(title: str, stage: dict[tuple[int, int], Record]) -> Iterator[str]:
    """Own κ of every sublayer against R, mean over seeds; least and most over all of them; and κ_R."""
    yield f"**{title}**\n"
    yield (
        "| R | "
        + " | ".join(first(stage)["sublayers"])
        + " | least to most | κ_R of the paper | similarity | loss |"
    )
    yield "|---" * (len(first(stage)["sublayers"]) + 5) + "|"
    for R in ROUNDS:
        lines = [line for (rounds, _), line in stage.items() if rounds == R]
        if not lines:
            continue
        by_name = {
            name: [line["sublayers"][name]["own_kappa"] for line in lines] for name in lines[0]["sublayers"]
        }
        values = [value for own in by_name.values() for value in own]
        cells = [f"{fmean(own):.2f}" for own in by_name.values()]
        kappas = ", ".join(f"{line['kappa']:.2f}" for line in lines)
        losses = [line["validation"].get("loss") for line in lines if line["validation"]]
        alike = fmean(line["similarity"] for line in lines)
        loss = f"{fmean(losses):.2f}" if losses else "–"
        cells += [f"{min(values):.2f} to {max(values):.2f}", kappas, f"{alike:.2f}", loss]
        yield f"| {R} | {' | '.join(cells)} |"
    yield ""
    for name, fit in fits(stage).items():
        low, high = fit.p_range
        yield (
            f"γ of {name}: {fit.gamma:.2f} [{fit.low:.2f}, {fit.high:.2f}] over {len(fit.slopes)} series; "
            f"asks for p ≥ {fit.p:.2f} [{low:.2f}, {high:.2f}]  "
        )
    yield ""


def first(stage: dict[tuple[int, int], Record]) -> Record:
    return next(iter(stage.values()))


def bound_table(folder: Path) -> Iterator[str]:
    yield "| cell | step | ‖ΔF‖/‖F‖ measured | first order | bound | bound / measured |"
    yield "|---|---|---|---|---|---|"
    for cell in [*(f"deeploop-r{R}-s{seed}" for seed in (0, 1) for R in ROUNDS), *STARTS]:
        own = records(folder, cell)
        for step in (20, 100, 300, 500):
            if effect := own.get(step, {}).get("step_effect"):
                yield (
                    f"| {cell} | {step} | {effect['measured']:.4f} | {effect['first_order']:.4f} | "
                    f"{effect['bound']:.2f} | {effect['bound'] / effect['measured']:.0f} |"
                )
    yield ""


def growth_table(folder: Path) -> Iterator[str]:
    """How the parts of the bound change with R at step 500: slopes of log against log, by seed.

    Pre-norm has no β/α and no bound of its own, but the same norms and the same real step.
    """
    both = {
        "largest visits, max‖U‖": lambda line: constants(line)[0],
        "largest visits, max‖G‖": lambda line: constants(line)[1],
        "largest visits, max‖U‖·max‖G‖": lambda line: product(constants(line)),
        "κ_R": lambda line: line["kappa"],
        "‖ΔF‖/‖F‖ of the step": lambda line: line["step_effect"]["measured"],
    }
    deeploop_only = {
        "(β/α)², which the paper puts for it": ratio_squared,
        "bound with the constants measured": lambda line: line["step_effect"]["bound"],
    }
    tables = {("deeploop", "p = ½"): both | deeploop_only, ("prenorm", "pre-norm"): both}
    for (rule, title), quantities in tables.items():
        yield f"| {title}, step 500 | seed | R = 1 | 3 | 5 | 7 | slope | for R ≥ 3 |"
        yield "|---" * 8 + "|"
        for name, value in quantities.items():
            for seed in (0, 1):
                lines = {R: records(folder, f"{rule}-r{R}-s{seed}")[500] for R in ROUNDS}
                found = [Point(R, value(line)) for R, line in lines.items()]
                cells = " | ".join(f"{point.kappa:.3g}" for point in found)
                slopes = [fit_gamma(points).gamma for points in (found, found[1:])]
                yield f"| {name} | {seed} | {cells} | {slopes[0]:.2f} | {slopes[1]:.2f} |"
        yield ""


def ratio_squared(line: Record) -> float:
    """(β/α)² from M κ (β/α)²; M counts the residual visits of all sublayers."""
    M = len(line["stream"]) * line["rounds"]
    return line["step_effect"]["bound_bare"] / line["kappa"] / M


def constants(line: Record) -> tuple[float, float]:
    own = line["sublayers"].values()
    return (
        max(max(one["sensitivity_norms"]) for one in own),
        max(max(one["update_norms"]) for one in own),
    )


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


def start_table(folder: Path) -> Iterator[str]:
    """The first hundred steps of runs that differ in ramp and exponent."""
    header = ("start", "step", "lr", "‖δ‖ a sublayer", "update / weight", "branch / skip", "common part")
    yield f"| {' | '.join((*header, 'own κ', 'similarity', 'loss'))} |"
    yield "|---" * 10 + "|"
    for cell, title in STARTS.items():
        rates = {line["step"]: line["lr"] for line in read_metrics(opened(folder / cell), "train")}
        for step, line in records(folder, cell).items():
            if step not in (0, 10, 20, 30, 40, 50, 100, 200, 250):
                continue
            effect = line.get("step_effect", {})
            moved = effect.get("update_norms", {})
            relative = effect.get("update_to_weight", {})
            stream = line["stream"].values()
            kappas = [one["own_kappa"] for one in line["sublayers"].values()]
            cells = [
                f"{rates.get(step, 0):.1e}",
                f"{fmean(moved.values()):.3f}" if moved else "–",
                f"{fmean(relative.values()):.2%}" if relative else "–",
                f"{max(max(s['ratio']) for s in stream):.2g}",
                f"{fmean(s['common'][-1] for s in stream):.2f}",
                f"{min(kappas):.2f} to {max(kappas):.2f}",
                f"{line['similarity']:.2f}",
                f"{line['validation'].get('loss', float('nan')):.2f}",
            ]
            yield f"| {title} | {step} | {' | '.join(cells)} |"
    yield ""


def gamma_panels(chosen: dict[str, dict[tuple[int, int], Record]]) -> Figure:
    figure = Figure(figsize=(10.5, 6.4), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for axes, (title, stage) in zip(grid, chosen.items(), strict=False):
        axes.plot([1, 7], [1, 7], "--", color=INK, lw=1, label="κ = R, γ = 1: asks for ½")
        axes.plot([1, 7], [1, 1], ":", color=INK, lw=1, label="κ = 1, γ = 0: asks for ¼")
        for index, name in enumerate(first(stage)["sublayers"]):
            for seed in (0, 1):
                points = [
                    (R, line["sublayers"][name]["own_kappa"]) for (R, s), line in stage.items() if s == seed
                ]
                style = "o-" if seed == 0 else "s-"
                label = name if seed == 0 else None
                axes.plot(*zip(*points, strict=True), style, ms=3, lw=1, color=COLOURS[index], label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ROUNDS, [str(R) for R in ROUNDS])
        axes.set_yticks([0.3, 0.5, 1, 2, 3, 5, 7], ["0.3", "0.5", "1", "2", "3", "5", "7"])
        axes.minorticks_off()
        mean, largest = (fits(stage)[name].gamma for name in ("own κ", "own κ, largest sublayer"))
        axes.set_title(f"{title}\nγ: mean {mean:.2f}, of the largest {largest:.2f}", fontsize=10)
        axes.set_xlabel("rounds R")
        axes.set_ylabel("own κ")
        quiet(axes)
    for axes in grid[len(chosen) :]:
        axes.set_axis_off()
        axes.legend(*grid[0].get_legend_handles_labels(), frameon=False, labelcolor=INK, loc="center")
    return figure


def training_panels(folder: Path) -> Figure:
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, R in enumerate(ROUNDS[1:]):
        for seed, style in ((0, "o-"), (1, "s:")):
            own = records(folder, f"deeploop-r{R}-s{seed}")
            means = [fmean(s["own_kappa"] for s in line["sublayers"].values()) / R for line in own.values()]
            label = f"R = {R}" if seed == 0 else None
            left.plot([*own], means, style, ms=3, lw=1.2, color=COLOURS[index], label=label)
            alike = [line["similarity"] for line in own.values()]
            right.plot([*own], alike, style, ms=3, lw=1.2, color=COLOURS[index], label=label)
    left.set_ylabel("own κ / R, mean over sublayers")
    right.set_ylabel("token similarity")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylim(0, 1.05)
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
        quiet(axes)
    return figure


def start_panels(folder: Path) -> Figure:
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True).ravel()

    def draw(axes: Axes, title: str, value: Any, log: bool = False) -> None:
        for index, (cell, label) in enumerate(STARTS.items()):
            pairs = [(step, value(line)) for step, line in records(folder, cell).items()]
            pairs = [(step, v) for step, v in pairs if v is not None]
            if pairs:
                axes.plot(*zip(*pairs, strict=True), "o-", ms=2, lw=1.2, color=COLOURS[index], label=label)
        axes.set_title(title, fontsize=10)
        if log:
            axes.set_yscale("log")
        quiet(axes)

    def effect(key: str) -> Any:
        return lambda line: fmean(line["step_effect"][key].values()) if "step_effect" in line else None

    draw(grid[0], "validation loss", lambda line: line["validation"].get("loss"))
    draw(grid[1], "token similarity", lambda line: line["similarity"])
    draw(
        grid[2], "own κ, mean (R = 3)", lambda line: fmean(s["own_kappa"] for s in line["sublayers"].values())
    )
    draw(grid[3], "update norm ‖δ‖, mean", effect("update_norms"), log=True)
    draw(grid[4], "update / weight, mean", effect("update_to_weight"), log=True)
    draw(
        grid[5],
        "branch / skip, largest",
        lambda line: max(max(s["ratio"]) for s in line["stream"].values()),
        log=True,
    )
    for axes in grid[3:]:
        axes.set_xlabel("step")
    grid[0].legend(frameon=False, labelcolor=INK, fontsize=7)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds CELL/metrics.jsonl")
    folder = parser.parse_args().folder
    trained, prenorm = stages(folder, "deeploop"), stages(folder, "prenorm")
    titles = {"init": "at init", "floor": "most alike (step 100)", "trained": "at step 500"}
    chosen = {f"DeepLoop {titles[name]}": stage for name, stage in trained.items()}
    chosen |= {f"pre-norm {'at init' if n == 'init' else 'at step 500'}": s for n, s in prenorm.items()}
    deep = {
        f"K = 12, {rule} at init": stages(folder, rule, "init-").get("init", {})
        for rule in ("deeploop", "deepnorm", "prenorm")
    }
    deep = {name: stage for name, stage in deep.items() if len({R for R, _ in stage}) > 1}
    lines = [line for title, stage in (chosen | deep).items() for line in kappa_table(title, stage)]
    lines += [*bound_table(folder), *error_lines(folder), *growth_table(folder), *start_table(folder)]
    (folder / "tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    gammas = {
        title: {
            name: {"gamma": fit.gamma, "low": fit.low, "high": fit.high, "p": fit.p, "slopes": fit.slopes}
            for name, fit in fits(stage).items()
        }
        for title, stage in (chosen | deep).items()
    }
    (folder / "gamma.json").write_text(
        json.dumps(gammas, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    save_png(gamma_panels(chosen), folder / "gamma.png")
    save_png(training_panels(folder), folder / "training.png")
    save_png(start_panels(folder), folder / "start.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
