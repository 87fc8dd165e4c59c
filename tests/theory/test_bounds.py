"""Bounds against exact fractions, against the double sum they bound, and the exponent threshold."""

import random
from collections import defaultdict
from fractions import Fraction as F

import pytest

from deeploop.theory import (
    DEEPLOOP,
    DEEPNORM,
    HORIZONS,
    ScalingRule,
    aligned_bound,
    exponent_threshold,
    hierarchy,
    kappa_bar,
    kappa_bar_range,
    module_bound,
    shared_hierarchy,
    single_loop,
    tied_bound,
    untied_bound,
)

SIZES = [(K, R) for K in (1, 12, 24) for R in (1, 3, 7)]
HIERARCHIES = [(4, 4, 2, 2), (1, 3, 4, 5), (2, 1, 3, 1), (2, 3, 1, 4)]


@pytest.mark.parametrize(("K", "R"), SIZES)
def test_single_loop_bounds_are_the_papers(K, R):
    schedule, N = single_loop(K, R), K * R
    assert untied_bound(schedule, DEEPNORM).exact == F(1, 2)
    assert aligned_bound(schedule, DEEPNORM).exact == F(R, 2)
    assert untied_bound(schedule, DEEPLOOP).exact == F(1, 8 * N)
    assert aligned_bound(schedule, DEEPLOOP).exact == F(1, 8 * K)


def test_tied_bound_runs_from_cancelling_to_aligned():
    schedule = single_loop(12, 3)
    assert tied_bound(schedule, DEEPLOOP, 0).exact == 0
    assert tied_bound(schedule, DEEPLOOP, 1) == untied_bound(schedule, DEEPLOOP)
    assert tied_bound(schedule, DEEPLOOP, F(3, 2)).exact == F(1, 192)
    assert tied_bound(schedule, DEEPLOOP, 3) == aligned_bound(schedule, DEEPLOOP)
    measured = tied_bound(schedule, DEEPLOOP, 1.5)
    assert measured.exact is None
    assert measured.value == pytest.approx(1 / 192, rel=1e-14)


def test_irrational_bound_is_a_float():
    bound = untied_bound(single_loop(12, 3), ScalingRule(0.3))
    assert bound.exact is None
    assert bound.value == pytest.approx(72 * 16**-0.6 * 36**-1.2, rel=1e-13)


def double_sum(schedule, U, G):
    """Σ_j |Σ_r U| |Σ_r G| over the graph's visits: what Eq. (shared-grad) lets a step change."""
    sums = defaultdict(lambda: [0.0, 0.0])
    for visit, u, g in zip(schedule.visits, U, G, strict=True):
        if visit.has_grad:
            sums[visit.module, visit.sublayer][0] += u
            sums[visit.module, visit.sublayer][1] += g
    return {key: abs(u) * abs(g) for key, (u, g) in sums.items()}


@pytest.mark.parametrize("horizon", HORIZONS)
@pytest.mark.parametrize("sizes", HIERARCHIES)
def test_aligned_bound_is_the_double_sum_of_identical_visits(sizes, horizon):
    schedule = hierarchy(*sizes, horizon)
    rules = {"H": DEEPNORM, "L": DEEPLOOP}
    visits = [rules[v.module].ratio(schedule.rule_depth()) for v in schedule.visits]
    assert aligned_bound(schedule, rules).value == pytest.approx(
        sum(double_sum(schedule, visits, visits).values())
    )


def test_module_bound_covers_the_double_sum_at_its_own_kappa():
    rng = random.Random(0)
    schedule = hierarchy(2, 3, 2, 3, "full")
    ratio = DEEPLOOP.ratio(schedule.N_g)
    for _ in range(20):
        U, G = ([rng.uniform(-1, 1) * ratio for _ in schedule.visits] for _ in range(2))
        terms = double_sum(schedule, U, G)
        kappas = {  # Eq. (kappa-def) with C_U = C_G = 1
            m: max(t for (module, _), t in terms.items() if module == m) / (schedule.R_g_of(m) * ratio**2)
            for m in schedule.modules
        }
        assert sum(terms.values()) <= module_bound(schedule, DEEPLOOP, kappas).value


@pytest.mark.parametrize("horizon", HORIZONS)
@pytest.mark.parametrize("sizes", HIERARCHIES)
def test_one_rule_gives_the_condensed_form(sizes, horizon):
    """Eq. (hrm-per-module-bound) = M_g kappa_bar (beta/alpha)^2, Eq. (hrm-cond)."""
    schedule = hierarchy(*sizes, horizon)
    kappas = {"H": F(1, 2), "L": F(2, 3)}
    condensed = schedule.M_g * kappa_bar(schedule, kappas) * DEEPLOOP.ratio_exact(schedule.rule_depth()) ** 2
    assert module_bound(schedule, DEEPLOOP, kappas).exact == condensed


@pytest.mark.parametrize(("K_H", "K_L", "C", "C_L"), HIERARCHIES)
def test_kappa_bar_and_its_range_on_the_last_cycle(K_H, K_L, C, C_L):
    schedule = hierarchy(K_H, K_L, C, C_L, "last_cycle")
    J_H, J_L, M_g = 2 * K_H, 2 * K_L, schedule.M_g
    kappa_L = F(C_L, 3)
    assert kappa_bar(schedule, {"L": kappa_L}) == (J_H + J_L * C_L * kappa_L) / F(M_g)
    assert kappa_bar_range(schedule) == (F(J_H, M_g), 1 + F(J_L * C_L * (C_L - 1), M_g))


def test_kappa_bar_on_the_full_graph_lets_both_modules_align():
    schedule = hierarchy(4, 4, 2, 2, "full")
    assert kappa_bar(schedule, {"L": 4, "H": 2}) == F(8 * 2 * 2 + 8 * 4 * 4, 48)
    assert kappa_bar_range(schedule) == (0, F(10, 3))
    with pytest.raises(ValueError, match=r"kappa=3 of H.*\[0, 2\]"):
        kappa_bar(schedule, {"H": 3})


def test_kappa_bar_range_of_one_module_is_that_of_kappa():
    assert kappa_bar_range(single_loop(12, 3)) == (0, 3)
    assert kappa_bar_range(shared_hierarchy(2, 3, 6, "last_cycle")) == (0, 7)


def test_published_hrm_bounds():
    cycle, call = (hierarchy(4, 4, 2, 2, h) for h in ("last_cycle", "last_call"))
    assert aligned_bound(cycle, DEEPLOOP).exact == F(8 + 8 * 4, 16 * 12**2)
    assert kappa_bar_range(cycle) == (F(1, 3), F(5, 3))
    assert aligned_bound(call, DEEPLOOP) == untied_bound(call, DEEPLOOP)  # nothing is tied in the graph
    by_module = aligned_bound(cycle, {"H": DEEPNORM, "L": DEEPLOOP}).exact
    assert by_module == 8 * F(1, 4 * 12) + 8 * 4 * F(1, 16 * 12**2)


def test_wrong_modules_and_kappas_are_refused():
    schedule = hierarchy(1, 1, 1, 2, "full")
    with pytest.raises(ValueError, match="rules for"):
        untied_bound(schedule, {"H": DEEPLOOP})
    with pytest.raises(ValueError, match="kappa for"):
        module_bound(schedule, DEEPLOOP, {"H": 1})
    for kappa in (-0.1, 3.1, float("nan")):
        with pytest.raises(ValueError, match="kappa="):
            tied_bound(single_loop(1, 3), DEEPLOOP, kappa)
    tied_bound(single_loop(1, 3), DEEPLOOP, 3 + 1e-9)  # rounding of a measurement


@pytest.mark.parametrize("gamma", [F(0), F(1, 2), F(1)])
@pytest.mark.parametrize("p", [F(1, 8), F(1, 4), F(3, 8), F(1, 2), F(3, 4)])
def test_exponent_threshold_separates_bounded_from_growing(gamma, p):
    """Proposition (exponent-threshold): at fixed K the bound scales exactly as R^(1 + gamma - 4p)."""

    def bound(R):  # R is a power of 16, so every number is rational
        kappa = round(R ** float(gamma))
        assert F(kappa) ** gamma.denominator == F(R) ** gamma.numerator
        return tied_bound(single_loop(1, R), ScalingRule(p), kappa).exact

    steps = [bound(16 * R) / bound(R) for R in (1, 16)]
    exponent = 1 + gamma - 4 * p  # a multiple of 1/2, so 16^exponent = 4^(2 exponent)
    assert steps == [F(4) ** int(2 * exponent)] * 2
    assert (steps[-1] <= 1) == (p >= exponent_threshold(gamma))


def test_exponent_threshold_values():
    assert exponent_threshold(0) == F(1, 4)
    assert exponent_threshold(1) == F(1, 2)
    assert exponent_threshold(F(1, 3)) == F(1, 3)
    assert exponent_threshold(0.2) == pytest.approx(0.3)
    for gamma in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="gamma="):
            exponent_threshold(gamma)


def test_growing_the_inner_cycles_asks_for_one_half():
    """Section 4.3 (ii): fixed K_H, K_L and aligned inner cycles, C_L growing."""
    short, long = (hierarchy(1, 1, 1, C_L, "last_cycle") for C_L in (200, 400))
    assert aligned_bound(long, DEEPNORM).value / aligned_bound(short, DEEPNORM).value == pytest.approx(
        2, rel=0.01
    )
    assert aligned_bound(long, DEEPLOOP).value / aligned_bound(short, DEEPLOOP).value == pytest.approx(
        1, rel=0.01
    )
    mixed = {"H": DEEPNORM, "L": DEEPLOOP}  # H stands once in the graph, so 1/4 is enough for it
    assert aligned_bound(long, mixed).value < aligned_bound(short, mixed).value < 1
