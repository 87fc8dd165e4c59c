"""The paper's numbers, each with its place, as `published.json` has them. No torch, nothing computed.

LOSS["small", "deeploop", 3].printed             2.7917
LOSS["small", "deeploop", 3].place               Table 1, GPT-2 small, DeepLoop, R=3
ACCURACY["medium", 0, "prenorm", 7, "piqa"]      and "average" for the Avg column

Keys are the words of our configs: sizes "small" and "medium", rules "prenorm" (the baseline) and "deeploop",
rounds, shots, the harness' names of tasks. `tests/paper/test_published.py` recomputes what
the paper says about these numbers.

A table of the file has columns (label → key) and rows [key, label, numbers]; a star marks a bold number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from deeploop.files import parse_json

SIZES = ("small", "medium")
METHODS = {"prenorm": "baseline (pre-LN)", "deeploop": "DeepLoop"}
ROUNDS = (1, 3, 5, 7)
TASKS = {
    "arc_challenge": "ARC-C",
    "arc_easy": "ARC-E",
    "hellaswag": "HellaSwag",
    "openbookqa": "OBQA",
    "piqa": "PIQA",
    "sciq": "SciQ",
    "social_iqa": "SIQA",
    "winogrande": "WG",
}
VOTES = (1, 2, 10, 100, 1000)
ARC_TASKS, ARC_VIEWS = 400, 1_000  # that vote
SWEEP_SEEDS = 5
GPUS = {"small": 4, "medium": 8}
_FILE = parse_json(resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Value:
    """A number as printed, and where."""

    printed: str
    table: str
    row: str
    column: str
    bold: bool = False

    @property
    def number(self) -> float:
        return float(self.printed)

    @property
    def place(self) -> str:
        return f"{self.table}, {self.row}, {self.column}"


def _values(name: str) -> dict[Any, Value]:
    """Map the keys of rows and columns to the numbers of a table."""
    found: dict[Any, Value] = {}
    for table in _FILE["tables"][name]:
        for key, row, numbers in table["rows"]:
            for (label, column), word in zip(table["columns"].items(), numbers.split(), strict=True):
                value = Value(word.rstrip("*"), table["table"], row, label, bold=word.endswith("*"))
                found[(*key, column) if key else column] = value
    return found


LOSS: dict[tuple[str, str, int], Value] = _values("LOSS")
"""Table 1: (size, rule, rounds) → final validation loss, nats per token."""
LOSS_DELTA: dict[tuple[str, int], Value] = _values("LOSS_DELTA")
"""(size, rounds) → the printed Δ row."""
ACCURACY: dict[tuple[str, int, str, int, str], Value] = _values("ACCURACY")
"""Tables 2 and 4: (size, shots, rule, rounds, task) → accuracy in %; the task "average" is the Avg column."""
ARC: dict[tuple[str, int], Value] = _values("ARC")
"""Table 3: (model, voting budget K) → accuracy in %; the model "delta" is the printed Δ row."""
ESCAPES: dict[float, Value] = _values("ESCAPES")
"""Appendix C: p → seeds of five that escape the floor, any attempt of a seed counted."""
SWEEP_LOSS: dict[float, Value] = _values("SWEEP_LOSS")
"""p → mean validation loss at step 2,000 of the attempts that train; the paper prints these four."""
WALL_HOURS: dict[tuple[str, int], Value] = _values("WALL_HOURS")
GPU_HOURS: dict[tuple[str, int], Value] = _values("GPU_HOURS")
"""Appendix D: (size, rounds) → H200 hours of one cell; the paper gives both rules the same."""
SWEEP_FLOOR, SWEEP_MINUTES, SWEEP_GPUS = (
    Value(*_FILE["values"][name]) for name in ("SWEEP_FLOOR", "SWEEP_MINUTES", "SWEEP_GPUS")
)
CELLS_GPU_HOURS, OTHER_GPU_HOURS, ALL_GPU_HOURS = (
    Value(*_FILE["values"][name]) for name in ("CELLS_GPU_HOURS", "OTHER_GPU_HOURS", "ALL_GPU_HOURS")
)
SETUP: Mapping[str, Mapping[str, Any]] = {
    size: _FILE["setup"][size] | _FILE["setup"]["common"] for size in SIZES
}
"""size → what every cell of the paper shares. Rates and warm-up are the public code's."""


def gpu_hours(size: str, rule: str, rounds: int) -> float | None:
    """The paper's H200 hours for a cell of Table 1, or None for a cell it does not have."""
    value = GPU_HOURS.get((size, rounds)) if rule in METHODS else None
    return None if value is None else value.number
