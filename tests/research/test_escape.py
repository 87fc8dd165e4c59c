"""The model of the start against a simulation of drifted matrices in a loop, and its exponents."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from deeploop.theory import DEEPLOOP, DEEPNORM, ScalingRule
from research.escape import (
    INITIAL,
    critical_ramp,
    critical_sum,
    ramp_exponent,
    similarity,
    sum_exponent,
    turn,
)

WIDTH, N = 512, 48


def simulate(S, alpha, beta=0.0, initial=INITIAL, positions=128):
    """N visits of x ← Norm(αx + W_o·W_v·mean of x), both matrices drifted by S along the common part's signs.

    The mean over positions is what attention reads while it is flat. Returns the mean cosine between
    positions, which at first have `initial` of it.
    """
    draw = np.random.default_rng(0)
    common, between = draw.standard_normal(WIDTH), draw.choice([-1.0, 1.0], WIDTH)
    signs = np.sign(common)
    own = [beta * 0.5 / math.sqrt(WIDTH) * draw.standard_normal((WIDTH, WIDTH)) for _ in range(2)]
    W_v = own[0] + S * np.outer(between, signs)
    W_o = own[1] + S * np.outer(signs, between)
    basis = np.linalg.qr(np.column_stack([common, signs, draw.standard_normal((WIDTH, positions))]))[0]
    x = math.sqrt(initial) * basis[:, 0] + math.sqrt(1 - initial) * basis[:, 2:].T
    x *= math.sqrt(WIDTH) * np.sign(common @ basis[:, 0])
    for _ in range(N):
        y = alpha * x + W_o @ (W_v @ x.mean(0))
        x = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True))
    cosines = x @ x.T / WIDTH
    return (cosines.sum() - positions) / (positions * (positions - 1))


@pytest.mark.parametrize("p", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 1.0, 1.1, 1.5])
def test_similarity_is_what_a_loop_of_drifted_matrices_gives(p, share):
    rule = ScalingRule(p)
    S = share * critical_sum(N, rule, WIDTH)
    assert similarity(N, rule, WIDTH, S) == pytest.approx(simulate(S, rule.alpha(N)), abs=0.05)


def test_the_initial_similarity_is_where_it_starts_and_what_it_starts_from():
    assert similarity(N, DEEPLOOP, WIDTH, 0.0) == pytest.approx(INITIAL, rel=0.02)
    S = critical_sum(N, DEEPLOOP, WIDTH, initial=0.1)
    assert critical_sum(N, DEEPLOOP, WIDTH) > S
    assert simulate(S, DEEPLOOP.alpha(N), initial=0.1) == pytest.approx(0.5, abs=0.05)
    assert similarity(N, DEEPLOOP, WIDTH, 1.0) == pytest.approx(1.0)  # far beyond: no overflow


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_the_initial_beta_is_drowned_at_the_critical_sum(p):
    rule = ScalingRule(p)
    S, alpha, beta = critical_sum(N, rule, WIDTH), rule.alpha(N), rule.beta(N)
    assert beta / 2 < 0.1 * WIDTH * S
    assert simulate(S, alpha, beta) == pytest.approx(simulate(S, alpha), abs=0.05)


def test_the_critical_sum_is_where_the_similarity_is_one_half():
    for rule, initial in itertools.product((DEEPNORM, DEEPLOOP), (0.001, INITIAL, 0.1)):
        S = critical_sum(N, rule, WIDTH, initial=initial)
        assert similarity(N, rule, WIDTH, S, initial=initial) == pytest.approx(0.5)
        assert turn(N, rule, WIDTH, S) == pytest.approx(math.log(math.pi / 2 / initial) / 2, rel=0.02)


@pytest.mark.parametrize("p", [Fraction(1, 4), Fraction(1, 2), 0.75, 1])
def test_exponents_are_slopes_over_rounds_at_fixed_blocks(p):
    rule = ScalingRule(p)

    def slope(f):
        return pytest.approx(math.log(f(6 * 48) / f(6 * 3)) / math.log(16), abs=1e-12)

    assert float(sum_exponent(p)) == slope(lambda N: critical_sum(N, rule, 512))
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
        (1e-5, (0.25, 0.5, 0.75), (1,)),
    ],
)
def test_the_critical_ramp_at_the_size_that_was_measured(ramp, stay, come_back):
    """K = 6, R = 3, width 512: docs/results/p-sweep and escape; p = 1 at 1e-5 is a prototype's."""
    assert all(critical_ramp(18, ScalingRule(p), 512) < ramp for p in stay)
    assert all(critical_ramp(18, ScalingRule(p), 512) > ramp for p in come_back)
