"""The tables of docs/results/gain, round-worth and rfc.

Losses are those of validation windows (research/experiments/window_losses.py).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np

from deeploop.report.runs import find_runs
from deeploop.report.tables import MISSING, markdown_table
from research.contrasts import Losses, contrasts, holm, pooled, quantile, upper_tail
from research.tables.long_training import losses_of_seeds, mean_losses

RULES = {"prenorm": "pre-norm", "deeploop": "DeepLoop"}
ROUNDS = (1, 3, 7)
GROWTHS = ((1, 3), (3, 7), (1, 7))
TRIALS = ("8e-3", "1.6e-2", "3.2e-2", "6.4e-2")
Cells = dict[tuple[str, int], Losses]


# ── Gain ────────────────────────────────────────────────────────────────────────────────────────────────
def gain_cells(results: Path) -> Cells:
    """Rule and rounds → seed → loss; R = 7 is that of long-training."""
    found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for run, loss in mean_losses(results / "gain" / "windows.npz").items():
        rule, *_, rounds, seed = run.split("-")
        if "6.4e" not in run:  # the rate beyond the chosen one: grid-at-the-edge
            found[rule, int(rounds.removeprefix("rounds"))][int(seed.removeprefix("seed"))] = loss
    long = losses_of_seeds(results / "long-training")
    return {**found, **{(rule, 7): long[rule] for rule in RULES}}


def gains(cells: Cells) -> dict[int, float]:
    """R → pre-norm's mean loss minus DeepLoop's."""
    mean = {cell: fmean(losses.values()) for cell, losses in cells.items()}
    return {R: mean["prenorm", R] - mean["deeploop", R] for R in ROUNDS}


def gains_table(results: Path) -> str:
    cells = gain_cells(results)
    spread = pooled({str(cell): losses for cell, losses in cells.items()})
    half = quantile(1 - 0.025 / len(ROUNDS), spread.dof) * spread.error(4, 4)
    windows = gain_window_errors(results)
    rows = [
        (
            str(R),
            *(f"{fmean(cells[rule, R].values()):.4f}" for rule in RULES),
            f"{gain:+.4f}",
            f"{gain - half:.4f} to {gain + half:.4f}",
            f"{windows[R]:.4f}",
        )
        for R, gain in gains(cells).items()
    ]
    header = (
        "R",
        *RULES.values(),
        "gain of DeepLoop",
        "95%, all three together",
        "standard error over windows",
    )
    note = f"Standard deviation of seeds, pooled: {spread.sd:.4f} ({spread.dof} degrees of freedom)."
    return f"{markdown_table(header, rows)}\n\n{note}"


def growths_table(results: Path) -> str:
    """The growth of the gain: four means of four seeds each."""
    cells = gain_cells(results)
    spread, gain = pooled({str(cell): losses for cell, losses in cells.items()}), gains(cells)
    error = spread.error(4, 4, 4, 4)
    means = [gain[high] - gain[low] for low, high in GROWTHS]
    adjusted = holm([2 * upper_tail(abs(mean) / error, spread.dof) for mean in means])
    half = quantile(1 - 0.025 / len(GROWTHS), spread.dof) * error
    rows = [
        (f"{low} to {high}", f"{mean:+.4f}", f"{mean - half:.4f} to {mean + half:.4f}", f"{p:.2g}")
        for (low, high), mean, p in zip(GROWTHS, means, adjusted, strict=True)
    ]
    return markdown_table(("from R", "growth of the gain", "95%, all three together", "p (Holm)"), rows)


def gain_window_errors(results: Path) -> dict[int, float]:
    """R → standard error of the gain over windows: the seeds' mean difference, window by window."""

    def error(file: Mapping[str, np.ndarray], stem: str) -> float:
        rule = {name: [file[stem.format(rule=name, seed=seed)] for seed in (2, 3, 4, 5)] for name in RULES}
        apart = np.mean(rule["prenorm"], axis=0) - np.mean(rule["deeploop"], axis=0)
        return float(apart.std() / len(apart) ** 0.5)

    with (
        np.load(results / "gain" / "windows.npz") as short,
        np.load(results / "long-training" / "windows.npz") as long,
    ):
        few = {R: error(short, f"{{rule}}-rounds{R}-seed{{seed}}") for R in (1, 3)}
        return few | {7: error(long, "{rule}-seed{seed}")}


def gain_search_table(results: Path) -> str:
    runs = find_runs([results / "gain" / "search"])
    found = {
        (str(run.axes["rule"]), int(run.axes["rounds"]), str(run.axes["trial"])): run.validation["loss"]
        for run in runs
    }
    rows = [
        (RULES[rule], str(R), *(_loss(found.get((rule, R, trial))) for trial in TRIALS))
        for rule in RULES
        for R in (1, 3)
    ]
    return markdown_table(("rule", "R", *TRIALS), rows)


# ── What a round is worth ───────────────────────────────────────────────────────────────────────────────
# Shape → what it is, and its training FLOPs in units of the first one's.
SHAPES = {
    "loop1": ("4 blocks, R = 1", 1),
    "loop3": ("4 blocks, R = 3", 3),
    "stack12": ("12 blocks", 3),
    "longer3": ("4 blocks, R = 1, 3 times as long", 3),
    "loop7": ("4 blocks, R = 7", 7),
    "stack28": ("28 blocks", 7),
    "longer7": ("4 blocks, R = 1, 7 times as long", 7),
}
COMPARED = (("loop3", "stack12"), ("loop3", "longer3"), ("loop7", "stack28"), ("loop7", "longer7"))


def worth_cells(results: Path) -> dict[str, Losses]:
    """Shape → seed → loss; R = 7 is DeepLoop's of long-training."""
    loop7 = losses_of_seeds(results / "long-training")["deeploop"]
    return losses_of_seeds(results / "round-worth") | {"loop7": loop7}


def worth_table(results: Path) -> str:
    """FLOPs and mean losses of the seeds."""
    cells = worth_cells(results)
    spread = pooled(cells)
    rows = [
        (label, str(flops), f"{fmean(cells[shape].values()):.4f}", str(len(cells[shape])))
        for shape, (label, flops) in SHAPES.items()
    ]
    note = f"Standard deviation of seeds, pooled: {spread.sd:.4f} ({spread.dof} degrees of freedom)."
    return f"{markdown_table(('model', 'FLOPs', 'nats per byte', 'seeds'), rows)}\n\n{note}"


def worth_contrasts_table(results: Path) -> str:
    """Each loop beside its rivals; the last column has the spread of seeds without the runs at R = 7."""
    cells = worth_cells(results)
    pairs = pooled({shape: losses for shape, losses in cells.items() if shape != "loop7"})
    point = quantile(1 - 0.025 / len(COMPARED), pairs.dof)
    rows = []
    for c in contrasts(cells, COMPARED):
        half = point * pairs.error(len(cells[c.one]), len(cells[c.other]))
        wider = f"{c.mean - half:.4f} to {c.mean + half:.4f}"
        rows.append((f"{SHAPES[c.one][0]} − {SHAPES[c.other][0]}", str(c), f"{c.p:.2g}", wider))
    header = ("loop − rival of equal FLOPs", "difference (95%, all four together)", "p (Holm)")
    return markdown_table((*header, "95%, spread without R = 7"), rows)


def equivalence(cells: Mapping[str, Losses], rounds: int) -> tuple[float, float]:
    """Exponent φ of arXiv 2604.21106 and half of its interval, 95% for both rounds together.

    The loop has the loss of a stack of 4·R^φ blocks, interpolated between 4 and 12 over log blocks.
    """
    shallow, loop, deep = (cells[shape] for shape in ("loop1", f"loop{rounds}", "stack12"))
    low, loss, high = (fmean(losses.values()) for losses in (shallow, loop, deep))
    share = (low - loss) / (low - high)
    if not 0 <= share <= 1:
        raise ValueError(f"R = {rounds}: the loss {loss:.4f} is not between those of 4 and of 12 blocks")
    spread = pooled(cells)
    variance = (1 - share) ** 2 / len(shallow) + 1 / len(loop) + share**2 / len(deep)
    half = quantile(1 - 0.025 / 2, spread.dof) * spread.sd * math.sqrt(variance) / (low - high)
    scale = math.log(3) / math.log(rounds)
    return share * scale, half * scale


def equivalence_on_a_curve(cells: Mapping[str, Losses], rounds: int) -> float:
    """Exponent φ by a parabola through the losses of 4, 12 and 28 blocks over log blocks."""
    stacks = {4: "loop1", 12: "stack12", 28: "stack28"}
    curve = np.polyfit(np.log([*stacks]), [fmean(cells[shape].values()) for shape in stacks.values()], 2)
    roots = np.roots(curve - [0, 0, fmean(cells[f"loop{rounds}"].values())])
    lowest = min(roots[np.isreal(roots)].real, default=math.nan)
    if not math.log(4) <= lowest <= math.log(28.001):
        raise ValueError(f"R = {rounds}: the loss is not between those of 4 and of 28 blocks")
    return (lowest - math.log(4)) / math.log(rounds)


def equivalence_table(results: Path) -> str:
    cells, rows = worth_cells(results), []
    for rounds in (3, 7):
        phi, half = equivalence(cells, rounds)
        curved = equivalence_on_a_curve(cells, rounds)
        interval = f"{phi - half:.2f} to {phi + half:.2f}"
        straight, bent = (f"{4 * rounds**exponent:.1f}" for exponent in (phi, curved))
        rows.append((str(rounds), f"{phi:.2f}", interval, straight, f"{curved:.2f}", bent))
    header = ("R", "φ", "95%, both together", "blocks", "φ on a parabola", "blocks on it")
    return markdown_table(header, rows)


def worth_search_table(results: Path) -> str:
    """Loss of the search seed on the windows that did not pick the rate; the loop's is long-training's."""
    found = mean_losses(results / "round-worth" / "search-windows.npz")
    long = mean_losses(results / "long-training" / "search-windows.npz")
    known = found | {run.replace("deeploop", "loop7"): loss for run, loss in long.items()}
    rows = [
        (SHAPES[shape][0], *(_loss(known.get(f"{shape}-{trial}-seed100")) for trial in TRIALS))
        for shape in ("loop7", "stack12", "stack28", "longer3", "longer7")
    ]
    return markdown_table(("model", *TRIALS), rows)


# ── The text that no study used ─────────────────────────────────────────────────────────────────────────
ARMS = {
    "recommended": "DeepLoop, the recommended 3.2e-2",
    "half": "DeepLoop, half of it: 1.6e-2",
    "twice": "DeepLoop, twice it: 6.4e-2",
    "prenorm": "pre-norm, its recommended 1.6e-2",
}


def arms_table(results: Path) -> str:
    found = losses_of_seeds(results / "rfc")
    spread, seeds = pooled(found), sorted(found["recommended"])
    rows = [
        (label, *(f"{found[arm][seed]:.4f}" for seed in seeds), f"{fmean(found[arm].values()):.4f}")
        for arm, label in ARMS.items()
    ]
    note = f"Standard deviation of seeds, pooled: {spread.sd:.4f} ({spread.dof} degrees of freedom)."
    return f"{markdown_table(('', *(f'seed {seed}' for seed in seeds), 'mean'), rows)}\n\n{note}"


def arms_contrasts_table(results: Path) -> str:
    rows = [
        (f"{c.one} − {c.other}", str(c), f"{c.p:.2g}", "yes" if c.p < 0.05 else "no")
        for c in contrasts(losses_of_seeds(results / "rfc"))
    ]
    return markdown_table(("contrast", "difference (95%, all six together)", "p (Holm)", "told apart"), rows)


def _loss(loss: float | None) -> str:
    return MISSING if loss is None else f"{loss:.4f}"


# ── Pages ───────────────────────────────────────────────────────────────────────────────────────────────
TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "gain": {"gains": gains_table, "growths": growths_table, "gain-search": gain_search_table},
    "round-worth": {
        "worth": worth_table,
        "worth-contrasts": worth_contrasts_table,
        "equivalence": equivalence_table,
        "worth-search": worth_search_table,
    },
    "rfc": {"arms": arms_table, "contrasts": arms_contrasts_table},
}
