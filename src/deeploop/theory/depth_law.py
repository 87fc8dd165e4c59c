"""The number of rounds R as a distribution, and the depth N* that a rule should use for it.

A loop of K blocks that is read in all R rounds and written by the gradient of the last R_g has, under aligned
visits, the bound 2K·R·R_g·(β/α)². N* = K·√(R·R_g) keeps it at its value for R_g = R. If R is drawn in every
step and α is kept, the bound follows the mean of R·R_g, so N* = K·√E[R·R_g], which without truncation is
K·√E[R²]. These are our reading of the paper's bound, not the paper's rules, and untested.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from deeploop.theory.scaling import Real

WORD = 2**64
MOST_ROUNDS = 10_000  # of a law that is drawn from: its chances are listed one by one
MOST_SPREAD = 2.0
NEGLIGIBLE = 1e-18  # of an integral, for the term after which it is left


@dataclass(frozen=True)
class DepthLaw:
    """Probabilities of R = least, least + 1, …, as fractions where they are exact."""

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
        """Return the R of a random word, which is uniform over 0 to 2^64 − 1."""
        if len(set(self.probabilities)) == 1:
            return self.least + word % len(self.probabilities)
        left = word / WORD
        for R, chance in enumerate(self.probabilities, self.least):
            left -= float(chance)
            if left < 0:
                return R
        return self.most


def uniform_law(least: int, most: int) -> DepthLaw:
    """Make the law in which every R from least to most is equally likely; a fixed R if they are equal."""
    if not 1 <= least <= most:
        raise ValueError(f"rounds from {least} to {most}: must be at least 1, and not fall")
    return DepthLaw(least, (Fraction(1, most - least + 1),) * (most - least + 1))


@lru_cache(maxsize=256)
def poisson_lognormal_law(mean: int, spread: float, limit: int) -> DepthLaw:
    """Make Huginn's law: R = Poisson(rate) + 1, rate ~ LogNormal(ln r − spread²/2, spread), r = mean − 1.

    The mean rate is r, so R has the mean `mean`, apart from the cut at the limit.
    """
    if not (1 <= mean <= limit and 0 < spread <= MOST_SPREAD):
        raise ValueError(
            f"mean={mean}, spread={spread}, limit={limit}: need 1 ≤ mean ≤ limit, "
            f"0 < spread ≤ {MOST_SPREAD:g}"
        )
    if mean == 1:
        return uniform_law(1, 1)
    middle, peak = math.log(mean - 1) - spread**2 / 2, 0.0
    chances = []
    for n in range(limit - 1):
        chance, peak = _poisson_lognormal(n, middle, spread, peak)
        chances.append(chance)
    return DepthLaw(1, (*chances, max(0.0, 1 - math.fsum(chances))))


def _poisson_lognormal(n: int, middle: float, spread: float, peak: float) -> tuple[float, float]:
    """Return the probability of n, and the z where its integrand peaks; `peak` is that of n − 1, which is
    near.

    ∫ φ(z) Poisson(n; rate) dz, ln rate = middle + spread·z. The integrand has one peak, as narrow as
    1/(spread·√n) if n is large, so the nodes follow it, to either side until the terms vanish.
    """
    while True:  # Newton's method: to a tenth of the width is enough
        rate = math.exp(middle + spread * peak)
        slope, curvature = spread * (n - rate) - peak, 1 + spread**2 * rate
        peak += slope / curvature
        if slope * slope <= 0.01 * curvature:
            break
    # The trapezoid rule is exact to rounding at half of the width, where that does not jump over e^-rate.
    step, log_factorial = min(0.5 / math.sqrt(curvature), 0.25 / spread), math.lgamma(n + 1)

    def integrand(z: float) -> float:
        log_rate = middle + spread * z
        return math.exp(n * log_rate - math.exp(log_rate) - log_factorial - z * z / 2)

    total = integrand(peak)
    for side in (step, -step):
        z = peak + side
        while (term := integrand(z)) > NEGLIGIBLE * total:
            total, z = total + term, z + side
    return total * step / math.sqrt(2 * math.pi), peak


def most_rounds(sample: str, mean: int, limit: int = 0) -> int:
    """Return the largest R of the law of that name; a limit of 0 is 2·mean − 1 for uniform, and 4·mean
    otherwise.
    """
    if sample == "fixed":
        return mean
    if sample == "uniform":
        return min(limit or 2 * mean - 1, 2 * mean - 1)
    return limit or 4 * mean


def rounds_law(sample: str, mean: int, *, limit: int = 0, spread: float = 0.5) -> DepthLaw:
    """Make the law of that name around a mean, up to `most_rounds`."""
    if mean < 1:
        raise ValueError(f"rounds={mean}: must be at least 1")
    if sample == "fixed":
        if limit:
            raise ValueError(f"limit={limit}: must be 0 with sample=fixed")
        return uniform_law(mean, mean)
    most = most_rounds(sample, mean, limit)
    if most < mean:
        raise ValueError(f"limit={limit}: must be at least rounds={mean}, the mean of the draws")
    if most > MOST_ROUNDS:
        raise ValueError(f"limit={most}: must be at most {MOST_ROUNDS}; lower it, or rounds={mean}")
    if sample == "poisson-lognormal":
        return poisson_lognormal_law(mean, spread, most)
    return uniform_law(2 * mean - most, most)


def effective_depth(K: int, law: DepthLaw, backprop: int | None = None) -> float:
    """Return N* = K·√E[R·R_g], R_g = min(R, backprop): see above; K·R for a fixed R without truncation."""
    return K * math.sqrt(mean_read_write(law, backprop))


def mean_read_write(law: DepthLaw, backprop: int | None = None) -> Real:
    """E[R·R_g]: how often a block is read in a step, times how often it is written."""
    if backprop is not None and backprop < 1:
        raise ValueError(f"backprop={backprop}: must be at least 1, or none is trained")
    return law.expect(lambda R: R * (R if backprop is None else min(R, backprop)))
