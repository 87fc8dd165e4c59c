"""Random rounds, noise and first states of training steps, computed from seed and step."""

import numpy as np
import torch
from torch import Tensor

from deeploop.data.draws import keys, words
from deeploop.tasks.iterate.config import IterateRoundsConfig
from deeploop.theory.depth_law import DepthLaw

ROUNDS_KEY, NOISE_KEY, STATE_KEY = 3, 4, 5  # combined with the seed; distinct from the keys of the data


class RoundsSampler:
    """The rounds of each training step under any distribution."""

    def __init__(self, seed: int) -> None:
        self._key = keys(seed, ROUNDS_KEY)[0]

    def at(self, step: int, law: DepthLaw) -> int:
        """Rounds of training step number `step` (from 0)."""
        return law.draw(int(words(self._key, np.array([step]), 1)[0, 0]))


class NoiseSampler:
    """The noise of each training step for the sequences of all ranks, or None if the config has no noise."""

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
    """The first states of each training step: one draw per sequence, with unit variance."""

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self._key = keys(seed, STATE_KEY)[0]
        self._generator = torch.Generator(device)

    def at(self, sequences: range, shape: tuple[int, ...]) -> Tensor:
        """Draw (sequences, *shape) for the sequences with these numbers, counted from the start of the run.

        A sequence's draw does not depend on its rank.
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
