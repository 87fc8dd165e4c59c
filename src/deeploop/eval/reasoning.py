"""How many puzzles a built reasoner solves."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from deeploop.data.puzzles import PuzzleSplit
from deeploop.models.halting import PAD, HaltingConfig, answers_right, puzzle_loss, solve
from deeploop.models.reasoner import Reasoner

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # inputs, labels (B, length) and ids (B,)


class Score(NamedTuple):
    """Sums over puzzles, which add up over batches and ranks."""

    puzzles: float
    loss: float  # mean over a puzzle's cells, summed over puzzles
    solved: float
    cells: float  # right ones
    scored: float  # cells that count
    segments: float  # until the model wanted to halt

    def means(self) -> dict[str, float]:
        """Loss, exact and cell accuracy, mean segments."""
        return {
            "loss": self.loss / self.puzzles,
            "exact": self.solved / self.puzzles,
            "cells": self.cells / self.scored,
            "segments": self.segments / self.puzzles,
        }


def spread_rows(split: PuzzleSplit, count: int, rank: int = 0, ranks: int = 1) -> Rows:
    """At most `count` examples, spread evenly over a split; of several ranks, one's share.

    Sharded blocks meet in every call, so every rank gets as many rows; a blank one isn't counted.
    """
    count = min(count, len(split))
    numbers = np.arange(count) * len(split) // count
    mine = np.concatenate([numbers, np.full(-count % ranks, -1)])[rank::ranks]
    inputs, labels, ids = split.rows(mine.clip(0))
    labels[mine < 0] = PAD
    return inputs, labels, ids


@torch.no_grad()
def score(
    model: Reasoner,
    rows: Rows,
    config: HaltingConfig,
    *,
    batch: int,
    device: torch.device | str = "cpu",
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext,
    adaptive: bool = False,
) -> Score:
    """Solves the puzzles, `batch` at a time; the model is left in eval mode."""
    model.eval()
    sums = torch.zeros(len(Score._fields), dtype=torch.float64)
    for piece in zip(*(torch.from_numpy(part).split(batch) for part in rows), strict=True):
        inputs, labels, ids = (tensor.to(device, torch.long) for tensor in piece)
        carry, puzzle = model.initial(len(inputs)), model.puzzle_rows(ids)
        with arithmetic():
            found = solve(model, carry, inputs, puzzle, config, adaptive=adaptive)
        scored = (labels != PAD).sum(-1)
        real = (scored > 0).double()
        right, solved = answers_right(found.tokens, labels)
        columns = (real, puzzle_loss(found.logits, labels), solved, right.sum(-1), scored, found.segments)
        sums += torch.stack([(column * real).sum() for column in columns]).cpu()
    return Score(*sums.tolist())
