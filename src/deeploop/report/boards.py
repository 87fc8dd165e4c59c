"""The table of a report for reasoners on boards, Sudoku and mazes: how many they solve, over seeds. No torch.

The runs of one row agree in every setting of model, optimizer and halting, and in the puzzles.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from deeploop.report.groups import repeats
from deeploop.report.listing import number, setting, short
from deeploop.report.page import MISSING
from deeploop.report.runs import Run, natural
from deeploop.report.tables import Table, reasoner_method
from deeploop.rules import parse

COLUMNS = {
    "puzzles": "data.path", "C_L": "model.low_cycles", "horizon": "model.horizon", "steps": "optim.steps"
}  # fmt: skip
NUMBERS = ("seeds", "unfinished", "exact, %", "s.d.", "least", "most", "cells, %", "s.d.")
OF_A_ROW = ("model.", "optim.", "halting.", "data.test_examples")
# The columns and the method say them.
NOT_TOLD = (*COLUMNS.values(), "model.rule", "model.high_rule")


def boards_table(runs: Sequence[Run]) -> Table | None:
    """A row for each set of seeds; None where no run is a reasoner's on boards."""
    found: dict[str, list[Run]] = {}
    for run in sorted(filter(is_on_boards, runs), key=row_order):
        found.setdefault(json.dumps(settings(run), sort_keys=True), []).append(run)
    if not found:
        return None
    own = [run for cell in found.values() for run in cell]
    return Table(
        "boards",
        "Boards solved at the last validation",
        [*COLUMNS, "method", *NUMBERS, "other settings", "runs' names"],
        [row(cell, own) for cell in found.values()],
        "exact: test boards without a wrong cell after all segments. Means over the runs that came to their "
        "end. other settings: those in which runs on the same puzzles differ. The paper has no such table.",
    )


def is_on_boards(run: Run) -> bool:
    """ARC, whose runs are judged by their votes, is the one kind with a vector for each puzzle."""
    ids = run.stamp.get("shape", {}).get("puzzle_ids", 1)
    return run.stamp.get("task") in ("hrm", "trm") and "model.rule" in run.fields and ids == 1


def settings(run: Run) -> dict[str, Any]:
    """All that the runs of a row have in common."""
    own = {name: value for name, value in run.fields.items() if name.startswith(OF_A_ROW)}
    return own | {"task": run.stamp["task"], "puzzles": str(run.stamp.get("puzzles"))[:12]}


def shown(run: Run) -> list[str]:
    values = dict(run.fields) | {"data.path": Path(str(run.fields.get("data.path", MISSING))).name}
    return [setting(values.get(name, MISSING)) for name in COLUMNS.values()]


def row_order(run: Run) -> list[Any]:
    """By puzzles and schedule, so that methods stand below each other; the published block first."""
    rule = run.fields["model.rule"]
    return [*map(natural, shown(run)), parse(rule).has_alpha, natural(rule)]


def row(cell: Sequence[Run], among: Sequence[Run]) -> list[str]:
    ended = [run for run in cell if run.ended]
    exact, cells = (
        [100 * run.validation[name] for run in ended if run.validation.get(name) is not None]
        for name in ("exact", "cells")
    )
    return [
        *shown(cell[0]), reasoner_method(cell[0].stamp["task"], cell[0]),
        repeats(ended) or str(len(exact)), str(len(cell) - len(ended)), *spread(exact),
        number(min(exact, default=None), ".1f"), number(max(exact, default=None), ".1f"), *spread(cells),
        other_settings(cell[0], among), " ".join(run.name for run in cell),
    ]  # fmt: skip


def spread(values: Sequence[float]) -> list[str]:
    """Mean and standard deviation."""
    return [
        number(fmean(values) if values else None, ".1f"),
        number(stdev(values) if len(values) > 1 else None, ".1f"),
    ]


def other_settings(run: Run, among: Sequence[Run]) -> str:
    """What no column says, of the settings in which runs on these puzzles differ."""
    same = [settings(one) for one in among if shown(one)[0] == shown(run)[0]]
    told = [
        name for name, value in settings(run).items()
        if name not in (*NOT_TOLD, "task") and any(other.get(name, value) != value for other in same)
    ]  # fmt: skip
    return ", ".join(f"{short(name, told)} {setting(settings(run)[name])}" for name in told) or MISSING
