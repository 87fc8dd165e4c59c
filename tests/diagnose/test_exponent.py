"""γ from known powers, its interval, and the verdict's words."""

import math
from statistics import stdev

import pytest

from deeploop.diagnose.exponent import Point, fit_gamma, verdict


def powers(gamma, series="", factor=1.0):
    return [Point(R, factor * R**gamma, series) for R in (1, 3, 5, 7)]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_an_exact_power_is_found(gamma):
    fit = fit_gamma(powers(gamma, factor=0.7))
    assert fit.gamma == pytest.approx(gamma)
    assert fit.p == pytest.approx((1 + gamma) / 4)
    assert fit.high == math.inf  # one series says nothing of its own uncertainty


def test_the_interval_comes_from_the_spread_of_the_series():
    fit = fit_gamma([*powers(0.9, "a"), *powers(1.0, "b", 2.0), *powers(1.1, "c", 3.0)])
    assert fit.gamma == pytest.approx(1.0)
    assert fit.slopes == pytest.approx({"a": 0.9, "b": 1.0, "c": 1.1})
    assert fit.high - fit.gamma == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-6)
    assert fit.p_range == pytest.approx(((1 + fit.low) / 4, 0.5))  # γ beyond 1 can't be: R bounds κ


@pytest.mark.parametrize(("series", "t"), [(11, 2.228), (12, 2.228), (13, 2.228), (10, 2.262)])
def test_beyond_the_table_the_last_t_is_taken(series, t):
    slopes = [0.5 + 0.01 * n for n in range(series)]
    fit = fit_gamma([point for n, slope in enumerate(slopes) for point in powers(slope, str(n))])
    assert fit.high - fit.gamma == pytest.approx(t * stdev(slopes) / math.sqrt(series), rel=1e-6)


def test_a_series_of_one_depth_is_left_out():
    fit = fit_gamma([*powers(1.0, "a"), Point(3, 100.0, "lonely"), Point(5, 0.0, "lonely")])
    assert set(fit.slopes) == {"a"}
    with pytest.raises(ValueError, match="two or more numbers of rounds"):
        fit_gamma([Point(3, 1.0), Point(3, 2.0)])


def test_the_verdict_names_the_rule():
    aligned = fit_gamma([*powers(0.98, "a"), *powers(1.0, "b")])
    assert "¼ falls short by 0.25" in verdict(aligned)
    assert "without slack" in verdict(aligned)
    half = fit_gamma([*powers(0.4, "a"), *powers(0.5, "b"), *powers(0.45, "c")])
    assert "falls short by 0.11" in verdict(half)
    assert "slack by 0.14" in verdict(half)
    none = fit_gamma([*powers(0.0, "a"), *powers(0.01, "b"), *powers(-0.01, "c")])
    assert "¼ is safe" in verdict(none)
    assert "no interval" in verdict(fit_gamma(powers(1.0)))
    unsure = fit_gamma([*powers(-0.4, "a"), *powers(0.0, "b"), *powers(0.4, "c")])
    assert "¼ is at the edge, ½ is safe and slack by 0.25" in verdict(unsure)


@pytest.mark.parametrize(("gamma", "says"), [(0.06, "¼ is safe"), (0.12, "¼ falls short by 0.03")])
def test_a_quarter_may_be_missed_by_two_hundredths(gamma, says):
    """p = (1 + γ)/4 is 0.265 and 0.28."""
    assert says in verdict(fit_gamma(powers(gamma)))
