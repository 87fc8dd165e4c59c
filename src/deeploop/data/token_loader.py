"""Batches of token windows in a seeded order, split over ranks and resumable to the sequence.

A window is context + 1 tokens: the first `context` are the inputs, the last `context` the targets.
Windows start every `context` tokens, from an offset drawn for each epoch. An epoch visits each of its
windows once, in the order of a keyed permutation that is computed rather than stored.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from deeploop.data.draws import FEISTEL_ROUNDS, permute
from deeploop.data.loader_state import check_position


class Tokens(Protocol):
    """The part of `TokenStream` that a loader uses."""

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> np.ndarray: ...


class Loader(Protocol):
    """The part of a loader that prefetching uses."""

    def step_batch(self) -> tuple[Tensor, ...]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class TokenLoader:
    """An endless, deterministic sequence of batches. `batch` counts the sequences of all ranks."""

    def __init__(
        self, stream: Tokens, *, context: int, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        _check_length(stream, context)
        if batch < 1 or batch % world:
            raise ValueError(f"batch {batch}: must be a positive multiple of the {world} ranks")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank}: must be at least 0 and below the {world} ranks")
        self._stream = stream
        self._context, self._batch, self._seed = context, batch, seed
        share = batch // world
        self._mine = slice(rank * share, (rank + 1) * share)
        self._epoch, self._position = 0, 0

    def step_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank for the next step: int64, (batch / world, context) each."""
        starts = self.take(self._batch)[self._mine]
        return read_windows(self._stream, self._context, starts)

    def state(self) -> dict[str, Any]:
        """The position of the next step, independent of the rank and of the number of ranks."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of a loader over the same tokens with the same seed and context."""
        self._epoch, self._position = check_position(state, self._identity())
        if self._position >= (windows := self._epoch_order(self._epoch)[1]):
            raise ValueError(f"loader state: position {self._position}: the epoch has {windows} windows")

    def _identity(self) -> dict[str, int]:
        return {"seed": self._seed, "context": self._context, "tokens": len(self._stream)}

    def take(self, count: int) -> np.ndarray:
        """Starts of the next `count` windows, continuing into the next epoch if necessary."""
        parts = []
        while count:
            offset, windows, keys = self._epoch_order(self._epoch)
            take = min(count, windows - self._position)
            order = permute(np.arange(self._position, self._position + take), windows, keys)
            parts.append(offset + self._context * order)
            count -= take
            self.skip(take)
        return np.concatenate(parts)

    def skip(self, count: int) -> None:
        """Advance by `count` windows without computing them."""
        while count:
            windows = self._epoch_order(self._epoch)[1]
            step = min(count, windows - self._position)
            count, self._position = count - step, self._position + step
            if self._position == windows:
                self._epoch, self._position = self._epoch + 1, 0

    def windows_before(self, epochs: int, at_most: int) -> int:
        """The number of windows left until `epochs` epochs are complete, at most `at_most`."""
        left, epoch = -self._position, self._epoch
        while epoch < epochs and left < at_most:
            left, epoch = left + self._epoch_order(epoch)[1], epoch + 1
        return min(max(0, left), at_most)

    def epochs(self) -> float:
        """The number of passes over the stream so far."""
        return self._epoch + self._position / self._epoch_order(self._epoch)[1]

    def _epoch_order(self, epoch: int) -> tuple[int, int, np.ndarray]:
        """An epoch's offset, its number of windows, and the keys of its permutation."""
        seeds = np.random.SeedSequence([self._seed, epoch])
        draw, *keys = seeds.generate_state(1 + FEISTEL_ROUNDS, np.uint64)
        # Below `context`, and small enough to leave room for one window in a very short stream.
        offset = int(draw) % min(self._context, len(self._stream) - self._context)
        return offset, (len(self._stream) - 1 - offset) // self._context, np.array(keys)


class PrefetchLoader:
    """Prepare a loader's next batch in a thread, in pinned memory if asked.

    Its state is that of the last batch returned, so a batch prepared ahead is prepared again after a resume.
    Errors in reading are raised when the batch is requested.
    """

    def __init__(self, loader: Loader, *, pin: bool = False) -> None:
        self._loader, self._pin = loader, pin
        self._pool = ThreadPoolExecutor(1)
        self._state = loader.state()
        self._next: Future[tuple[Tensor, ...]] | None = None

    def step_batch(self) -> tuple[Tensor, ...]:
        """Return the loader's next batch and start preparing the one after it."""
        batch = (self._next or self._begin()).result()
        self._state = self._loader.state()
        self._next = self._begin()
        return batch

    def state(self) -> dict[str, Any]:
        return self._state

    def load_state(self, state: dict[str, Any]) -> None:
        if self._next is not None:
            self._next.exception()  # wait: the thread is advancing the loader
        self._loader.load_state(state)
        self._state, self._next = state, None

    def _begin(self) -> Future[tuple[Tensor, ...]]:
        return self._pool.submit(self._make)

    def _make(self) -> tuple[Tensor, ...]:
        batch = self._loader.step_batch()
        return tuple(tensor.pin_memory() for tensor in batch) if self._pin else batch


def validation_windows(stream: Tokens, context: int, count: int) -> tuple[Tensor, Tensor]:
    """`count` windows at fixed positions, evenly spread over the stream; all windows if it has fewer."""
    _check_length(stream, context)
    if count < 1:
        raise ValueError(f"validation windows {count}: must be at least 1")
    windows = (len(stream) - 1) // context
    count = min(count, windows)
    return read_windows(stream, context, context * (np.arange(count) * windows // count))


def read_windows(stream: Tokens, context: int, starts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inputs and targets (len(starts), context) of the windows that begin at `starts`."""
    inputs, targets = (np.empty((len(starts), context), dtype=np.int64) for _ in range(2))
    for row, start in enumerate(starts.tolist()):
        window = stream.slice(start, start + context + 1)
        inputs[row], targets[row] = window[:-1], window[1:]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _check_length(stream: Tokens, context: int) -> None:
    if context < 1:
        raise ValueError(f"context {context}: must be at least 1")
    if len(stream) < context + 1:
        raise ValueError(
            f"context {context}: a window needs {context + 1} tokens, the stream has {len(stream)}"
        )
