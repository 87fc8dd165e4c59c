"""How many rounds a training step has: a function of seed and step, so that all ranks and a resume agree."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deeploop.data.draws import keys, words

ROUNDS_KEY, NOISE_KEY, STATE_KEY = 3, 4, 5  # with the seed: not keys of the data's


@dataclass(frozen=True)
class RoundsConfig:
    """Rounds of a step of training, and whether the model is told the number of steps it is asked for."""

    sample: Literal["steps", "fixed", "uniform"] = "steps"
    """steps: a round for each step that is asked for; fixed: model.rounds; uniform: 1 to model.rounds."""
    noise: float = 0.0
    """Gaussian noise on the stream after every round of training, as a share of its root mean square."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"rounds.noise={self.noise}: must be a finite number, 0 or more")

    @property
    def tells_steps(self) -> bool:
        """Where rounds do not say how many steps are asked for, tokens of the input do."""
        return self.sample != "steps"

    def at_test(self, steps: int, most: int) -> int:
        """Rounds at which a model of `most` rounds is evaluated on `steps` steps."""
        return steps if self.sample == "steps" else most


class RoundsSampler:
    """The rounds of each training step."""

    def __init__(self, config: RoundsConfig, *, most: int, seed: int) -> None:
        self._sample, self._most = config.sample, most
        self._key = keys(seed, ROUNDS_KEY)[0]

    def at(self, step: int, steps: int) -> int:
        """Rounds of training step number `step` (from 0), whose batch asks for `steps` steps."""
        if self._sample == "steps":
            return steps
        return self._most if self._sample == "fixed" else draw_upto(self._key, step, self._most)


class NoiseSampler:
    """The noise of each training step, for the sequences of all ranks: None where there is none."""

    def __init__(self, config: RoundsConfig, *, seed: int, device: torch.device) -> None:
        self._size, self._key = config.noise, keys(seed, NOISE_KEY)[0]
        self._generator = torch.Generator(device)

    def at(self, step: int, shape: tuple[int, ...]) -> Tensor | None:
        """(rounds, B, T, width) for training step number `step` (from 0)."""
        if not self._size:
            return None
        self._generator.manual_seed(int(words(self._key, np.array([step]), 1)[0, 0] >> np.uint64(1)))
        device = self._generator.device
        return self._size * torch.randn(shape, generator=self._generator, device=device)


class FirstStateSampler:
    """The first states of each training step, one draw per sequence, of unit variance."""

    def __init__(self, *, seed: int, batch: int, device: torch.device) -> None:
        self._key, self._batch = keys(seed, STATE_KEY)[0], batch
        self._generator = torch.Generator(device)

    def at(self, step: int, sequences: range, shape: tuple[int, ...]) -> Tensor:
        """(sequences, *shape) for training step number `step` (from 0); the step's batch is numbered from 0.

        A sequence's draw does not depend on the rank that has it.
        """
        numbers = step * self._batch + np.array(sequences)
        seeds = words(self._key, numbers, 1)[:, 0] >> np.uint64(1)
        device = self._generator.device
        return torch.stack(
            [
                torch.randn(shape, generator=self._generator.manual_seed(int(seed)), device=device)
                for seed in seeds
            ]
        )


def draw_upto(key: np.ndarray, number: int, most: int) -> int:
    """The numbered draw of a key, uniform over 1 to `most`."""
    return 1 + int(words(key, np.array([number]), 1)[0, 0] % np.uint64(most))
