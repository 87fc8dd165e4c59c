"""Batches of puzzles in a seeded order, resumable to the example.

An epoch visits the groups in a random order, draws one puzzle of each, and gives all examples of that
puzzle in a random order. Epochs follow without a gap: where one ends inside a batch, the next
continues it, and no example is dropped.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeploop.data.draws import FEISTEL_ROUNDS, keys, permute, words
from deeploop.data.loader_state import check_position
from deeploop.tasks.puzzles.data.kinds import KINDS
from deeploop.tasks.puzzles.data.sets import PuzzleSet

Rows = slice | np.ndarray
Batch = tuple[Tensor, Tensor, Tensor]


class PuzzleLoader:
    """An endless, deterministic stream of training examples, the same on every rank."""

    def __init__(self, puzzles: PuzzleSet, *, seed: int, augment: bool = True) -> None:
        self._puzzles, self._seed = puzzles, seed
        self._augment = KINDS[puzzles.kind].augment if augment else None
        self._augment_key = keys(seed, 0, 1)[0]  # not the key of an epoch's order
        self._open(epoch=0, position=0)

    def next_batch(self, count: int, rows: Rows = slice(None)) -> Batch:
        """Advance the global stream by `count` examples and return those at `rows` among them.

        A loop that refills only the slots that halted passes the same `count` on every rank (all that halted,
        or the whole batch if the others are to be dropped) and a rank's own `rows`. Only these are computed.
        """
        if count < 0:
            raise ValueError(f"count {count}: must be at least 0")
        examples, numbers = self._take(count)
        inputs, labels, ids = self._puzzles.train.rows(examples[rows])
        if self._augment is not None:
            inputs, labels = self._augment(inputs, labels, self._augment_key, numbers[rows])
        return _tensor(inputs), _tensor(labels), _tensor(ids)

    def state(self) -> dict[str, Any]:
        """The position of the next batch, independent of the rank and of the number of ranks."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of a loader over the same puzzles with the same seed."""
        self._open(*check_position(state, self._identity()))
        if self._position >= len(self._order):
            raise ValueError(f"loader state: position {self._position}: an epoch has {len(self._order)}")

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "puzzles": self._puzzles.hash, "augment": self._augment is not None}

    def _open(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = self._epoch_order()

    def _take(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next `count` examples, and a unique number for each draw."""
        examples, numbers = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            take = min(count - done, len(self._order) - self._position)
            drawn = np.arange(self._position, self._position + take)
            examples[done : done + take] = self._order[drawn]
            numbers[done : done + take] = (self._epoch << 32) + drawn
            done += take
            self._position += take
            if self._position == len(self._order):
                self._open(self._epoch + 1, 0)
        return examples, numbers

    def _epoch_order(self) -> np.ndarray:
        """The epoch's examples in the order in which they are drawn."""
        train = self._puzzles.train
        puzzle_key, pair_key, *feistel = keys(self._seed, self._epoch, count=2 + FEISTEL_ROUNDS)
        order = permute(np.arange(len(train.groups)), len(train.groups), np.array(feistel))
        pairs, puzzles, _ = train.groups[order].T
        puzzle = (words(puzzle_key, order, 1)[:, 0] % puzzles.astype(np.uint64)).astype(np.int64)
        first = train.first_examples()[order] + puzzle * pairs
        place = np.repeat(np.arange(len(order)), pairs)
        examples = np.repeat(first - (np.cumsum(pairs) - pairs), pairs) + np.arange(len(place))
        return examples[np.lexsort((words(pair_key, np.arange(len(place)), 1)[:, 0], place))]


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
