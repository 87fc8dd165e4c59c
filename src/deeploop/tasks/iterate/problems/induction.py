"""p-hop induction: find the symbol after the last occurrence of the current one, and repeat from there."""

import numpy as np

from deeploop.tasks.iterate.problems.base import IteratedTask, with_begin

ALPHABET = 4


class Induction(IteratedTask):
    """`length` symbols of an alphabet of four; no two consecutive ones are equal, which would stop a hop.

    A hop from position i goes to the last position j < i after an occurrence of the symbol at i, as in an
    induction head. The answer at each position is the symbol after h hops, if there are that many.
    """

    name = "induction"
    vocabulary = ALPHABET + 1

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens, self.answers = 1 + length, slice(1, None)
        self.random_words = length
        self.longest = max(1, length // ALPHABET)  # a hop goes back by about four positions

    def make(self, random: np.ndarray) -> np.ndarray:
        """The first symbol is arbitrary, each later one different from the one before."""
        moves = 1 + random % np.uint64(ALPHABET - 1)
        moves[:, 0] = random[:, 0] % np.uint64(ALPHABET)
        return (moves.cumsum(1) % np.uint64(ALPHABET)).astype(np.int64)

    def inputs(self, instances: np.ndarray) -> np.ndarray:
        return with_begin(instances, ALPHABET)

    def start(self, instances: np.ndarray) -> np.ndarray:
        """The position reached from each position; -1 if no hop was left."""
        return np.broadcast_to(np.arange(self.length), instances.shape)

    def advance(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        hop = self._hops(instances)
        return np.where(state >= 0, np.take_along_axis(hop, np.maximum(state, 0), axis=1), -1)

    def _hops(self, instances: np.ndarray) -> np.ndarray:
        """The target of a hop from each position; -1 if its symbol did not occur before."""
        places = np.arange(self.length)
        hops = np.full(instances.shape, -1)
        for symbol in range(ALPHABET):
            here = instances == symbol
            last = np.maximum.accumulate(np.where(here, places, -1), axis=1)
            before = np.concatenate([np.full((len(last), 1), -1), last[:, :-1]], axis=1)
            hops = np.where(here & (before >= 0), before + 1, hops)
        return hops

    def read(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        return np.where(state >= 0, np.take_along_axis(instances, np.maximum(state, 0), axis=1), -1)
