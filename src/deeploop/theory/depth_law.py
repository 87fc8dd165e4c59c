"""The number of rounds R as a distribution, and the depth N* that its loop has for the rules.

A loop of K blocks that is read in all R rounds and written by the gradient of the last R_g has, under
aligned visits, the bound 2K·R·R_g·(β/α)². So N* = K·√(R·R_g) keeps it where R_g = R has it. With R drawn anew
in every step and α kept, the bound goes with the mean of R·R_g: N* = K·√E[R·R_g], which without truncation
is K·√E[R²]. These are our reading of the paper's bound, not the paper's rules, and untested.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from deeploop.theory.scaling import Real

WORD = 2**64
NODES, REACH = 360, 9.0  # of the integral over the rate: steps, and standard deviations to either side


@dataclass(frozen=True)
class DepthLaw:
    """Probabilities of R = least, least + 1, …: fractions where they are exact."""

    least: int
    probabilities: tuple[Real, ...]

    @property
    def most(self) -> int:
        """The largest R that can be drawn."""
        return self.least + len(self.probabilities) - 1

    @property
    def mean(self) -> Real:
        return self.expect(lambda R: R)

    def expect(self, value: Callable[[int], int]) -> Real:
        """E[value(R)]."""
        return sum(
            (value(R) * chance for R, chance in enumerate(self.probabilities, self.least)), Fraction(0)
        )

    def draw(self, word: int) -> int:
        """The R of a random word, which is uniform over 0 to 2^64 − 1."""
        if len(set(self.probabilities)) == 1:
            return self.least + word % len(self.probabilities)
        left = word / WORD
        for R, chance in enumerate(self.probabilities, self.least):
            left -= float(chance)
            if left < 0:
                return R
        return self.most


def uniform_law(least: int, most: int) -> DepthLaw:
    """Every R from least to most alike; a fixed R where they are the same."""
    if not 1 <= least <= most:
        raise ValueError(f"rounds from {least} to {most}: must be at least 1, and not fall")
    return DepthLaw(least, (Fraction(1, most - least + 1),) * (most - least + 1))


@lru_cache(maxsize=256)
def poisson_lognormal_law(mean: int, spread: float, limit: int) -> DepthLaw:
    """Huginn's law: R = Poisson(rate) + 1, rate ~ LogNormal(ln r − spread²/2, spread), r = mean − 1.

    The mean rate is r, so that R has the mean `mean`, but for what is cut to the limit.
    """
    if not (1 <= mean <= limit and math.isfinite(spread) and spread > 0):
        raise ValueError(f"mean={mean}, spread={spread}, limit={limit}: need 1 ≤ mean ≤ limit, spread > 0")
    if mean == 1:
        return uniform_law(1, 1)
    middle = math.log(mean - 1) - spread**2 / 2
    # The trapezoid rule on a Gaussian is exact to rounding at this step.
    nodes = [REACH * (2 * i / NODES - 1) for i in range(NODES + 1)]
    weights = [math.exp(-z * z / 2) for z in nodes]
    logs = [middle + spread * z for z in nodes]
    chances = [
        math.fsum(
            w * math.exp(n * log - math.exp(log) - math.lgamma(n + 1))
            for w, log in zip(weights, logs, strict=True)
        )
        / math.fsum(weights)
        for n in range(limit - 1)
    ]
    return DepthLaw(1, (*chances, max(0.0, 1 - math.fsum(chances))))


def rounds_law(sample: str, mean: int, *, limit: int = 0, spread: float = 0.5) -> DepthLaw:
    """The law of that name around a mean; 0 is the largest limit of uniform, and 4 times the mean else."""
    if mean < 1:
        raise ValueError(f"rounds={mean}: must be at least 1")
    if sample == "fixed":
        if limit:
            raise ValueError(f"limit={limit}: must be 0 with sample=fixed")
        return uniform_law(mean, mean)
    limit = limit or (2 * mean - 1 if sample == "uniform" else 4 * mean)
    if limit < mean:
        raise ValueError(f"limit={limit}: must be at least rounds={mean}, the mean of the draws")
    if sample == "poisson-lognormal":
        return poisson_lognormal_law(mean, spread, limit)
    least = max(1, 2 * mean - limit)
    return uniform_law(least, 2 * mean - least)


def effective_depth(K: int, law: DepthLaw, backprop: int | None = None) -> float:
    """N* = K·√E[R·R_g], R_g = min(R, backprop): see above; K·R of a fixed R without truncation."""
    return K * math.sqrt(mean_read_write(law, backprop))


def mean_read_write(law: DepthLaw, backprop: int | None = None) -> Real:
    """E[R·R_g]: how often a block is read in a step, times how often it is written."""
    if backprop is not None and backprop < 1:
        raise ValueError(f"backprop={backprop}: must be at least 1, or none is trained")
    return law.expect(lambda R: R * (R if backprop is None else min(R, backprop)))
