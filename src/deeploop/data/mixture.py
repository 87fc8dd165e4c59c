"""Mix several corpora by weight: the corpus of each sequence is drawn, then its next window is taken.

The draw depends only on the seed and the sequence's number, so it is the same for any number of ranks and
after a resume. Each corpus goes through its own epochs as it would alone; a mixture of one is that corpus.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeploop.data.draws import keys, words
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import TokenLoader, Tokens, read_windows
from deeploop.data.tokenizers import Tokenizer

SKIPPED_AT_ONCE = 2**16  # sequences
MIXTURE = 0x6D69  # separates these draws from others with the same seed


@dataclass(frozen=True)
class Mixture:
    """Corpora with one tokenizer, and their normalized weights in the first and the last phase."""

    corpora: tuple[Corpus, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    """Equal to `first` if there is no last phase."""
    last_share: float = 0.0
    """The share of the steps that the last phase has."""

    @classmethod
    def of(
        cls,
        corpora: Sequence[Corpus],
        weights: Sequence[float],
        last: Sequence[float] = (),
        last_share: float = 0.0,
    ) -> "Mixture":
        first, *rest = corpora
        for other in rest:
            if other.tokenizer_name != first.tokenizer_name:
                raise ValueError(
                    f"data.mix: {first.folder} holds {first.tokenizer_name} tokens, {other.folder} "
                    f"{other.tokenizer_name}; prepare both with one --tokenizer"
                )
        at_first, at_last = ([weight / sum(own) for weight in own] for own in (weights, last or weights))
        return cls(tuple(corpora), tuple(at_first), tuple(at_last), last_share if last else 0.0)

    @property
    def shares(self) -> tuple[float, ...]:
        """Average weights over the whole run, which validation and counts use."""
        if not self.last_share:
            return self.first
        both = zip(self.first, self.last, strict=True)
        return tuple((1 - self.last_share) * a + self.last_share * b for a, b in both)

    def switch(self, steps: int) -> int:
        """The step (from 0) at which the last phase begins."""
        return steps - round(self.last_share * steps)

    @property
    def names(self) -> list[str]:
        """The folders' own names, or their whole paths if two are equal."""
        short = [corpus.folder.name for corpus in self.corpora]
        return short if len(set(short)) == len(short) else [str(corpus.folder) for corpus in self.corpora]

    @property
    def checksum(self) -> str:
        """A hash of the corpora's checksums in order; for a mixture of one, its corpus's checksum."""
        checksums = [corpus.checksum for corpus in self.corpora]
        first, *others = checksums
        return hashlib.sha256(" ".join(checksums).encode()).hexdigest() if others else first

    @property
    def tokens(self) -> int:
        """Training tokens of the corpora with a weight."""
        return sum(
            len(corpus.train) for corpus, share in zip(self.corpora, self.shares, strict=True) if share
        )

    @property
    def vocabulary(self) -> int:
        return self.corpora[0].vocabulary

    @property
    def tokenizer_name(self) -> str:
        return self.corpora[0].tokenizer_name

    def tokenizer(self) -> Tokenizer:
        return self.corpora[0].tokenizer()

    def counts(self) -> np.ndarray:
        """Token counts (int64) of the mixture, scaled to the number of its training tokens."""
        if len(self.corpora) == 1:
            return self.corpora[0].counts("train")
        frequencies = np.zeros(self.vocabulary)
        for corpus, share in zip(self.corpora, self.shares, strict=True):
            frequencies += share * corpus.counts("train") / len(corpus.train)
        return np.rint(self.tokens * frequencies).astype(np.int64)

    def sequences_within(self, epochs: Sequence[int], context: int, shares: Sequence[float]) -> int | None:
        """The least number of windows in that many epochs of the corpora with a weight; None if unlimited."""
        parts = zip(self.corpora, epochs, shares, strict=True)
        drawn = [(corpus, limit) for corpus, limit, share in parts if share]
        if not all(limit for _, limit in drawn):
            return None
        return sum(limit * ((len(corpus.train) - context) // context) for corpus, limit in drawn)

    def held_out(self, count: int) -> list[int]:
        """Split `count` validation sequences over the corpora by weight, at least one each."""
        return [max(1, round(share * count)) if share else 0 for share in self.shares]


class MixtureLoader:
    """An endless, deterministic sequence of batches out of several streams, resumable to the sequence.

    A stream that has completed `max_epochs` is no longer drawn, and the others keep their proportions; 0 is
    no limit. From sequence number `switch` on, the weights are `last`. `switch` is a whole number of batches;
    after a resume with another batch size it keeps its step. `batch` counts the sequences of all ranks.
    """

    def __init__(
        self,
        streams: Sequence[Tokens],
        shares: Sequence[float],
        *,
        context: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        max_epochs: Sequence[int] = (),
        last: Sequence[float] = (),
        switch: int | None = None,
    ) -> None:
        self._streams = streams
        self._first, self._last = (np.array(own, dtype=np.float64) for own in (shares, last or shares))
        self._planned = self._switch = switch
        self._orders = [
            TokenLoader(stream, context=context, batch=batch, seed=seed, rank=rank, world=world)
            for stream in streams
        ]
        self._context, self._batch = context, batch
        self._max_epochs = tuple(max_epochs) or (0,) * len(streams)
        self._mine = slice(rank * batch // world, (rank + 1) * batch // world)
        self._key = keys(seed, MIXTURE)[0]
        self._drawn = 0

    def step_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank for the next step: int64, (batch / world, context) each."""
        chosen = self.choose(self._batch)
        starts = np.empty(self._batch, dtype=np.int64)
        for number, order in enumerate(self._orders):
            of_it = chosen == number
            if of_it.any():
                starts[of_it] = order.take(int(of_it.sum()))
        self._drawn += self._batch
        chosen, starts = chosen[self._mine], starts[self._mine]
        inputs, targets = (torch.empty((len(chosen), self._context), dtype=torch.int64) for _ in range(2))
        for number, stream in enumerate(self._streams):
            rows = np.flatnonzero(chosen == number)
            inputs[rows], targets[rows] = read_windows(stream, self._context, starts[rows])
        return inputs, targets

    def skip(self, sequences: int) -> None:
        """Advance by `sequences` without reading them. Raises ValueError if the epochs have too few."""
        while sequences:
            count = min(sequences, SKIPPED_AT_ONCE)
            for number, taken in enumerate(np.bincount(self.choose(count)).tolist()):
                self._orders[number].skip(taken)
            self._drawn, sequences = self._drawn + count, sequences - count

    def choose(self, count: int) -> np.ndarray:
        """The index of the stream that each of the next `count` sequences comes from."""
        drawn = words(self._key, np.arange(self._drawn, self._drawn + count), 1)[:, 0]
        uniform = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        limits = zip(self._orders, self._max_epochs, strict=True)
        left = np.array([order.windows_before(most, count) if most else count for order, most in limits])
        chosen = np.empty(0, dtype=np.int64)
        while len(chosen) < count:
            number = self._drawn + len(chosen)
            is_last = self._switch is not None and number >= self._switch
            edges = np.cumsum((self._last if is_last else self._first) * (left > 0))
            if not edges[-1]:
                asked = " ".join(map(str, self._max_epochs))
                raise ValueError(
                    f"data.max_epochs={asked}: every corpus that is drawn has had them after {number:,} "
                    "sequences; raise it, or set 0 for no limit"
                )
            end = count if is_last or self._switch is None else min(count, self._switch - self._drawn)
            ahead = np.searchsorted(edges / edges[-1], uniform[len(chosen) : end], side="right")
            taken = np.cumsum(ahead[:, None] == np.arange(len(left)), axis=0)
            lacks = np.flatnonzero((taken > left).any(axis=1))  # sequences whose stream has no window left
            stop = int(lacks[0]) if len(lacks) else len(ahead)
            chosen = np.concatenate([chosen, ahead[:stop]])
            left -= taken[stop - 1]
        return chosen

    def epochs(self) -> list[float]:
        """The number of passes over each stream so far."""
        return [order.epochs() for order in self._orders]

    def state(self) -> dict[str, Any]:
        """The position of the next step, independent of the rank and of the number of ranks."""
        return {
            "drawn": self._drawn,
            "corpora": [order.state() for order in self._orders],
            "epochs": self.epochs(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state over the same streams; the weights may differ.

        If the state has the number of finished `step`s, the batch size may differ too.
        """
        corpora = state.get("corpora") if isinstance(state, dict) else None
        if not isinstance(corpora, list) or len(corpora) != len(self._orders):
            raise ValueError(f"loader state: {len(self._orders)} corpora are mixed, not {corpora!r:.40}")
        if type(drawn := state.get("drawn")) is not int or not 0 <= drawn < 2**62:
            raise ValueError(f"loader state: drawn {drawn!r:.40}: must be a whole number, 0 or more")
        for order, position in zip(self._orders, corpora, strict=True):
            order.load_state(position)
        self._drawn = drawn
        if self._planned is not None and "step" in state:
            self._switch = self._planned + drawn - state["step"] * self._batch
