"""Batches of conversations: whole ones packed into rows in a seeded order, resumable to the row.

An epoch visits every conversation once, in the order of a keyed permutation. A row takes the next ones as
long as they fit, then padding. The rows of a step do not depend on the number of ranks.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deeploop.data.draws import FEISTEL_ROUNDS, keys, permute
from deeploop.data.loader_state import check_position
from deeploop.tasks.chat.data import ChatSplit

CHAT = 0x6368  # separates the order of conversations from other draws with the same seed


class Rows(NamedTuple):
    """Packed conversations, (rows, context) each."""

    inputs: Tensor
    """int64 tokens."""
    targets: Tensor
    """int64: the next token if it belongs to an answer, otherwise -1."""
    starts: Tensor
    """bool: True where a conversation or the padding begins."""


def pack_rows(lengths: np.ndarray, context: int) -> np.ndarray:
    """Pack conversations into rows; return the number of each row's first conversation, then the total."""
    firsts, filled = [0], 0
    for number, length in enumerate(lengths.tolist()):
        if filled + length > context:
            firsts.append(number)
            filled = 0
        filled += length
    return np.array([*firsts, len(lengths)])


def read_rows(split: ChatSplit, rows: list[np.ndarray], context: int, filler: int) -> Rows:
    """Read the conversations with these numbers, one row for each array."""
    shape = (len(rows), context)
    inputs, targets = np.full(shape, filler, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    starts = np.zeros(shape, dtype=np.bool_)
    for row, conversations in enumerate(rows):
        at = 0
        for number in conversations.tolist():
            tokens, answers = (
                array[split.bounds[number] : split.bounds[number + 1]]
                for array in (split.tokens, split.answers)
            )
            place = slice(at, at + len(tokens) - 1)
            inputs[row, place] = tokens[:-1]
            targets[row, place] = np.where(answers[1:], tokens[1:].astype(np.int64), -1)
            starts[row, at] = True
            at = place.stop
        starts[row, at : at + 1] = True
    return Rows(*map(torch.from_numpy, (inputs, targets, starts)))


class ChatLoader:
    """An endless, deterministic sequence of batches. `batch` counts the rows of all ranks."""

    def __init__(
        self,
        split: ChatSplit,
        *,
        context: int,
        batch: int,
        seed: int,
        filler: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch < 1 or batch % world:
            raise ValueError(f"batch {batch}: must be a positive multiple of the {world} ranks")
        self._split, self._context, self._batch = split, context, batch
        self._seed, self._filler = seed, filler
        share = batch // world
        self._mine = slice(rank * share, (rank + 1) * share)
        self._lengths, self._scored = split.lengths, split.scored()
        self._open(epoch=0, position=0)

    @property
    def rows(self) -> int:
        """The number of rows in this epoch."""
        return len(self._firsts) - 1

    def step_batch(self) -> tuple[Tensor, ...]:
        """The rows of this rank for the next step, and the number of answer tokens on all ranks."""
        rows = [self._next_row() for _ in range(self._batch)]
        answers = sum(int(self._scored[row].sum()) for row in rows)
        tensors = read_rows(self._split, rows[self._mine], self._context, self._filler)
        return *tensors, torch.tensor(float(answers))

    def state(self) -> dict[str, Any]:
        """The position of the next step, independent of the rank and of the number of ranks."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of a loader over the same conversations with the same seed and context."""
        self._open(*check_position(state, self._identity()))
        if self._position >= self.rows:
            raise ValueError(f"loader state: position {self._position}: the epoch has {self.rows} rows")

    def _identity(self) -> dict[str, int]:
        return {"seed": self._seed, "context": self._context, "conversations": len(self._split)}

    def _open(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        order_keys = keys(self._seed, CHAT, epoch, count=FEISTEL_ROUNDS)
        self._order = permute(np.arange(len(self._split)), len(self._split), order_keys)
        self._firsts = pack_rows(self._lengths[self._order], self._context)

    def _next_row(self) -> np.ndarray:
        row = self._order[self._firsts[self._position] : self._firsts[self._position + 1]]
        self._position += 1
        if self._position == self.rows:
            self._open(self._epoch + 1, 0)
        return row


def held_out_rows(split: ChatSplit, context: int, filler: int, count: int) -> Rows:
    """`count` rows of conversations in order, spread evenly; all rows if there are fewer."""
    if count < 1:
        raise ValueError(f"validation rows {count}: must be at least 1")
    firsts = pack_rows(split.lengths, context)
    rows = len(firsts) - 1
    count = min(count, rows)
    chosen = np.arange(count) * rows // count
    numbers = [np.arange(firsts[row], firsts[row + 1]) for row in chosen.tolist()]
    return read_rows(split, numbers, context, filler)
