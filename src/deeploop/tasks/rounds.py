"""How many rounds a training step has: a function of seed and step, so that all ranks and a resume agree."""

import numpy as np
import torch
from torch import Tensor

from deeploop.data.draws import keys, words
from deeploop.tasks.iterate.config import IterateRoundsConfig
from deeploop.theory.depth_law import DepthLaw

ROUNDS_KEY, NOISE_KEY, STATE_KEY = 3, 4, 5  # with the seed: not keys of the data's


class RoundsSampler:
    """The rounds of each training step, of whatever law it has."""

    def __init__(self, seed: int) -> None:
        self._key = keys(seed, ROUNDS_KEY)[0]

    def at(self, step: int, law: DepthLaw) -> int:
        """Rounds of training step number `step` (from 0)."""
        return law.draw(int(words(self._key, np.array([step]), 1)[0, 0]))


class NoiseSampler:
    """The noise of each training step, for the sequences of all ranks: None where there is none."""

    def __init__(self, config: IterateRoundsConfig, *, seed: int, device: torch.device) -> None:
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

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self._key = keys(seed, STATE_KEY)[0]
        self._generator = torch.Generator(device)

    def at(self, sequences: range, shape: tuple[int, ...]) -> Tensor:
        """(sequences, *shape) for the sequences of these numbers, counted from the start of the run.

        A sequence's draw does not depend on the rank that has it.
        """
        seeds = words(self._key, np.array(sequences), 1)[:, 0] >> np.uint64(1)
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
