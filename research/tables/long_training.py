"""The tables of docs/results/long-training, and the search of docs/results/larger.

Losses are those of the last weights on the validation windows that did not pick the rate, in windows.npz
(research/experiments/window_losses.py).
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np

from deeploop.report.tables import MISSING, markdown_table
from deeploop.runs.sweeps import read_sweep
from research.contrasts import Contrast, Losses, contrasts, pooled

TOKENS = 3_840 * 128 * 256  # of a run
NAMES = {
    "deeploop": "DeepLoop",
    "prenorm": "pre-norm",
    "flat": "flat",
    "factored": "factored",
    "averaged": "averaged",
}
RATES = {text: float(text) for text in ("4e-3", "8e-3", "1.6e-2", "3.2e-2", "6.4e-2")}


def mean_losses(windows: Path) -> dict[str, float]:
    """Run → mean loss over the windows."""
    with np.load(windows) as file:
        return {run: float(file[run].mean(dtype=np.float64)) for run in file.files}


def losses_of_seeds(folder: Path) -> dict[str, Losses]:
    """Rule → seed → loss; runs are named RULE-seedN."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for run, loss in mean_losses(folder / "windows.npz").items():
        rule, seed = run.rsplit("-seed", 1)
        found[rule][int(seed)] = loss
    return dict(found)


def losses_of_the_search(folder: Path) -> dict[str, dict[float, float]]:
    """Rule → peak rate → loss; runs are named RULE-RATE-seed100 or RATE-RULE-seed100."""
    known = {
        run.removesuffix("-seed100"): loss for run, loss in mean_losses(folder / "search-windows.npz").items()
    }
    found = {
        rule: {
            rate: known[run]
            for text, rate in RATES.items()
            for run in (f"{rule}-{text}", f"{text}-{rule}")
            if run in known
        }
        for rule in NAMES
    }
    return {rule: losses for rule, losses in found.items() if losses}


def chosen_rates(folder: Path) -> dict[str, float]:
    """Rule → the peak rate that the search gave it."""
    cells = read_sweep(folder / "grid").cells.values()
    return {cell.axes["rule"]: cell.settings["optim.peak_lr"] for cell in cells}


def window_error(windows: Path) -> float:
    """Standard error of one run's loss over windows, the mean over runs."""
    with np.load(windows) as file:
        return fmean(float(file[run].std() / len(file[run]) ** 0.5) for run in file.files)


def losses_table(folder: Path) -> str:
    """Each rule's losses at its searched rate, the lowest mean first."""
    found, rates = losses_of_seeds(folder), chosen_rates(folder)
    seeds = sorted(next(iter(found.values())))
    rows = [
        (NAMES[rule], f"{rates[rule]:g}", *(f"{found[rule][seed]:.4f}" for seed in seeds), f"{mean:.4f}")
        for rule, mean in sorted(((r, fmean(c.values())) for r, c in found.items()), key=lambda row: row[1])
    ]
    spread = pooled(found)
    note = (
        f"Standard deviation of seeds, pooled: {spread.sd:.4f} ({spread.dof} degrees of freedom). Standard "
        f"error of a run's loss over windows, shared by all runs: {window_error(folder / 'windows.npz'):.4f}."
    )
    header = ("rule", "peak rate", *(f"seed {seed}" for seed in seeds), "mean")
    return f"{markdown_table(header, rows)}\n\n{note}"


def contrasts_table(folder: Path) -> str:
    rows = [
        (f"{NAMES[c.one]} − {NAMES[c.other]}", str(c), f"{c.p:.2g}", "yes" if c.p < 0.05 else "no")
        for c in contrasts(losses_of_seeds(folder))
    ]
    return markdown_table(("contrast", "difference (95%, all ten together)", "p (Holm)", "told apart"), rows)


def search_table(folder: Path) -> str:
    """Loss at every rate that was tried on the search seed, on the windows that are not used to choose."""
    found = losses_of_the_search(folder)
    tried = {text: rate for text, rate in RATES.items() if any(rate in own for own in found.values())}
    rows = [
        (NAMES[rule], *(f"{own[rate]:.4f}" if rate in own else MISSING for rate in tried.values()))
        for rule, own in found.items()
    ]
    return markdown_table(("rule", *tried), rows)


def level_with_best(found: list[Contrast]) -> list[str]:
    """The best rule, and those that cannot be told apart from it."""
    best = found[0].other
    return [best, *(c.one for c in found if c.other == best and c.p >= 0.05)]


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "long-training": {
        "losses": lambda results: losses_table(results / "long-training"),
        "contrasts": lambda results: contrasts_table(results / "long-training"),
        "search": lambda results: search_table(results / "long-training"),
    },
    "larger": {"search": lambda results: search_table(results / "larger")},
}
