"""The interface of an iterated task, and the drawing of its instances.

An instance is a row of integers: an initial row, a table, a graph. A fixed step is applied to it h times, and
the model must give the result. Nothing is stored: the n-th instance of a key is computed on demand, the same
on every machine. A hash of the instance alone decides its split, so no instance is in both splits, for any
seed and number of steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

import numpy as np

from deeploop.data.draws import GOLDEN, TEST_SHARE, mix, words

Split = Literal["train", "test"]
ATTEMPTS = 1 << 10  # at drawing one instance of a split; with a fifth held out, a hundred are plenty


class IteratedTask(ABC):
    """A step that is applied repeatedly; arrays are int64 with shape (instances, …)."""

    name: str
    length: int
    """Its size, from `data.length`."""
    vocabulary: int
    """Tokens of inputs and answers: 0 to `vocabulary` - 1."""
    tokens: int
    """Tokens of a sequence; the first is a begin token."""
    answers: slice
    """The positions of the answers."""
    longest: int = 1 << 20
    """Largest number of steps."""
    random_words: int
    """Random 64-bit words per instance."""

    @abstractmethod
    def make(self, random: np.ndarray) -> np.ndarray:
        """Make instances from random words (instances, random_words)."""

    def identity(self, instances: np.ndarray) -> np.ndarray:
        """The part of an instance that decides its split."""
        return instances

    @abstractmethod
    def inputs(self, instances: np.ndarray) -> np.ndarray:
        """The sequences that the model reads, (instances, tokens)."""

    @abstractmethod
    def start(self, instances: np.ndarray) -> np.ndarray:
        """The state before the first step."""

    @abstractmethod
    def advance(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The state after one more step."""

    def read(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        """A state as answers (instances, answers), negative without one; by default, the state itself."""
        return state


def solve(task: IteratedTask, instances: np.ndarray, steps: Iterable[int]) -> dict[int, np.ndarray]:
    """The right answers after each number of steps: steps → (instances, answers)."""
    wanted = set(steps)
    state, answers = task.start(instances), {}
    for done in range(max(wanted) + 1):
        if done in wanted:
            answers[done] = task.read(instances, state)
        state = task.advance(instances, state)
    return answers


def draw(task: IteratedTask, split: Split, key: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The numbered instances of a split; those that fall into the other split are drawn again."""
    numbers = numbers.astype(np.uint64) * np.uint64(ATTEMPTS)
    instances = task.make(words(key, numbers, task.random_words))
    for attempt in range(1, ATTEMPTS):
        if not (wrong := is_test(task, instances) != (split == "test")).any():
            return instances
        again = words(key, numbers[wrong] + np.uint64(attempt), task.random_words)
        instances[wrong] = task.make(again)
    raise ValueError(f"data.length={task.length}: {task.name} has no instance of the {split} split; raise it")


def is_test(task: IteratedTask, instances: np.ndarray) -> np.ndarray:
    """True for instances that are held out, by a hash of their values and places."""
    identity = task.identity(instances).astype(np.uint64)
    places = GOLDEN * np.arange(1, identity.shape[1] + 1, dtype=np.uint64)
    return mix(mix(identity + places).sum(1, dtype=np.uint64)) < np.uint64(int(TEST_SHARE * 2**64))


def with_begin(tokens: np.ndarray, begin: int) -> np.ndarray:
    """Prepend the begin token, which marks the start of a sequence."""
    return np.concatenate([np.full((len(tokens), 1), begin), tokens], axis=1)
