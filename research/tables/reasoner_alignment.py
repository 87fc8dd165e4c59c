"""The tables of docs/results/reasoner-alignment: κ_g of HRM's modules against C_L."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deeploop.report.tables import markdown_table
from deeploop.theory import exponent_threshold

STAGES = {
    "at the start": "init.json",
    "after 100 steps": "trained.json",
}  # as `deeploop diagnose --json` writes
FRACTIONS = {0.25: "¼", 0.5: "½"}


def stages(results: Path) -> list[dict[str, Any]]:
    folder = results / "reasoner-alignment"
    return [json.loads((folder / name).read_text(encoding="utf-8")) for name in STAGES.values()]


def kappas(results: Path) -> str:
    """A row for each C_L: κ_g of L and H, and the mean that the paper's bound has."""
    both = []
    for stage in stages(results):
        measured = [run["horizons"]["last_cycle"] for name, run in stage.items() if name != "gamma"]
        both.append({own["modules"]["L"]["R_g"]: own for own in measured})
    rows = []
    for C_L in both[0]:
        found = [stage[C_L] for stage in both]
        low, high = ([f"{own['modules'][m]['kappa']:.2f}" for own in found] for m in "LH")
        rows.append([str(C_L), *low, str(C_L), *high, *(f"{own['kappa_bar']:.2f}" for own in found)])
    low, high, mean = ([f"{name}, {stage}" for stage in STAGES] for name in ("κ_g of L", "κ_g of H", "κ̄_g"))
    return markdown_table(["C_L", *low, "at most", *high, *mean], rows)


def exponents(results: Path) -> str:
    """γ of κ_g ~ C_L^γ and the exponent (1 + γ)/4 that it asks for; the aligned case has γ = 1."""
    gammas = [1.0, *(stage["gamma"]["κ_g(L)"]["gamma"] for stage in stages(results))]
    asked = [exponent_threshold(min(1.0, max(0.0, gamma))) for gamma in gammas]
    rows = [
        ["γ of κ_g of L along C_L", *(f"{gamma:.2f}" for gamma in gammas)],
        ["exponent that it asks for, p ≥", *(FRACTIONS.get(p, f"{p:.2f}") for p in asked)],
    ]
    return markdown_table(["", "paper's aligned case", *STAGES], rows)


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "reasoner-alignment": {"kappas": kappas, "exponents": exponents}
}
