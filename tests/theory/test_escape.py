"""The model of the start against a simulation of drifted matrices in a loop, and its exponents."""

import math
from fractions import Fraction

import numpy as np
import pytest

from deeploop.theory import (
    DEEPLOOP,
    DEEPNORM,
    ScalingRule,
    critical_ramp,
    critical_sum,
    ramp_exponent,
    sum_exponent,
)
from deeploop.theory.escape import OVERLAP, similarity, turn

WIDTH, N = 256, 18


def simulate(S, alpha, beta=0.0, positions=32):
    """N visits of x ← Norm(αx + W_o·W_v·u): both matrices drifted by S in every entry, u at the overlap.

    Returns the mean cosine between positions that began as orthogonal ones.
    """
    draw = np.random.default_rng(0)
    signs = [draw.choice([-1.0, 1.0], WIDTH) for _ in range(4)]
    own = [beta * 0.5 / math.sqrt(WIDTH) * draw.standard_normal((WIDTH, WIDTH)) for _ in range(2)]
    # The output matrix reads at the overlap too: a part of what the value matrix writes.
    other = orthogonal(draw.standard_normal(WIDTH), signs[1])
    W_v = own[0] + S * np.outer(signs[1], signs[0])
    W_o = own[1] + S * np.outer(signs[3], OVERLAP * signs[1] + math.sqrt(1 - OVERLAP**2) * other)
    u = OVERLAP * signs[0] + math.sqrt(1 - OVERLAP**2) * orthogonal(draw.standard_normal(WIDTH), signs[0])
    x = np.linalg.qr(draw.standard_normal((WIDTH, positions)))[0].T * math.sqrt(WIDTH)
    x = np.stack([orthogonal(row, signs[3]) for row in x])
    for _ in range(N):
        y = alpha * x + W_o @ (W_v @ u)
        x = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True))
    cosines = x @ x.T / WIDTH
    return (cosines.sum() - positions) / (positions * (positions - 1))


def orthogonal(v, to):
    """The part of v that is orthogonal to `to`, at RMS 1."""
    v = v - to * (v @ to) / (to @ to)
    return v / np.sqrt(np.mean(v**2))


@pytest.mark.parametrize("p", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.3, 0.7, 1.0, 1.5])
def test_similarity_is_what_a_loop_of_drifted_matrices_gives(p, share):
    rule = ScalingRule(p)
    S = share * critical_sum(N, rule, WIDTH)
    assert similarity(N, rule, WIDTH, S) == pytest.approx(simulate(S, rule.alpha(N)), abs=0.06)


def test_the_initial_beta_is_drowned_at_the_critical_sum():
    S, alpha, beta = critical_sum(N, DEEPLOOP, WIDTH), DEEPLOOP.alpha(N), DEEPLOOP.beta(N)
    assert beta / 2 < 0.1 * WIDTH * S
    assert simulate(S, alpha, beta) == pytest.approx(simulate(S, alpha), abs=0.05)


def test_the_critical_sum_is_where_the_visits_have_turned_a_state_by_one():
    for factors in (1, 2, 3):
        S = critical_sum(N, DEEPNORM, WIDTH, factors=factors)
        assert turn(N, DEEPNORM, WIDTH, S, factors=factors) == pytest.approx(1.0)


@pytest.mark.parametrize("p", [Fraction(1, 4), Fraction(1, 2), 0.75, 1])
@pytest.mark.parametrize("factors", [1, 2, 3])
def test_exponents_are_slopes_over_rounds_at_fixed_blocks(p, factors):
    rule = ScalingRule(p)

    def slope(f):
        return pytest.approx(math.log(f(6 * 48) / f(6 * 3)) / math.log(16), abs=1e-12)

    assert float(sum_exponent(p, factors=factors)) == slope(
        lambda N: critical_sum(N, rule, 512, factors=factors)
    )
    if factors == 1:
        assert float(ramp_exponent(p)) == slope(lambda N: critical_ramp(N, rule, 512))


def test_the_papers_exponent_asks_for_a_ramp_that_falls_as_the_root_of_r():
    assert sum_exponent(Fraction(1, 2)) == Fraction(-1, 4)
    assert ramp_exponent(Fraction(1, 2)) == Fraction(-1, 2)
    assert sum_exponent(1) == ramp_exponent(1) == 0


@pytest.mark.parametrize(
    ("ramp", "stay", "come_back"),
    [
        (1 / 6e5, (0.25, 0.30, 0.35), (0.45, 0.5, 0.75, 1)),
        (5e-6, (0.25, 0.5, 0.6), (0.75, 1)),
        (1e-5, (0.5, 0.75), (1,)),
    ],
)
def test_the_critical_ramp_at_the_size_that_was_measured(ramp, stay, come_back):
    """K = 6, R = 3, width 512: docs/results/p-sweep and escape; p = 1 at 1e-5 is a prototype's."""
    assert all(critical_ramp(18, ScalingRule(p), 512) < ramp for p in stay)
    assert all(critical_ramp(18, ScalingRule(p), 512) > ramp for p in come_back)
