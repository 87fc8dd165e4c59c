"""Iterated tasks as arrays: inputs and targets, with the number of steps as tokens if needed."""

from dataclasses import dataclass

import numpy as np

from deeploop.data.draws import keys
from deeploop.tasks.iterate.problems.base import IteratedTask, draw, solve

DIGITS = 3  # decimal digits of the number of steps, after the begin token: every answer sees them
TEST_KEY = keys(0x17E5A7ED)[0]  # gives the same test split for every seed


@dataclass(frozen=True)
class Examples:
    """A task as a model's inputs and targets."""

    task: IteratedTask
    tells_steps: bool
    """True if the number of steps is part of the input; otherwise the number of rounds gives it."""

    @property
    def vocabulary(self) -> int:
        return self.task.vocabulary + (10 if self.tells_steps else 0)

    @property
    def tokens(self) -> int:
        return self.task.tokens + (DIGITS if self.tells_steps else 0)

    @property
    def longest(self) -> int:
        """Largest number of steps."""
        return min(self.task.longest, 10**DIGITS - 1) if self.tells_steps else self.task.longest

    def inputs(self, instances: np.ndarray, steps: int) -> np.ndarray:
        """Tokens (instances, tokens); the digits of `steps` follow the begin token."""
        tokens = self.task.inputs(instances)
        if self.tells_steps:
            digits = [steps // 10**place % 10 for place in reversed(range(DIGITS))]
            tokens = np.insert(tokens, [1] * DIGITS, np.array(digits) + self.task.vocabulary, axis=1)
        return tokens

    def targets(self, answers: np.ndarray) -> np.ndarray:
        """Answers (instances, answers) at their positions (instances, tokens), -1 at all others."""
        placed = np.full((len(answers), self.task.tokens), -1)
        placed[:, self.task.answers] = answers
        ignored = np.full((len(answers), self.tokens - self.task.tokens), -1)
        return np.concatenate([ignored, placed], axis=1)

    def batch(self, instances: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of instances after `steps` steps."""
        answers = solve(self.task, instances, [steps])[steps]
        return self.inputs(instances, steps), self.targets(answers)


def held_out(task: IteratedTask, count: int) -> np.ndarray:
    """The first `count` held-out instances."""
    return draw(task, "test", TEST_KEY, np.arange(count))
