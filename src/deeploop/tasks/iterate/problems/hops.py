"""Permutation hops: a table in the context is followed h times from every start."""

import numpy as np

from deeploop.data.draws import orders
from deeploop.tasks.iterate.problems.base import IteratedTask, with_begin


class Hops(IteratedTask):
    """A permutation of `length` nodes: a token for each entry i → p(i) in random order, then all starts.

    The answer at a start is the node after h hops. The permutation alone decides the split.
    """

    name = "hops"

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens, self.answers = 1 + 2 * length, slice(1 + length, None)
        self.vocabulary = length + length**2 + 1  # nodes, entries, begin
        self.random_words = 2 * length

    def make(self, random: np.ndarray) -> np.ndarray:
        """The permutation, then the order in which its entries are listed."""
        return np.concatenate([orders(part) for part in np.split(random, 2, axis=1)], axis=1)

    def identity(self, instances: np.ndarray) -> np.ndarray:
        return instances[:, : self.length]

    def inputs(self, instances: np.ndarray) -> np.ndarray:
        n = self.length
        order = instances[:, n:]
        entries = n + n * order + np.take_along_axis(instances[:, :n], order, axis=1)
        return with_begin(np.concatenate([entries, self.start(instances)], axis=1), n + n**2)

    def start(self, instances: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.arange(self.length), (len(instances), self.length))

    def advance(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        return np.take_along_axis(instances[:, : self.length], state, axis=1)
