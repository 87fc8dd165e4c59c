"""An elementary cellular automaton that looks left: a cell depends on itself and the two before it."""

import numpy as np

from deeploop.tasks.iterate.problems.base import IteratedTask, with_begin

BEGIN = 2


class Automaton(IteratedTask):
    """Any of the 256 rules; (left, centre, right) are (x[-2], x[-1], x), with zeros before the row.

    A cell depends on nothing to its right, so a causal model can compute the step. Rule 86 is
    y = x xor (x[-1] or x[-2]): rule 30 mirrored, and a bijection here.
    """

    name = "automaton"
    vocabulary = 3

    def __init__(self, length: int, rule: int = 86) -> None:
        self.length, self.rule = length, rule
        self.tokens, self.answers = 1 + length, slice(1, None)
        self.random_words = -(-length // 64)
        self._becomes = np.array([rule >> index & 1 for index in range(8)])

    def make(self, random: np.ndarray) -> np.ndarray:
        """Rows of random bits."""
        bits = np.unpackbits(random.astype("<u8").view(np.uint8), axis=1)
        return bits[:, : self.length].astype(np.int64)

    def inputs(self, instances: np.ndarray) -> np.ndarray:
        return with_begin(instances, BEGIN)

    def start(self, instances: np.ndarray) -> np.ndarray:
        return instances

    def advance(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        index = state.copy()
        index[:, 1:] += 2 * state[:, :-1]
        index[:, 2:] += 4 * state[:, :-2]
        return self._becomes[index]
