"""The tables of docs/results/quantization: the loss that rounded weights cost, against R, under each rule.

research/experiments/quantization.py measures it. A run's cost is its loss with rounded weights less its loss
as trained, on the same windows. In each format the cells, rule by R, share one spread of the cost over seeds.
"""

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from deeploop.report.tables import markdown_table
from research.contrasts import Contrast, Losses, contrasts, pooled, quantile

Cell = tuple[str, int]  # rule and R
FORMATS: dict[str, tuple[int, int | None]] = {
    "int8, per channel": (8, None),
    "int4, per channel": (4, None),
    "int4, groups of 64": (4, 64),
    "int4, groups of 32": (4, 32),
    "int3, per channel": (3, None),
    "int3, groups of 32": (3, 32),
}
LOSSES = "losses.jsonl"


def rows_of(results: Path, file: str = LOSSES) -> list[dict[str, Any]]:
    """The measurements of each run."""
    lines = (results / "quantization" / file).read_text().splitlines()
    return [*{row["run"]: row for row in map(json.loads, lines)}.values()]


def costs(rows: list[dict[str, Any]], name: str) -> Mapping[Cell, Losses]:
    """Cost of a format in every cell: rules as in the grid, R ascending."""
    cells: dict[Cell, dict[int, float]] = {}
    rules = [*dict.fromkeys(row["rule"] for row in rows)]
    for row in sorted(rows, key=lambda row: (rules.index(row["rule"]), row["rounds"], row["seed"])):
        cells.setdefault((row["rule"], row["rounds"]), {})[row["seed"]] = row[name] - row["loss"]
    return cells


def compared(cells: Mapping[Cell, Losses], pairs: list[tuple[Cell, Cell]]) -> list[Contrast]:
    """The chosen differences, corrected together; all cells give the spread."""
    named = {f"{rule} {rounds}": cell for (rule, rounds), cell in cells.items()}
    return contrasts(named, [(f"{a[0]} {a[1]}", f"{b[0]} {b[1]}") for a, b in pairs])


def cost_table(rows: list[dict[str, Any]]) -> str:
    """A row for each format and rule; a column for each R, and one for the largest R less the smallest."""
    depths, body = sorted({row["rounds"] for row in rows}), []
    for name in FORMATS:
        cells = costs(rows, name)
        rules = [*dict.fromkeys(rule for rule, _ in cells)]
        spread = pooled({str(cell): seeds for cell, seeds in cells.items()})
        half = quantile(0.975, spread.dof) * spread.error(min(map(len, cells.values())))
        grown = compared(cells, [((rule, depths[-1]), (rule, depths[0])) for rule in rules])
        for rule, growth in zip(rules, grown, strict=True):
            means = (f"{fmean(cells[rule, R].values()):.4f}" for R in depths)
            body.append([name, rule, *means, f"± {half:.4f}", str(growth)])
    last = f"R = {depths[-1]} less R = {depths[0]} (95%, four rules together)"
    return markdown_table(["weights", "rule", *(f"R = {R}" for R in depths), "95%", last], body)


def rule_table(rows: list[dict[str, Any]]) -> str:
    """Rules against each other at the largest R: those that are told apart."""
    deepest, body = max(row["rounds"] for row in rows), []
    for name in FORMATS:
        cells = costs(rows, name)
        own = sorted((cell for cell in cells if cell[1] == deepest), key=lambda c: fmean(cells[c].values()))
        found = compared(cells, [(worse, better) for better, worse in combinations(own, 2)])
        order = ", ".join(rule for rule, _ in own)
        apart = [f"{c.one.split()[0]} − {c.other.split()[0]}: {c}" for c in found if c.p < 0.05]
        body.append([name, order, "; ".join(apart) or "none"])
    return markdown_table(["weights", "cheapest first", "told apart (95%, six pairs together)"], body)


def expectation_table(rows: list[dict[str, Any]]) -> str:
    """The expectations for ratios, as a sum of costs that has a sign: 2 to 4 of the page."""
    shallow, deep = min(row["rounds"] for row in rows), max(row["rounds"] for row in rows)
    rules, body = [*dict.fromkeys(row["rule"] for row in rows)], []
    whole = costs(rows, "int4, per channel")
    grouped = costs(rows, "int4, groups of 32")
    halved = {
        cell: {seed: grouped[cell][seed] - cost / 2 for seed, cost in seeds.items()}
        for cell, seeds in whole.items()
    }
    for rule in rules:
        grows = rule in ("deeploop", "prenorm")
        terms = {(rule, deep): 1.0, (rule, shallow): -2.0}
        name = f"R = {deep} less twice R = {shallow}, int4 per channel"
        body.append(
            ("2" if grows else "3", name, rule, *judged(whole, terms, 1 if grows else -1, len(rules)))
        )
    for rule in rules:
        name = f"groups of 32 less half of per channel, int4, R = {deep}"
        body.append(("4", name, rule, *judged(halved, {(rule, deep): 1.0}, -1, len(rules))))
    return markdown_table(
        ["no.", "cost", "rule", "expected", "found (95%, four rules together)", "verdict"], body
    )


def judged(
    cells: Mapping[Cell, Losses], terms: Mapping[Cell, float], sign: int, together: int
) -> tuple[str, str, str]:
    """The expected sign of a sum of cell means, the sum with its interval, and what follows."""
    spread = pooled({str(cell): seeds for cell, seeds in cells.items()})
    value = sum(weight * fmean(cells[cell].values()) for cell, weight in terms.items())
    error = spread.error(*(len(cells[cell]) / weight**2 for cell, weight in terms.items()))
    half = quantile(1 - 0.025 / together, spread.dof) * error
    verdict = "open" if abs(value) < half else "kept" if value * sign > 0 else "refuted"
    expected = "above 0" if sign > 0 else "below 0"
    return expected, f"{value:+.4f} ({value - half:.4f} to {value + half:.4f})", verdict


def loss_table(rows: list[dict[str, Any]]) -> str:
    """The mean loss as trained, over seeds."""
    depths, body = sorted({row["rounds"] for row in rows}), []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        losses = ([r["loss"] for r in rows if (r["rule"], r["rounds"]) == (rule, R)] for R in depths)
        body.append([rule, *(f"{fmean(own):.3f}" for own in losses)])
    return markdown_table(["loss as trained", *(f"R = {R}" for R in depths)], body)


def larger_table(rows: list[dict[str, Any]]) -> str:
    """Cost in every format under each rule: at its rate of the lowest loss, and over all of its rates."""
    runs = {
        rule: [row for row in rows if row["rule"] == rule] for rule in dict.fromkeys(r["rule"] for r in rows)
    }
    best = {rule: min(own, key=lambda row: row["loss"]) for rule, own in runs.items()}

    def cost(name: str, rule: str) -> str:
        each = sorted(row[name] - row["loss"] for row in runs[rule])
        return f"{best[rule][name] - best[rule]['loss']:.4f} ({each[0]:.4f} to {each[-1]:.4f})"

    body = [["none: the loss as trained", *(f"{row['loss']:.4f}" for row in best.values())]]
    body += [[name, *(cost(name, rule) for rule in runs)] for name in FORMATS]
    return markdown_table(["weights", *runs], body)


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "quantization": {
        "losses": lambda results: loss_table(rows_of(results)),
        "costs": lambda results: cost_table(rows_of(results)),
        "expectations": lambda results: expectation_table(rows_of(results)),
        "rules": lambda results: rule_table(rows_of(results)),
        "larger": lambda results: larger_table(rows_of(results, "larger.jsonl")),
    }
}
