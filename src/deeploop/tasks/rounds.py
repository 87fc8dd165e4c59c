"""How many rounds a training step has: a function of seed and step, so that all ranks and a resume agree."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deeploop.data.draws import keys, words
from deeploop.theory.depth_law import MOST_ROUNDS, MOST_SPREAD, DepthLaw, most_rounds, rounds_law, uniform_law

ROUNDS_KEY, NOISE_KEY, STATE_KEY = 3, 4, 5  # with the seed: not keys of the data's


@dataclass(frozen=True)
class RoundsConfig:
    """Rounds of a step of language training; `model.rounds` is their mean, which α is of."""

    sample: Literal["fixed", "uniform", "poisson-lognormal"] = "fixed"
    """fixed: model.rounds in every step; uniform: around it; poisson-lognormal: Huginn's long-tailed law."""
    limit: int = 0
    """Most rounds of a step; 0: 2 model.rounds − 1 of uniform, 4 model.rounds of poisson-lognormal."""
    spread: float = 0.5
    """Standard deviation of the log rate of poisson-lognormal."""
    ramp: Literal["off", "linear", "sqrt"] = "off"
    """Raise the mean from 1 to model.rounds over the first steps: in a line, or as 1 − sqrt(1 − t)."""
    ramp_share: float = 0.25
    """Share of the steps over which the mean rises."""
    backprop: int = 0
    """Rounds G that gradients go through, the last min(R, G); earlier ones keep no activations. 0: all."""

    def __post_init__(self) -> None:
        if self.backprop < 0:
            raise ValueError(f"rounds.backprop={self.backprop}: must be 0 (all rounds) or more")
        if not 0 < self.spread <= MOST_SPREAD:
            raise ValueError(f"rounds.spread={self.spread}: must be above 0, and at most {MOST_SPREAD:g}")
        if not 0 < self.ramp_share <= 1:
            raise ValueError(f"rounds.ramp_share={self.ramp_share}: must be above 0, and at most 1")

    def check(self, mean: int) -> None:
        """Raises unless the draws can have this mean."""
        if self.sample == "fixed" and self.limit:
            raise ValueError(f"rounds.limit={self.limit}: must be 0 with rounds.sample=fixed")
        if self.sample != "fixed" and mean < 2:
            raise ValueError(f"model.rounds={mean}: must be at least 2 with rounds.sample={self.sample}")
        if self.limit and self.limit < mean:
            raise ValueError(
                f"rounds.limit={self.limit}: must be at least model.rounds={mean}, the mean of the draws"
            )
        if self.sample == "uniform" and self.limit > 2 * mean - 1:
            raise ValueError(
                f"rounds.limit={self.limit}: must be at most {2 * mean - 1} with rounds.sample=uniform, "
                f"whose mean is model.rounds={mean}"
            )
        if (most := self.most(mean)) > MOST_ROUNDS and self.sample != "fixed":
            raise ValueError(
                f"rounds.limit={most}: must be at most {MOST_ROUNDS}; lower it, or model.rounds={mean}"
            )
        if self.backprop > most:
            raise ValueError(
                f"rounds.backprop={self.backprop}: must be at most {most}, the most rounds of a step; "
                "0 trains through all of them"
            )

    def truncates(self, mean: int) -> bool:
        """Whether some draw has rounds outside of the graph."""
        return 0 < self.backprop < self.most(mean)

    def most(self, mean: int) -> int:
        """Most rounds of a step."""
        return most_rounds(self.sample, mean, self.limit)

    def law(self, mean: int) -> DepthLaw:
        """The distribution of a step's rounds, once the mean has risen to `mean`."""
        return rounds_law(self.sample, mean, limit=self.limit, spread=self.spread)

    def law_at(self, step: int, *, mean: int, steps: int) -> DepthLaw:
        """The same of training step number `step` (from 0) of `steps`."""
        limit = 0 if self.sample == "fixed" else self.most(mean)
        now = self.mean_at(step, mean=mean, steps=steps)
        return rounds_law(self.sample, now, limit=limit, spread=self.spread)

    def mean_at(self, step: int, *, mean: int, steps: int) -> int:
        """The mean of that step, a whole number."""
        if self.ramp == "off":
            return mean
        share = min(1.0, step / (self.ramp_share * steps))
        return round(1 + (mean - 1) * (share if self.ramp == "linear" else 1 - math.sqrt(1 - share)))


@dataclass(frozen=True)
class IterateRoundsConfig:
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

    def law(self, most: int, steps: int) -> DepthLaw:
        """The distribution of the rounds of a batch that asks for `steps` steps, in a model of `most`."""
        least, most = {"steps": (steps, steps), "fixed": (most, most)}.get(self.sample, (1, most))
        return uniform_law(least, most)


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
