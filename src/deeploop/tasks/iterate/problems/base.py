"""What an iterated task is, and how its instances are drawn.

An instance is a row of whole numbers: a start row, a table, a graph. One fixed step is applied to it h times,
and the model is asked for what comes out. Nothing is stored: the n-th instance of a key is computed when it
is needed, the same on every machine. Its split is decided by a hash of the instance alone, so no instance is
in both splits, whatever the seed or the number of steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

import numpy as np

from deeploop.data.draws import GOLDEN, TEST_SHARE, mix, words

Split = Literal["train", "test"]
ATTEMPTS = 1 << 10  # at drawing one instance of a split: with a fifth held out, a hundred are plenty


class IteratedTask(ABC):
    """A step that is applied again and again; arrays are (instances, …) of int64."""

    name: str
    length: int
    """Its size, as `data.length` gives it."""
    vocabulary: int
    """Tokens of inputs and answers: 0 to `vocabulary` - 1."""
    tokens: int
    """Tokens of a sequence; the first is a begin token."""
    answers: slice
    """The positions at which the model answers."""
    longest: int = 1 << 20
    """Most steps that can be asked for."""
    random_words: int
    """Random 64-bit words that an instance is made of."""

    @abstractmethod
    def make(self, random: np.ndarray) -> np.ndarray:
        """Instances from random words (instances, random_words)."""

    def identity(self, instances: np.ndarray) -> np.ndarray:
        """What of an instance decides its split: nothing of the other split is equal in it."""
        return instances

    @abstractmethod
    def inputs(self, instances: np.ndarray) -> np.ndarray:
        """The sequences that the model reads, (instances, tokens)."""

    @abstractmethod
    def start(self, instances: np.ndarray) -> np.ndarray:
        """The state before the first step."""

    @abstractmethod
    def advance(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The state one step later."""

    @abstractmethod
    def read(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        """A state as the answers it asks for, (instances, answers); below 0 where none is."""


def solve(task: IteratedTask, instances: np.ndarray, steps: Iterable[int]) -> dict[int, np.ndarray]:
    """The right answers after each number of steps: steps → (instances, answers)."""
    wanted = set(steps)
    state, found = task.start(instances), {}
    for done in range(max(wanted) + 1):
        if done in wanted:
            found[done] = task.read(instances, state)
        state = task.advance(instances, state)
    return found


def draw(task: IteratedTask, split: Split, key: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The numbered instances of a split: those that fall into the other one are drawn again."""
    numbers = numbers.astype(np.uint64) * np.uint64(ATTEMPTS)
    instances = task.make(words(key, numbers, task.random_words))
    for attempt in range(1, ATTEMPTS):
        if not (wrong := is_test(task, instances) != (split == "test")).any():
            return instances
        again = words(key, numbers[wrong] + np.uint64(attempt), task.random_words)
        instances[wrong] = task.make(again)
    raise ValueError(
        f"data.length={task.length}: {task.name} has no instance of the {split} split there; raise it"
    )


def is_test(task: IteratedTask, instances: np.ndarray) -> np.ndarray:
    """Which instances are held out, by a hash of their values and places."""
    identity = task.identity(instances).astype(np.uint64)
    places = GOLDEN * np.arange(1, identity.shape[1] + 1, dtype=np.uint64)
    return mix(mix(identity + places).sum(1, dtype=np.uint64)) < np.uint64(int(TEST_SHARE * 2**64))


def with_begin(tokens: np.ndarray, begin: int) -> np.ndarray:
    """The begin token in front, by which a model knows where a sequence starts."""
    return np.concatenate([np.full((len(tokens), 1), begin), tokens], axis=1)
