"""Schedules: the order of the recurrence, the paper's counts, and what stands in the graph."""

from itertools import groupby

import pytest

from deeploop.theory import HORIZONS, Schedule, Visit, hierarchy, shared_hierarchy, single_loop


def calls(schedule, grad_only=False):
    """The module runs of a schedule, one letter each."""
    visits = [v for v in schedule.visits if v.has_grad or not grad_only]
    return "".join(key[0][0] for key, _ in groupby(visits, key=lambda v: (v.module, v.cycle, v.round)))


def test_single_loop_runs_all_sublayers_every_round():
    schedule = single_loop(blocks=2, rounds=3)
    assert schedule.visits == tuple(Visit("loop", 0, r, j, True) for r in range(3) for j in range(4))


@pytest.mark.parametrize(("K", "R"), [(1, 1), (12, 3), (24, 7)])
def test_single_loop_counts(K, R):
    schedule = single_loop(K, R)
    assert (schedule.N, schedule.M, schedule.J) == (K * R, 2 * K * R, 2 * K)
    assert (schedule.N_g, schedule.M_g) == (schedule.N, schedule.M)
    assert schedule.modules == ("loop",)
    assert schedule.R_of("loop") == schedule.R_g_of("loop") == R


def test_hierarchy_order_is_that_of_the_recurrence():
    schedule = hierarchy(1, 3, cycles=2, low_cycles=2, horizon="full")
    assert calls(schedule) == "LLHLLH"
    assert [v.sublayer for v in schedule.visits[:6]] == list(range(6))
    low_calls = [(v.cycle, v.round) for v in schedule.visits if v.module == "L" and v.sublayer == 0]
    assert low_calls == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("horizon", "in_graph"), [("full", "LLLHLLLH"), ("last_cycle", "LLLH"), ("last_call", "LH")]
)
def test_horizon_keeps_the_end_of_the_recurrence(horizon, in_graph):
    schedule = hierarchy(1, 1, cycles=2, low_cycles=3, horizon=horizon)
    assert calls(schedule, grad_only=True) == in_graph
    n = schedule.M_g
    assert all(v.has_grad for v in schedule.visits[-n:])
    assert not any(v.has_grad for v in schedule.visits[:-n])


@pytest.mark.parametrize(("K_H", "K_L", "C", "C_L"), [(4, 4, 2, 2), (1, 3, 4, 5), (2, 1, 1, 1)])
def test_hierarchy_counts_follow_the_papers_formulas(K_H, K_L, C, C_L):
    full, cycle, call = (hierarchy(K_H, K_L, C, C_L, h) for h in ("full", "last_cycle", "last_call"))
    for schedule in (full, cycle, call):
        assert schedule.M == 2 * C * (K_H + C_L * K_L)  # Eq. (hrm-forward-M)
        assert (schedule.J_of("H"), schedule.J_of("L"), schedule.J) == (2 * K_H, 2 * K_L, 2 * (K_H + K_L))
        assert (schedule.R_of("H"), schedule.R_of("L")) == (C, C * C_L)
    assert full.M_g == full.M
    assert cycle.M_g == 2 * (K_H + C_L * K_L) == cycle.M // C  # Eq. (hrm-Mg)
    assert call.M_g == 2 * (K_H + K_L)
    assert [(s.R_g_of("H"), s.R_g_of("L")) for s in (full, cycle, call)] == [(C, C * C_L), (1, C_L), (1, 1)]


@pytest.mark.parametrize(("K_H", "K_L", "C", "C_L"), [(4, 4, 2, 2), (2, 2, 2, 8), (1, 3, 4, 5), (2, 1, 1, 1)])
def test_the_depth_of_the_rule_is_the_papers_whatever_part_of_the_last_cycle_has_gradients(K_H, K_L, C, C_L):
    full, cycle, call = (hierarchy(K_H, K_L, C, C_L, h) for h in ("full", "last_cycle", "last_call"))
    assert call.rule_depth() == cycle.rule_depth() == K_H + C_L * K_L  # N_g = M_g / 2 of Eq. (hrm-Mg)
    assert full.rule_depth() == full.N
    assert [s.rule_depth("graph") for s in (full, cycle, call)] == [full.N, K_H + C_L * K_L, K_H + K_L]
    assert single_loop(K_H, C_L).rule_depth() == single_loop(K_H, C_L).rule_depth("graph") == K_H * C_L
    assert shared_hierarchy(K_L, C, C_L, "last_call").rule_depth() == K_L * (C_L + 1)


def test_published_hrm():
    by_horizon = {h: hierarchy(4, 4, 2, 2, h) for h in HORIZONS}
    assert {s.M for s in by_horizon.values()} == {48}
    assert {h: (s.M_g, s.N_g) for h, s in by_horizon.items()} == {
        "full": (48, 24),
        "last_cycle": (24, 12),
        "last_call": (16, 8),
    }


@pytest.mark.parametrize(("n", "runs", "in_graph", "M_g", "N_g"), [(6, 21, 7, 28, 14), (4, 15, 5, 20, 10)])
def test_published_trm(n, runs, in_graph, M_g, N_g):
    schedule = shared_hierarchy(blocks=2, cycles=3, low_cycles=n, horizon="last_cycle")
    assert (schedule.R_of("shared"), schedule.R_g_of("shared")) == (runs, in_graph)
    assert (schedule.J, schedule.M_g, schedule.N_g) == (4, M_g, N_g)


def test_shared_last_call_keeps_the_last_run_in_each_role():
    schedule = shared_hierarchy(blocks=1, cycles=2, low_cycles=3, horizon="last_call")
    assert {(v.cycle, v.round) for v in schedule.visits if v.has_grad} == {(1, 2), (1, 3)}


def test_counts_come_from_the_list():
    visits = hierarchy(1, 1, 1, 2, "full").visits
    assert Schedule(visits[:-2]).modules == ("L",)
    with pytest.raises(ValueError, match="'L'"):
        Schedule(visits[1:]).R_of("L")
    detached = Schedule(tuple(v._replace(has_grad=v.module == "L") for v in visits))
    assert (detached.R_of("H"), detached.R_g_of("H"), detached.M_g) == (1, 0, 4)


@pytest.mark.parametrize("bad", [0, -1, 1.5])
@pytest.mark.parametrize("field", ["blocks", "rounds"])
def test_sizes_are_positive_integers(field, bad):
    with pytest.raises(ValueError, match=f"{field}={bad}"):
        single_loop(**{"blocks": 1, "rounds": 1, field: bad})


@pytest.mark.parametrize("field", ["high_blocks", "low_blocks", "cycles", "low_cycles"])
def test_hierarchy_names_the_bad_size(field):
    sizes = {"high_blocks": 1, "low_blocks": 1, "cycles": 1, "low_cycles": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field}=0"):
        hierarchy(**sizes, horizon="full")


def test_unknown_horizon():
    with pytest.raises(ValueError, match=r"horizon='half'.*last_call"):
        hierarchy(1, 1, 1, 1, "half")
    with pytest.raises(ValueError, match="horizon='half'"):
        shared_hierarchy(1, 1, 1, "half")


def test_a_schedule_too_long_to_list_is_refused():
    with pytest.raises(ValueError, match="depth N=1000000000: must be at most 500000 blocks"):
        single_loop(10**9, 1)
    with pytest.raises(ValueError, match="depth N=1000010: must be at most 500000 blocks"):
        hierarchy(1, 100_000, cycles=10, low_cycles=1, horizon="full")
    with pytest.raises(ValueError, match="depth N=600000: must be at most 500000 blocks"):
        shared_hierarchy(100_000, cycles=2, low_cycles=2, horizon="full")
