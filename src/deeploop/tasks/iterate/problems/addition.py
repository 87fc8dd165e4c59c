"""Addition of long numbers: every step propagates each carry by one place."""

import numpy as np

from deeploop.tasks.iterate.problems.base import IteratedTask, with_begin

BASE = 10
PAIRS = BASE + 1  # the first token of a pair of digits; smaller ones are answers
BEGIN = PAIRS + BASE**2


class Addition(IteratedTask):
    """Two numbers of `length` digits, least significant first, one token for each pair of digits.

    The state of a place is a number from 0 to 18, initially the sum of its digits. A step keeps its last
    digit and adds 1 if the previous place had 10 or more. Answers are 0 to 10; after `length` steps they no
    longer change, and are the digits of the sum without the last carry. Seven of eight pairs add up to 9, so
    that carries propagate far: in random numbers, nine of ten end at the next place.
    """

    name = "addition"
    vocabulary = BEGIN + 1

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens, self.answers = 1 + length, slice(1, None)
        self.random_words = length

    def make(self, random: np.ndarray) -> np.ndarray:
        """Pairs of digits, as 10 · first + second."""
        passes = random >> np.uint64(61) != 0
        first, second = random % np.uint64(BASE), random // np.uint64(BASE) % np.uint64(BASE)
        second = np.where(passes, np.uint64(BASE - 1) - first, second)
        return (np.uint64(BASE) * first + second).astype(np.int64)

    def inputs(self, instances: np.ndarray) -> np.ndarray:
        return with_begin(PAIRS + instances, BEGIN)

    def start(self, instances: np.ndarray) -> np.ndarray:
        return instances // BASE + instances % BASE

    def advance(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        state, carries = state % BASE, state >= BASE
        state[:, 1:] += carries[:, :-1]
        return state
