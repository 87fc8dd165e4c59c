"""How many puzzles a built reasoner solves."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from deeploop.config.loop import HaltingConfig
from deeploop.data.puzzles import PuzzleSet, PuzzleSplit
from deeploop.models.halting import PAD, Answers, answers_right, puzzle_loss, solve, wants_to_halt
from deeploop.models.reasoner import Reasoner

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # inputs, labels (B, length) and ids (B,)


class PuzzleScore(NamedTuple):
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


@dataclass(frozen=True)
class Solver:
    """A model on its device, and how it is asked: all segments, or (`adaptive`) until it wants to halt."""

    model: Reasoner
    config: HaltingConfig
    batch: int
    device: torch.device | str = "cpu"
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext
    adaptive: bool = False

    @torch.no_grad()
    def __call__(self, rows: Rows) -> tuple[Answers, PuzzleScore]:
        """The answers to one batch, and how good they are."""
        inputs, labels, ids = (torch.from_numpy(part).to(self.device, torch.long) for part in rows)
        carry, puzzle = self.model.initial(len(inputs)), self.model.puzzle_rows(ids)
        with self.arithmetic():
            found = solve(self.model, carry, inputs, puzzle, self.config, adaptive=self.adaptive)
        scored = (labels != PAD).sum(-1)
        real = (scored > 0).double()
        right, solved = answers_right(found.tokens, labels)
        columns = (real, puzzle_loss(found.logits, labels), solved, right.sum(-1), scored, found.segments)
        return found, PuzzleScore(*torch.stack([(column * real).sum() for column in columns]).tolist())


class Step(NamedTuple):
    """The answer to one puzzle after a segment."""

    tokens: np.ndarray  # (length,)
    confidence: float  # σ(q_halt)
    halts: bool  # whether the model would stop here


@torch.no_grad()
def trace(solver: Solver, inputs: np.ndarray, segments: int) -> list[Step]:
    """The answer to one puzzle (length,), without a puzzle id, after each of so many segments."""
    model = solver.model.eval()
    tokens = torch.from_numpy(inputs[None]).to(solver.device, torch.long)
    carry, puzzle = model.initial(1), model.puzzle_rows(tokens.new_zeros(1))
    steps = []
    with solver.arithmetic():
        for _ in range(segments):
            segment = model(carry, tokens, puzzle)
            carry, halts = segment.carry, wants_to_halt(segment.q, solver.config)
            found = segment.logits.argmax(-1)[0].cpu().numpy()
            steps.append(Step(found, float(segment.q[0, 0].sigmoid()), bool(halts[0])))
    return steps


def added(scores: list[PuzzleScore]) -> PuzzleScore:
    """The sums over all of them."""
    return PuzzleScore(*map(sum, zip(*scores, strict=True)))


def spread(count: int, over: int) -> np.ndarray:
    """At most `count` of the numbers below `over`, evenly spread."""
    count = min(count, over)
    return np.arange(count) * over // count


def spread_rows(split: PuzzleSplit, count: int, rank: int = 0, ranks: int = 1) -> Rows:
    """At most `count` examples, spread evenly over a split; of several ranks, one's share.

    Sharded blocks meet in every call, so every rank gets as many rows; a blank one isn't counted.
    """
    numbers = spread(count, len(split))
    mine = np.concatenate([numbers, np.full(-len(numbers) % ranks, -1)])[rank::ranks]
    inputs, labels, ids = split.rows(mine.clip(0))
    labels[mine < 0] = PAD
    return inputs, labels, ids


def spread_by_source(puzzles: PuzzleSet, count: int) -> dict[str, Rows]:
    """At most `count` test examples, spread evenly, by the file that they come from."""
    split = puzzles.test
    assert split.sources is not None
    numbers = spread(count, len(split))
    source = split.sources[split.origin(numbers)[0]]
    found = ((name, numbers[source == n]) for n, name in enumerate(puzzles.sources))
    return {name: split.rows(own) for name, own in found if len(own)}


def score(
    solver: Solver,
    rows: Rows,
    *,
    progress: bool = False,
    before_batch: Callable[[float], None] = lambda share: None,
) -> PuzzleScore:
    """Solves the puzzles, a batch at a time; the model is left in eval mode.

    `before_batch` is called with the share of the puzzles that is done.
    """
    solver.model.eval()
    batches = [slice(first, first + solver.batch) for first in range(0, len(rows[0]), solver.batch)]
    quiet = None if progress else True  # None: where nobody watches
    bar = tqdm(batches, desc="puzzles", unit=" batches", dynamic_ncols=True, disable=quiet)
    inputs, labels, ids = rows
    found = []
    for piece in bar:
        before_batch(piece.start / len(ids))
        found.append(solver((inputs[piece], labels[piece], ids[piece]))[1])
    return added(found)
