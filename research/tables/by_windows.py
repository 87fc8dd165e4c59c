"""The tables of docs/results/gain, round-worth and rfc.

Losses are those of validation windows (research/experiments/window_losses.py).
"""

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
def worth_table(results: Path) -> str:
    """Loss of the search seed on the windows that did not pick the rate; the loop's is long-training's."""
    found = mean_losses(results / "round-worth" / "search-windows.npz")
    long = mean_losses(results / "long-training" / "search-windows.npz")
    loops = {
        name.replace("deeploop", "loop"): loss for name, loss in long.items() if name.startswith("deeploop-")
    }
    shapes = {
        "loop": "4 blocks, R = 7",
        "stack12": "12 blocks, no loop",
        "stack28": "28 blocks, no loop",
    }
    known = found | loops
    rows = [
        (label, *(_loss(known.get(f"{shape}-{trial}-seed100")) for trial in TRIALS))
        for shape, label in shapes.items()
    ]
    return markdown_table(("DeepLoop", *TRIALS), rows)


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
    "round-worth": {"worth": worth_table},
    "rfc": {"arms": arms_table, "contrasts": arms_contrasts_table},
}
