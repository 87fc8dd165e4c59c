"""Fit γ of κ_R ~ R^γ, and the exponent that it implies: p ≥ (1 + γ)/4, Prop. (exponent-threshold)."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, stdev
from typing import Any

from deeploop.theory import exponent_threshold

MARGIN = 0.02  # of an exponent near 1/4 or 1/2
# 97.5% points of Student's t for 1, 2, … degrees of freedom; for more, the last, which is slightly too large.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Point:
    """κ at one number of rounds; `series` names what was held fixed (a seed, a sublayer)."""

    rounds: int
    kappa: float
    series: str = ""


@dataclass(frozen=True)
class GammaFit:
    """The slope of log κ against log R over all series, with its 95% interval.

    Few values of R leave few degrees of freedom, so the interval comes from the spread between series (seeds
    and sublayers); a single series has none.
    """

    gamma: float
    low: float
    high: float
    slopes: dict[str, float]

    @property
    def p(self) -> float:
        """The smallest exponent that keeps the bound finite as R grows with fixed K."""
        return exponent_threshold(min(1.0, max(0.0, self.gamma)))

    @property
    def p_range(self) -> tuple[float, float]:
        low, high = (exponent_threshold(min(1.0, max(0.0, g))) for g in (self.low, self.high))
        return low, high


def gamma_points(records: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, list[Point]]:
    """Series for the fits, from seeds and records of `examine`: each sublayer's own κ, or κ_R, per seed."""
    return {
        "own κ": [
            Point(record["rounds"], one["own_kappa"], f"{name}, seed {seed}")
            for seed, record in records
            for name, one in record["sublayers"].items()
        ],
        "κ_R": [Point(record["rounds"], record["kappa"], f"seed {seed}") for seed, record in records],
    }


def fit_gamma(points: Iterable[Point]) -> GammaFit:
    """Fit a slope to each series, and average them."""
    series: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.kappa > 0:
            series[point.series].append(point)
    slopes = {name: _slope(own) for name, own in series.items() if len({p.rounds for p in own}) > 1}
    if not slopes:
        raise ValueError("γ needs κ_R above 0 at two or more numbers of rounds of the same model family")
    values = [*slopes.values()]
    gamma = fmean(values)
    spread = half_width(values)
    return GammaFit(gamma, gamma - spread, gamma + spread, slopes)


def verdict(fit: GammaFit, what: str = "κ_R") -> str:
    """Tell which of the two rules the measured growth requires; `what` names the κ that was fitted.

    The exponent applies if single visits shrink as β/α, which the paper assumes and Adam does not guarantee.
    """
    low, high = fit.p_range
    asked = (
        f"If single visits shrink as β/α: {what} grows as R^{fit.gamma:.2f}, which requires p ≥ {fit.p:.2f}"
    )
    asked += f" ({low:.2f} to {high:.2f})" if math.isfinite(fit.low) else " (one series: no interval)"
    upper = high if math.isfinite(fit.high) else fit.p
    if upper <= 0.25 + MARGIN:
        return f"{asked}: DeepNorm's ¼ is safe by the bound, DeepLoop's ½ is slack by {0.5 - fit.p:.2f}."
    if fit.p <= 0.25 + MARGIN:
        return f"{asked}: ¼ is at the edge, ½ is safe and slack by {0.5 - fit.p:.2f}."
    return f"{asked}: DeepNorm's ¼ falls short by {fit.p - 0.25:.2f}, DeepLoop's ½ is safe" + (
        f" and slack by {0.5 - fit.p:.2f}." if fit.p < 0.5 - MARGIN else ", without slack."
    )


def as_series(points: Sequence[Point]) -> dict[str, list[tuple[int, float]]]:
    """(R, κ) in order of R, for each series."""
    series: dict[str, list[tuple[int, float]]] = {}
    for point in sorted(points, key=lambda point: point.rounds):
        series.setdefault(point.series, []).append((point.rounds, point.kappa))
    return series


def describe(fit: GammaFit) -> str:
    """Format a fit in one line."""
    spread = f" [{fit.low:.2f}, {fit.high:.2f}]" if math.isfinite(fit.low) else ""
    return f"γ = {fit.gamma:.2f}{spread} from {len(fit.slopes)} series, p ≥ {fit.p:.2f}"


def _slope(points: Sequence[Point]) -> float:
    x = [math.log(point.rounds) for point in points]
    y = [math.log(point.kappa) for point in points]
    return linear_regression(x, y).slope


def half_width(values: Sequence[float]) -> float:
    """Half of Student's 95% interval of a mean; infinite for a single value."""
    n = len(values)
    if n < 2:
        return math.inf
    t = STUDENT[min(n - 2, len(STUDENT) - 1)]
    return t * stdev(values) / math.sqrt(n)
