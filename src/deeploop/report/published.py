"""The paper's numbers, each with its place. No torch, nothing computed: what the paper prints.

LOSS["small", "deeploop", 3].printed             2.7917
LOSS["small", "deeploop", 3].place               Table 1, GPT-2 small, DeepLoop, R=3
ACCURACY["medium", 0, "prenorm", 7, "piqa"]      and "average" for the Avg column

Keys are the words of our configs: sizes "small" and "medium", rules "prenorm" (the baseline) and "deeploop",
rounds, shots, the harness' names of tasks. `tests/report/test_published.py` recomputes what
the paper says about these numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def _row(table: str, row: str, columns: list[str], numbers: str) -> dict[str, Value]:
    """Values of one row by column; a star marks what the paper prints in bold."""
    return {
        column: Value(word.rstrip("*"), table, row, column, bold=word.endswith("*"))
        for column, word in zip(columns, numbers.split(), strict=True)
    }


# ── Table 1: final validation loss, nats per token ────────────────────────────────────────────────────────
_TABLE_1 = {
    ("small", "prenorm"): "2.8627* 2.8077 2.7910 2.7700",
    ("small", "deeploop"): "2.8631* 2.7917* 2.7679* 2.7514*",
    ("small", "delta"): "+0.0004 -0.0160 -0.0231 -0.0186",
    ("medium", "prenorm"): "2.6253* 2.5779 2.5640 2.5558",
    ("medium", "deeploop"): "2.6264* 2.5627* 2.5444* 2.5280*",
    ("medium", "delta"): "+0.0011 -0.0153 -0.0196 -0.0278",
}
_ROW_NAMES = METHODS | {"delta": "Δ (DeepLoop − base)"}
_LOSS_AND_DELTA = {
    (size, method, R): value
    for (size, method), numbers in _TABLE_1.items()
    for R, value in zip(
        ROUNDS,
        _row("Table 1", f"GPT-2 {size}, {_ROW_NAMES[method]}", [f"R={R}" for R in ROUNDS], numbers).values(),
        strict=True,
    )
}
LOSS: dict[tuple[str, str, int], Value] = {
    key: value for key, value in _LOSS_AND_DELTA.items() if key[1] != "delta"
}
"""(size, block, rounds) → final validation loss."""
LOSS_DELTA: dict[tuple[str, int], Value] = {
    (size, R): value for (size, method, R), value in _LOSS_AND_DELTA.items() if method == "delta"
}
"""(size, rounds) → the printed Δ row."""

# ── Tables 2 (medium) and 4 (small): accuracy in %, eight tasks and their average ───────────────────────
_TABLES_2_AND_4 = {
    ("small", 0, "prenorm", 1): "23.12 57.11 31.95 20.60 65.83 81.90 37.87 51.62 46.25",
    ("small", 0, "prenorm", 3): "23.89 60.40 33.70 20.20 66.76 83.20 37.21 52.09 47.18",
    ("small", 0, "prenorm", 5): "26.62 61.49* 34.14 20.80 66.49 83.80* 38.54 53.12 48.12",
    ("small", 0, "deeploop", 1): "24.49 58.38 32.31 20.40 65.83 80.90 38.23 51.30 46.48",
    ("small", 0, "deeploop", 3): "26.96* 60.31 33.98 22.00* 67.79 83.80* 39.87* 53.20 48.49*",
    ("small", 0, "deeploop", 5): "25.09 61.36 34.86* 21.00 68.50* 82.20 39.46 53.75* 48.28",
    ("small", 1, "prenorm", 1): "26.11 57.95 31.95 19.80 65.78 83.50 38.38 52.57 47.00",
    ("small", 1, "prenorm", 3): "24.74 61.28 33.42 20.80 67.68* 86.80 37.87 52.41 48.13",
    ("small", 1, "prenorm", 5): "26.88 62.08 33.92 23.20* 67.52 87.10* 40.02* 52.57 49.16",
    ("small", 1, "deeploop", 1): "25.26 57.15 31.90 21.00 67.14 82.80 38.89 51.30 46.93",
    ("small", 1, "deeploop", 3): "26.88 61.41 33.91 21.00 67.46 87.10* 39.76 53.83 48.92",
    ("small", 1, "deeploop", 5): "28.24* 62.67* 34.64* 22.60 67.41 87.00 40.02* 54.70* 49.66*",
    ("medium", 0, "prenorm", 1): "29.44 65.24 38.12 23.60 69.80 85.80 40.23 54.70 50.86",
    ("medium", 0, "prenorm", 3): "32.59 66.75 39.76 27.60 70.13 87.30 39.87 55.96 52.50",
    ("medium", 0, "prenorm", 5): "33.53* 68.31 41.01 25.80 69.70 88.20 38.95 55.41 52.61",
    ("medium", 0, "prenorm", 7): "32.34 69.40 40.61 24.40 70.67* 89.20 39.66 57.30 52.95",
    ("medium", 0, "deeploop", 1): "29.86 65.07 38.21 23.60 68.82 86.10 39.92 55.25 50.85",
    ("medium", 0, "deeploop", 3): "32.59 68.43 40.85 26.80 70.29 88.30 40.02 56.12 52.93",
    ("medium", 0, "deeploop", 5): "33.53* 68.60 41.78 28.20* 70.46 90.10 40.58 56.12 53.67",
    ("medium", 0, "deeploop", 7): "33.11 69.65* 41.83* 25.60 70.57 90.30* 40.94* 59.04* 53.88*",
    ("medium", 1, "prenorm", 1): "30.38 66.92 37.73 24.20 70.08 88.30 40.79 55.09 51.69",
    ("medium", 1, "prenorm", 3): "33.70 68.69 39.71 26.00 70.13 90.50 40.74 55.33 53.10",
    ("medium", 1, "prenorm", 5): "35.75 70.88 40.82 27.80 71.60* 91.90 39.71 56.91 54.42",
    ("medium", 1, "prenorm", 7): "34.22 70.54 40.87 27.80 71.33 92.10 41.30 58.80 54.62",
    ("medium", 1, "deeploop", 1): "30.80 65.78 37.73 22.80 69.10 89.50 41.30 55.25 51.53",
    ("medium", 1, "deeploop", 3): "33.11 68.14 40.59 26.20 69.48 91.30 41.15 57.38 53.42",
    ("medium", 1, "deeploop", 5): "36.43* 68.18 41.50 26.00 70.84 92.10 40.99 57.46 54.19",
    ("medium", 1, "deeploop", 7): "35.15 70.96* 41.83* 28.80* 70.51 92.40* 42.53* 59.43* 55.20*",
}


def _accuracy() -> dict[tuple[str, int, str, int, str], Value]:
    found = {}
    for (size, shots, method, R), numbers in _TABLES_2_AND_4.items():
        table = "Table 4" if size == "small" else "Table 2"
        row = _row(table, f"{shots}-shot, {METHODS[method]} R={R}", [*TASKS.values(), "Avg"], numbers)
        for task, value in zip([*TASKS, "average"], row.values(), strict=True):
            found[size, shots, method, R, task] = value
    return found


ACCURACY: dict[tuple[str, int, str, int, str], Value] = _accuracy()
"""(size, shots, block, rounds, task) → accuracy in %; the task "average" is the Avg column."""

# ── Table 3: voted accuracy on ARC-AGI-1, % of 400 puzzles ──────────────────────────────────────────────
VOTES = (1, 2, 10, 100, 1000)
ARC_TASKS, ARC_VIEWS = 400, 1_000  # that vote
_TABLE_3 = {
    "hrm": ("Vanilla HRM", "31.50 36.50 41.50 47.50 50.75"),
    "hrm-deeploop": ("DeepLoop (p=1/2)", "35.50* 39.75* 44.25* 49.75* 51.50*"),
    "delta": ("Δ", "+4.00 +3.25 +2.75 +2.25 +0.75"),
}
ARC: dict[tuple[str, int], Value] = {
    (method, K): value
    for method, (row, numbers) in _TABLE_3.items()
    for K, value in zip(VOTES, _row("Table 3", row, [f"K={K}" for K in VOTES], numbers).values(), strict=True)
}
"""(model, voting budget K) → accuracy in %; the model "delta" is the printed Δ row."""

# ── Appendix C: the p-sweep, GPT-2 small, R = 3 ─────────────────────────────────────────────────────────
SWEEP_SEEDS = 5
SWEEP_FLOOR = Value("7.67", "Appendix C", "text", "unigram floor")
ESCAPES: dict[float, Value] = {
    p: Value(count, "Appendix C", "escape fractions of 5 seeds", f"p={p:.2f}")
    for p, count in zip((0.30, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60), "0122355", strict=True)
}
"""p → seeds of five that escape the floor, any attempt of a seed counted."""
SWEEP_LOSS: dict[float, Value] = {
    p: Value(loss, "Appendix C", "mean validation loss of attempts that train, step 2000", f"p={p:.2f}")
    for p, loss in zip((0.45, 0.50, 0.55, 0.60), ("3.70", "3.73", "3.76", "3.80"), strict=True)
}
"""p → mean validation loss at step 2,000 of the attempts that train; the paper prints these four."""

# ── Appendix D: compute ─────────────────────────────────────────────────────────────────────────────────
GPUS = {"small": 4, "medium": 8}
_COMPUTE = {
    ("small", "wall"): "9 22 35 50",
    ("small", "gpu"): "37 90 145 200",
    ("medium", "wall"): "12 32 52 77",
    ("medium", "gpu"): "95 260 420 620",
}


def _hours(kind: str, name: str) -> dict[tuple[str, int], Value]:
    columns = [f"R={R}" for R in ROUNDS]
    return {
        (size, R): value
        for size in SIZES
        for R, value in zip(
            ROUNDS,
            _row("Appendix D", f"{size} {name}", columns, _COMPUTE[size, kind]).values(),
            strict=True,
        )
    }


WALL_HOURS: dict[tuple[str, int], Value] = _hours("wall", "wall-clock (h)")
GPU_HOURS: dict[tuple[str, int], Value] = _hours("gpu", "GPU-hours / cell")
"""(size, rounds) → H200 hours of one cell; the paper gives both blocks the same."""
CELLS_GPU_HOURS = Value("3700", "Appendix D", "aggregate cost", "16 cells")
OTHER_GPU_HOURS = Value("7000", "Appendix D", "aggregate cost", "exploratory")
ALL_GPU_HOURS = Value("10700", "Appendix D", "aggregate cost", "project")


def gpu_hours(size: str, block: str, rounds: int) -> float | None:
    """The paper's H200 hours for a cell of Table 1, or None for a cell it does not have."""
    value = GPU_HOURS.get((size, rounds)) if block in METHODS else None
    return None if value is None else value.number


# ── The set-up, as far as the paper or its lineage tell it: field of our config → value ─────────────────
_COMMON: dict[str, Any] = {
    "model.vocabulary": 50257,
    "model.context": 1024,
    "model.final_norm": True,
    "model.mup_base_width": 0,
    "data.path": "data/fineweb-edu",
    "optim.steps": 100_000,
    "optim.batch": 480,
    "optim.peak_lr": 1e-3,
    "optim.floor_lr": 5e-5,
    "optim.warmup_steps": 2_000,
    "optim.betas": [0.9, 0.95],
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.1,
    "optim.clip": 1.0,
}
SETUP: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "model.blocks": 12, "model.width": 768, "model.heads": 6, "model.hidden": 2048, **_COMMON
    },
    "medium": {
        "model.blocks": 24, "model.width": 1024, "model.heads": 8, "model.hidden": 2730, **_COMMON
    },
}  # fmt: skip
"""size → what every cell of the paper shares. Rates and warm-up are the lineage's: the paper states none."""
