"""The tables of docs/results/reasoner-alignment: κ_g of HRM's modules against C_L."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from deeploop.report.tables import markdown_table
from deeploop.theory import exponent_threshold

# What `deeploop diagnose --json` wrote.
STAGES = {"at the start": "init.json", "after 100 steps": "trained.json", "after 1,000 steps": "long.json"}
FRACTIONS = {0.25: "¼", 0.5: "½"}
Stage = dict[str, Any]


def stages(results: Path) -> dict[str, Stage]:
    folder = results / "reasoner-alignment"
    return {name: json.loads((folder / file).read_text(encoding="utf-8")) for name, file in STAGES.items()}


def kappas(results: Path) -> str:
    """A row for each stage and C_L: κ_g of L and H and the mean of the paper's bound, means over seeds."""
    rows = []
    for name, stage in stages(results).items():
        found: dict[int, list[tuple[float, ...]]] = {}
        for cycle in (run["horizons"]["last_cycle"] for key, run in stage.items() if key != "gamma"):
            low, high = (cycle["modules"][module] for module in "LH")
            found.setdefault(low["R_g"], []).append((low["kappa"], high["kappa"], cycle["kappa_bar"]))
        for C_L, seeds in found.items():
            low, high, mean = (f"{fmean(own):.2f}" for own in zip(*seeds, strict=True))
            rows.append([name, str(len(seeds)), str(C_L), low, str(C_L), high, mean])
    return markdown_table(["", "seeds", "C_L", "κ_g of L", "at most", "κ_g of H", "κ̄_g"], rows)


def exponents(results: Path) -> str:
    """γ of κ_g of L along C_L and the exponent (1 + γ)/4 that it asks for; the aligned case has γ = 1."""
    fits = {name: stage["gamma"]["κ_g(L)"] for name, stage in stages(results).items()}
    rows = [["the paper's aligned case", "1", "–", FRACTIONS[exponent_threshold(1.0)]]]
    for name, fit in fits.items():
        asked = exponent_threshold(min(1.0, max(0.0, fit["gamma"])))
        slopes = ", ".join(f"{slope:.2f}" for slope in fit["slopes"].values())
        rows.append([name, f"{fit['gamma']:.2f}", slopes, FRACTIONS.get(asked, f"{asked:.2f}")])
    return markdown_table(["", "γ", "in each seed", "p ≥"], rows)


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "reasoner-alignment": {"kappas": kappas, "exponents": exponents}
}
