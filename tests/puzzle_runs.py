"""Tiny boards with puzzle ids, and tiny reasoners for them."""

import numpy as np

from deeploop.models.reasoner_config import HRMConfig, TRMConfig
from deeploop.tasks.puzzles.config import HRMTrainConfig, TRMTrainConfig
from deeploop.tasks.puzzles.data.sets import write_puzzles

SHAPE = {"width": 16, "heads": 2, "hidden": 32, "low_cycles": 2, "cycles": 2}
MODELS = {
    "hrm": (HRMTrainConfig, HRMConfig(**SHAPE, high_blocks=1, low_blocks=1, rule="deeploop")),
    "trm": (TRMTrainConfig, TRMConfig(**SHAPE, blocks=1, puzzle_positions=2)),
}


def write_boards(folder, seed=0):
    """Boards of 3 × 3 whose answer is the board, its centre not scored; 6 groups of 2 pairs × 3 views."""
    draw = np.random.default_rng(seed)
    splits = {}
    for name in ("train", "test"):
        inputs = draw.integers(1, 5, (12, 9)).astype(np.uint8)
        labels = np.where(np.arange(9) == 4, 0, inputs).astype(
            np.uint8
        )  # the centre stays when a board is turned
        groups = np.array([[2, 3, 1 + 3 * group] for group in range(6)], dtype="<i8")
        splits[name] = {"inputs": inputs, "labels": labels, "groups": groups}
    views = np.zeros((19, 0), dtype=np.uint8)
    return write_puzzles(folder, kind="maze", vocabulary=5, splits=splits, views=views, build={"seed": seed})
