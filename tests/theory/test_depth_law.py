"""Rounds as a distribution: moments against closed forms and fractions, draws, and the depth N*."""

import math
from fractions import Fraction

import pytest

from deeploop.theory.depth_law import (
    MOST_ROUNDS,
    WORD,
    effective_depth,
    mean_read_write,
    poisson_lognormal_law,
    rounds_law,
    uniform_law,
)


def test_a_fixed_number_of_rounds_is_a_law_too():
    law = uniform_law(3, 3)
    assert (law.mean, law.most) == (3, 3)
    assert [law.draw(word) for word in (0, 12345, WORD - 1)] == [3, 3, 3]
    assert effective_depth(4, law) == 12.0


def test_uniform_moments_are_exact():
    law = uniform_law(1, 7)
    assert law.mean == 4
    assert mean_read_write(law) == Fraction(sum(R * R for R in range(1, 8)), 7) == 20
    assert mean_read_write(law, 4) == Fraction(sum(R * min(R, 4) for R in range(1, 8)), 7)
    assert [law.draw(word) for word in range(7)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("mean", "spread"), [(2, 0.5), (5, 0.5), (9, 0.5), (33, 0.5), (4, 0.1)])
def test_huginns_law_has_the_moments_of_a_poisson_lognormal(mean, spread):
    law = poisson_lognormal_law(mean, spread, 40 * mean)  # practically without a limit
    r = mean - 1
    variance = r + r**2 * math.expm1(spread**2)
    assert math.fsum(law.probabilities) == pytest.approx(1, abs=1e-14)
    assert law.mean == pytest.approx(mean, rel=1e-6)
    assert mean_read_write(law) == pytest.approx(mean**2 + variance, rel=1e-4)


def test_nstar_over_the_mean_depth_is_what_the_closed_form_says():
    for mean, ratio in ((5, 1.158), (9, 1.150), (33, 1.139)):
        law = poisson_lognormal_law(mean, 0.5, 16 * mean)
        assert effective_depth(1, law) / mean == pytest.approx(ratio, abs=1e-3)


def test_a_narrow_spread_is_a_poisson_distribution():
    law = poisson_lognormal_law(4, 1e-6, 60)
    expected = [math.exp(-3) * 3**n / math.factorial(n) for n in range(10)]
    assert law.probabilities[:10] == pytest.approx(expected, rel=1e-5)


def test_a_deep_loop_has_the_asymptotic_chances():
    mean, spread, R = 2_500, 0.5, 5_000
    law = poisson_lognormal_law(mean, spread, MOST_ROUNDS)
    n = R - 1
    off = math.log(n / (mean - 1)) + spread**2 / 2
    normal = math.exp(-((off / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))
    # The log-normal density, and 1/(2n) for the width of the Poisson distribution (Bulmer 1974).
    bulmer = normal / n * (1 + ((off / spread) ** 2 + off - 1) / (2 * n * spread**2))
    assert law.probabilities[R - 1] == pytest.approx(bulmer, rel=1e-6)


def test_what_lies_beyond_the_limit_is_counted_there():
    cut, whole = poisson_lognormal_law(4, 0.5, 6), poisson_lognormal_law(4, 0.5, 100)
    assert cut.most == 6
    assert cut.probabilities[:5] == whole.probabilities[:5]
    assert cut.probabilities[5] == pytest.approx(math.fsum(whole.probabilities[5:]))
    assert poisson_lognormal_law(1, 0.5, 6) == uniform_law(1, 1)


def test_draws_follow_the_law():
    law = poisson_lognormal_law(4, 0.5, 16)
    count = 20_000
    drawn = [law.draw(i * WORD // count) for i in range(count)]
    for R, chance in enumerate(law.probabilities, 1):
        assert drawn.count(R) / count == pytest.approx(chance, abs=1e-4)
    assert law.draw(WORD - 1) == 16


def test_truncated_gradients_lower_nstar_to_the_root_of_read_times_written():
    assert effective_depth(3, uniform_law(32, 32), 8) == pytest.approx(3 * math.sqrt(32 * 8))
    assert effective_depth(3, uniform_law(4, 4), 8) == 12  # G above R: the whole loop
    law = poisson_lognormal_law(4, 0.5, 16)
    assert effective_depth(2, law, 16) == effective_depth(2, law)
    assert effective_depth(2, law, 4) < effective_depth(2, law)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: uniform_law(0, 3),
        lambda: uniform_law(4, 3),
        lambda: poisson_lognormal_law(8, 0.5, 7),
        lambda: poisson_lognormal_law(4, 0.0, 7),
        lambda: poisson_lognormal_law(4, 1e6, 7),
        lambda: rounds_law("uniform", 10**7),
        lambda: rounds_law("poisson-lognormal", 10**5),
        lambda: rounds_law("poisson-lognormal", 4, limit=10**11),
        lambda: mean_read_write(uniform_law(1, 3), 0),
    ],
)
def test_bad_values_are_errors(wrong):
    with pytest.raises(ValueError, match=r"must|need"):
        wrong()
