"""The tables of docs/results/quantization: the loss that rounded weights cost, against R, under each rule.

research/experiments/quantization.py measures it. A cell is the mean cost over seeds in nats per token,
± half of the 95% interval by Student's t (how many seeds).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from deeploop.report.tables import MISSING, markdown_table
from research.contrasts import Difference, paired

FORMATS: dict[str, tuple[int, int | None]] = {
    "int8, per channel": (8, None),
    "int4, per channel": (4, None),
    "int4, groups of 64": (4, 64),
    "int4, groups of 32": (4, 32),
    "int3, per channel": (3, None),
    "int3, groups of 32": (3, 32),
}
LOSSES = "losses.jsonl"


def cost_table(rows: list[dict[str, Any]]) -> str:
    """A row for each format and rule; a column for each R, and one for the largest R less the smallest."""
    depths = sorted({row["rounds"] for row in rows})
    body = []
    for name in FORMATS:
        for rule in dict.fromkeys(row["rule"] for row in rows):
            costs = [
                {
                    row["seed"]: row[name] - row["loss"]
                    for row in rows
                    if (row["rule"], row["rounds"]) == (rule, R)
                }
                for R in depths
            ]
            cells = [paired(own, dict.fromkeys(own, 0.0)) for own in costs]
            body.append([name, rule, *map(shown, [*cells, paired(costs[-1], costs[0])])])
    header = ["weights", "rule", *(f"R = {R}" for R in depths), f"R = {depths[-1]} less R = {depths[0]}"]
    return markdown_table(header, body)


def shown(cost: Difference | None) -> str:
    if cost is None:
        return MISSING
    if math.isfinite(cost.half):
        return f"{cost.mean:.4f} ± {cost.half:.4f} ({cost.seeds})"
    return f"{cost.mean:.4f} ({cost.seeds})"


def loss_table(rows: list[dict[str, Any]]) -> str:
    """The mean loss as trained, over seeds."""
    depths, body = sorted({row["rounds"] for row in rows}), []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        losses = [[r["loss"] for r in rows if (r["rule"], r["rounds"]) == (rule, R)] for R in depths]
        body.append([rule, *(f"{fmean(own):.3f} ({len(own)})" if own else MISSING for own in losses)])
    return markdown_table(["loss as trained (seeds)", *(f"R = {R}" for R in depths)], body)


def tables(results: Path) -> str:
    lines = (results / "quantization" / LOSSES).read_text().splitlines()
    rows = [*{row["run"]: row for row in map(json.loads, lines)}.values()]
    rules = [*dict.fromkeys(row["rule"] for row in rows)]
    rows.sort(key=lambda row: (rules.index(row["rule"]), row["rounds"], row["seed"]))
    return f"{loss_table(rows)}\n\n{cost_table(rows)}"


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {"quantization": {"quantization": tables}}
