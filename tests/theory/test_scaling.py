"""Scaling rules against exact fractions and the paper's table of alpha and beta."""

import math
from fractions import Fraction as F

import pytest

from deeploop.rules import parse
from deeploop.theory import (
    DEEPLOOP,
    DEEPNORM,
    ScalingRule,
    averaged_epsilon,
    factored_epsilon,
    flat_alpha,
)


@pytest.mark.parametrize(
    ("K", "alphas", "betas"),
    [
        (12, [4.899, 8.485, 10.954, 12.961], [0.10206, 0.05893, 0.04564, 0.03858]),
        (24, [6.928, 12, 15.492, 18.330], [0.07217, 0.04167, 0.03227, 0.02728]),
    ],
)
def test_published_alpha_and_beta(K, alphas, betas):
    depths = [K * R for R in (1, 3, 5, 7)]
    assert [DEEPLOOP.alpha(N) for N in depths] == pytest.approx(alphas, abs=5.1e-4)
    assert [DEEPLOOP.beta(N) for N in depths] == pytest.approx(betas, abs=5.1e-6)


@pytest.mark.parametrize("N", [1, 2, 36, 49, 10**9 + 7])
def test_ratios_are_exact(N):
    assert DEEPLOOP.ratio_exact(N) == F(1, 4 * N)
    assert DEEPLOOP.ratio_squared_exact(N) == F(1, 16 * N * N)
    root = math.isqrt(N)
    assert DEEPNORM.ratio_exact(N) == (F(1, 2 * root) if root * root == N else None)
    assert DEEPNORM.ratio_squared_exact(N) == F(1, 4 * N)


@pytest.mark.parametrize("N", [1, 12, 36, 168])
@pytest.mark.parametrize("p", [0.1, F(1, 4), 0.3, F(1, 3), 0.5, 0.55, 1, 2.5])
def test_ratio_is_beta_over_alpha(p, N):
    rule = ScalingRule(p)
    assert rule.alpha(N) == pytest.approx((2 * N) ** float(p), rel=1e-14)
    assert rule.beta(N) == pytest.approx((8 * N) ** -float(p), rel=1e-14)
    assert rule.ratio(N) == pytest.approx(rule.beta(N) / rule.alpha(N), rel=1e-14)
    for exact, power in ((rule.ratio_exact(N), 1), (rule.ratio_squared_exact(N), 2)):
        if exact is not None:
            assert float(exact) == pytest.approx(rule.ratio(N) ** power, rel=1e-13)


def test_other_exponents_and_constants_are_exact_where_rational():
    assert ScalingRule(0.75).ratio_exact(9) == F(1, 216)  # (4·9)^-3/2
    assert ScalingRule(0.75).ratio_exact(8) is None
    assert ScalingRule(0.3).ratio_exact(256) == F(1, 64)  # (2^20)^-3/10
    assert ScalingRule(F(1, 3), c=F(1, 2), d=2).ratio_exact(27) == F(1, 9)
    assert ScalingRule(1, c=0.5, d=0.5).ratio_exact(3) == F(4, 9)
    assert ScalingRule(0.1234567891).ratio_exact(36) is None


def test_rules_compare_by_value():
    assert ScalingRule(0.5) == DEEPLOOP
    assert ScalingRule(0.25) == DEEPNORM
    assert (DEEPNORM.name, ScalingRule(0.5).name, ScalingRule(0.3).name) == (
        "DeepNorm",
        "DeepLoop",
        "p = 0.3",
    )


def test_the_flat_alpha_is_what_the_factored_epsilon_divides_by():
    assert flat_alpha(4, 16) == 32
    assert flat_alpha(12, 3, 0.5) == pytest.approx(1.5 * math.sqrt(12))
    for K, R in ((1, 1), (12, 3), (24, 7)):
        assert 1 / flat_alpha(K, R, 2.0) == pytest.approx(factored_epsilon(K, R, 1 / 2.0))
    for K, R in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="N=0"):
            flat_alpha(K, R)


@pytest.mark.parametrize("counts", [(2.5, 4), (4, 2.5), (F(5, 2), 4)])
def test_a_fraction_of_a_block_or_a_round_is_refused(counts):
    for scale in (averaged_epsilon, factored_epsilon, flat_alpha):
        with pytest.raises(ValueError, match=r"N=(2\.5|5/2): must be a whole number"):
            scale(*counts)
    for name in ("deeploop", "prenorm", "averaged", "flat"):
        with pytest.raises(ValueError, match=r"(blocks|rounds)=(2\.5|5/2): must be a whole number"):
            parse(name).scales(*counts)
    with pytest.raises(ValueError, match=r"N=2\.5: must be a whole number"):
        DEEPLOOP.alpha(2.5)


@pytest.mark.parametrize("bad", [0, -0.5, math.nan, math.inf, F(-1, 2)])
@pytest.mark.parametrize("field", ["p", "c", "d"])
def test_constants_must_be_positive_and_finite(field, bad):
    with pytest.raises(ValueError, match=f"^{field}="):
        ScalingRule(**{"p": 0.5, field: bad})


@pytest.mark.parametrize("method", ["alpha", "beta", "ratio", "ratio_exact", "ratio_squared_exact"])
@pytest.mark.parametrize("N", [0, -3, math.nan])
def test_depth_must_be_positive(method, N):
    with pytest.raises(ValueError, match="N="):
        getattr(DEEPLOOP, method)(N)


def test_an_exponent_beyond_floats_is_a_value_error():
    with pytest.raises(ValueError, match="p=1000"):
        ScalingRule(1000).alpha(36)
    assert ScalingRule(1e300).ratio_exact(36) is None
