"""Score a reasoner's answers to puzzles."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from deeploop.config.loop import HaltingConfig
from deeploop.models.halting import PAD, Answers, answers_right, puzzle_loss, solve, wants_to_halt
from deeploop.models.reasoner import Carry, Reasoner
from deeploop.tasks.puzzles.data.sets import PuzzleSet, PuzzleSplit

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # inputs, labels (B, length) and ids (B,)


class PuzzleScore(NamedTuple):
    """Sums over puzzles, to be added over batches and ranks."""

    puzzles: float
    loss: float  # mean over a puzzle's cells, summed over puzzles
    solved: float
    cells: float  # correct ones
    scored: float  # cells that count
    segments: float  # until the model halts

    def means(self) -> dict[str, float]:
        """Loss, exact and cell accuracy, and mean segments."""
        return {
            "loss": self.loss / self.puzzles,
            "exact": self.solved / self.puzzles,
            "cells": self.cells / self.scored,
            "segments": self.segments / self.puzzles,
        }


@dataclass(frozen=True)
class Solver:
    """A model on its device with its settings: all segments or, if `adaptive`, until it halts."""

    model: Reasoner
    config: HaltingConfig
    batch: int
    device: torch.device | str = "cpu"
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext
    adaptive: bool = False

    def __call__(self, rows: Rows) -> tuple[Answers, PuzzleScore]:
        """The answers to one batch, and their score."""
        return self.after(rows, (self.config.segments,))[-1]

    @torch.no_grad()
    def after(
        self, rows: Rows, counts: Sequence[int], carry: Carry | None = None
    ) -> list[tuple[Answers, PuzzleScore]]:
        """The answers to one batch after each of these numbers of segments, and their scores.

        `carry` holds the first states; by default, the model's own.
        """
        inputs, labels, ids = (torch.from_numpy(part).to(self.device, torch.long) for part in rows)
        carry = self.model.initial(len(inputs)) if carry is None else carry
        puzzle = self.model.puzzle_rows(ids)
        with self.arithmetic():
            read = solve(self.model, carry, inputs, puzzle, self.config, counts, adaptive=self.adaptive)
        return [(answers, self._score(answers, labels)) for answers in read]

    def _score(self, answers: Answers, labels: torch.Tensor) -> PuzzleScore:
        scored = (labels != PAD).sum(-1)
        real = (scored > 0).double()
        right, solved = answers_right(answers.tokens, labels)
        columns = (real, puzzle_loss(answers.logits, labels), solved, right.sum(-1), scored, answers.segments)
        return PuzzleScore(*torch.stack([(column * real).sum() for column in columns]).tolist())


@torch.no_grad()
def first_states(model: Reasoner, starts: int, noise: float) -> Carry:
    """`starts` first states, one per row: the model's own, then with normal noise of different seeds."""
    first = model.initial(starts)
    draws = torch.zeros(starts, 2, *first.high.shape[1:])
    for start in range(1, starts):
        draws[start].normal_(0.0, noise, generator=torch.Generator().manual_seed(start))
    high, low = draws.to(first.high).unbind(1)
    return Carry(first.high + high, first.low + low)


class Step(NamedTuple):
    """The answer to one puzzle after a segment."""

    tokens: np.ndarray  # (length,)
    confidence: float  # σ(q_halt)
    halts: bool  # True if the model would stop here


@torch.no_grad()
def trace(solver: Solver, inputs: np.ndarray, segments: int) -> list[Step]:
    """Answer one puzzle (length,) without a puzzle id; return the answer after each segment."""
    model = solver.model.eval()
    tokens = torch.from_numpy(inputs[None]).to(solver.device, torch.long)
    counts, puzzle = range(1, segments + 1), model.puzzle_rows(tokens.new_zeros(1))
    with solver.arithmetic():
        read = solve(model, model.initial(1), tokens, puzzle, solver.config, counts)
    return [
        Step(answers.tokens[0].cpu().numpy(), float(q[0].sigmoid()), bool(wants_to_halt(q, solver.config)))
        for answers in read
        for q in answers.q
    ]


def added(scores: list[PuzzleScore]) -> PuzzleScore:
    """Add scores."""
    return PuzzleScore(*map(sum, zip(*scores, strict=True)))


def spread(count: int, over: int) -> np.ndarray:
    """At most `count` of the numbers below `over`, evenly spread."""
    count = min(count, over)
    return np.arange(count) * over // count


def spread_rows(split: PuzzleSplit, count: int, rank: int = 0, ranks: int = 1) -> Rows:
    """At most `count` examples, spread evenly over a split; with several ranks, the share of one.

    Sharded blocks communicate in every call, so every rank gets the same number of rows; blank ones do not
    count.
    """
    numbers = spread(count, len(split))
    mine = np.concatenate([numbers, np.full(-len(numbers) % ranks, -1)])[rank::ranks]
    inputs, labels, ids = split.rows(mine.clip(0))
    labels[mine < 0] = PAD
    return inputs, labels, ids


def by_source(puzzles: PuzzleSet, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Group test examples by the file that they come from."""
    split = puzzles.test
    assert split.sources is not None
    source = split.sources[split.origin(numbers)[0]]
    groups = ((name, numbers[source == n]) for n, name in enumerate(puzzles.sources))
    return {name: rows for name, rows in groups if len(rows)}


def score(
    solver: Solver,
    rows: Rows,
    *,
    progress: bool = False,
    before_batch: Callable[[float], None] = lambda share: None,
) -> PuzzleScore:
    """Score the puzzles in batches; the model is left in eval mode.

    `before_batch` is called with the share of the puzzles done.
    """
    solver.model.eval()
    batches = [slice(first, first + solver.batch) for first in range(0, len(rows[0]), solver.batch)]
    quiet = None if progress else True  # None: only on a terminal
    bar = tqdm(batches, desc="puzzles", unit=" batches", dynamic_ncols=True, disable=quiet)
    inputs, labels, ids = rows
    scores = []
    for piece in bar:
        before_batch(piece.start / len(ids))
        scores.append(solver((inputs[piece], labels[piece], ids[piece]))[1])
    return added(scores)
