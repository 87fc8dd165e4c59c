"""Residual scaling rules: alpha = (cN)^p on the skip path, beta = (dN)^-p on the initial branch weights.

N is the effective depth in blocks. The paper keeps DeepNorm's constants (c, d) = (2, 8) and changes only the
exponent: DEEPNORM p = 1/4, DEEPLOOP p = 1/2.

Two rival rules are pre-norm with a scaled branch, x + epsilon f(Norm(x)), and scale nothing else. The flat
rule also has a single number, Norm(alpha x + f(Norm(x) g)), and no gain on the outer norm.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

Real = float | Fraction  # an int is welcome wherever a float is


@dataclass(frozen=True)
class ScalingRule:
    """The family of Eq. (beta-over-alpha): alpha(N) = (cN)^p, beta(N) = (dN)^-p."""

    p: Real
    c: Real = 2
    d: Real = 8

    def __post_init__(self) -> None:
        for name in ("p", "c", "d"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value}: must be positive and finite")

    @property
    def name(self) -> str:
        """The paper's name for the rule, or its exponent."""
        return {DEEPNORM: "DeepNorm", DEEPLOOP: "DeepLoop"}.get(self, f"p = {float(self.p):g}")

    def alpha(self, N: int) -> float:
        """Residual scale: Norm(alpha * x + f(x))."""
        return _power(self.c * _depth(N), self.p)

    def beta(self, N: int) -> float:
        """Initialization gain of the residual-branch matrices."""
        return _power(self.d * _depth(N), -self.p)

    def ratio(self, N: int) -> float:
        """Update-to-residual ratio beta / alpha = (cd)^-p N^-2p."""
        return _power(self.c * self.d * _depth(N) ** 2, -self.p)

    def ratio_exact(self, N: int) -> Fraction | None:
        """beta / alpha as a fraction, None where it is irrational."""
        return _exact_power(self._inverse_base(N), exact(self.p))

    def ratio_squared_exact(self, N: int) -> Fraction | None:
        """(beta / alpha)^2, which the bounds use; rational at every N for DEEPNORM, whose ratio is not."""
        return _exact_power(self._inverse_base(N), 2 * exact(self.p))

    def _inverse_base(self, N: int) -> Fraction:
        """x such that beta / alpha = x^p."""
        return 1 / (exact(self.c) * exact(self.d) * exact(_depth(N)) ** 2)


DEEPNORM = ScalingRule(Fraction(1, 4))
DEEPLOOP = ScalingRule(Fraction(1, 2))


def factored_epsilon(K: int, R: int, gain: float = 1.0) -> float:
    """lambda / (R sqrt(K)), arXiv 2606.18524: 1/R for a block's own visits, 1/sqrt(K) across blocks."""
    return gain / (_depth(R) * math.sqrt(_depth(K)))


def averaged_epsilon(K: int, R: int) -> float:
    """1 / N."""
    return 1 / (_depth(K) * _depth(R))


def round_epsilon(R: int, exponent: float) -> float:
    """R^-q for a pre-norm stack that is looped: 1 at R = 1, where it is the trained stack."""
    return float(_depth(R) ** -exponent)


def flat_alpha(K: int, R: int, gain: float = 1.0) -> float:
    """lambda R sqrt(K), the flat rule's residual scale: R for a block's own visits, sqrt(K) across blocks.

    On a stream of unit size a visit adds f / alpha, so that all visits together add as much at every R. The
    outer norm has no gain, because a gain multiplies the stream itself at every visit. After V visits with
    branches of 0 the ratio of two channels is (g_i / g_j)^V, so d log(x_i / x_j) / d log(g_i / g_j) = V,
    whatever alpha is. The gain of the inner norm multiplies a branch's input, which alpha divides.
    """
    return gain * _depth(R) * math.sqrt(_depth(K))


class Scales(NamedTuple):
    """Scales of a rule at a depth; 1 if it has none."""

    alpha: float = 1.0  # on the skip, at every visit
    beta: float = 1.0  # in the initial branch matrices
    epsilon: float = 1.0  # on the branch, at every visit


def exact(x: Real) -> Fraction:
    """x as a fraction; a float is read as the decimal it prints as, so 0.3 is 3/10."""
    return Fraction(str(x)) if isinstance(x, float) else Fraction(x)


def _depth(N: int) -> int:
    if not 1 <= N < math.inf:
        raise ValueError(f"N={N}: the depth in blocks must be at least 1")
    if int(N) != N:
        raise ValueError(f"N={N}: must be a whole number of blocks or rounds")
    return int(N)


def _power(base: Real, exponent: Real) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        raise ValueError(f"p={float(exponent):g}: {float(base):g}^p is too large for a float") from None


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """base^(a/b) for 0 < base and lowest terms a/b: rational only if base is itself a perfect b-th power."""
    top, bottom = (_exact_root(part, exponent.denominator) for part in (base.numerator, base.denominator))
    if top is None or bottom is None:
        return None
    if exponent.numerator * max(top, bottom).bit_length() > 2048:  # beyond the range of a float
        return None
    return Fraction(top, bottom) ** exponent.numerator


def _exact_root(n: int, degree: int) -> int | None:
    """Find the positive integer whose degree-th power is n, by bisection; None if there is none."""
    if degree >= n.bit_length():  # 2^degree > n, so only 1 is left
        return 1 if n == 1 else None
    low, high = 1, 1 << (n.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < n:
            low = middle + 1
        else:
            high = middle
    return low if low**degree == n else None
