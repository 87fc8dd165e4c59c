"""The error model of the studies, against published tables of Student's t and against simulation."""

import random

import pytest

from research.contrasts import Family, contrasts, holm, pooled, quantile, spread_within, upper_tail


@pytest.mark.parametrize(
    ("share", "dof", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 15, 2.13145),
        (0.9975, 15, 3.28604),
        (0.95, 4, 2.13185),
        (0.999, 30, 3.38518),
    ],
)
def test_student_t_is_that_of_the_tables(share, dof, value):
    assert quantile(share, dof) == pytest.approx(value, rel=1e-4)
    assert upper_tail(value, dof) == pytest.approx(1 - share, rel=1e-3)


def test_holm_multiplies_by_what_is_left_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def test_the_spread_is_pooled_within_cells():
    spread = pooled({"a": {0: 1.0, 1: 3.0}, "b": {0: 10.0, 1: 10.0, 2: 10.0}})
    assert (spread.sd, spread.dof) == (pytest.approx((2 / 3) ** 0.5), 3)
    assert spread.error(4, 4) == pytest.approx(spread.sd * 0.5**0.5)
    with pytest.raises(ValueError, match="two of them"):
        pooled({"a": {0: 1.0}})


def test_pairs_that_were_chosen_share_the_spread_of_all_cells():
    cells = {"a": {0: 1.0, 1: 1.2}, "b": {0: 2.0, 1: 2.2}, "c": {0: 0.0, 1: 4.0}}
    (found,) = contrasts(cells, [("a", "b")])
    error = pooled(cells).error(2, 2)
    assert (found.one, found.other, found.mean) == ("a", "b", pytest.approx(-1))
    assert found.half == pytest.approx(quantile(0.975, 3) * error)
    assert found.p == pytest.approx(2 * upper_tail(1 / error, 3))


def test_equal_rules_are_told_apart_in_one_table_of_twenty():
    draw = random.Random(0)
    tables = [
        {f"{rule}": {seed: draw.gauss(0, 1) for seed in range(4)} for rule in range(5)} for _ in range(400)
    ]
    found = [any(one.p < 0.05 for one in contrasts(table)) for table in tables]
    assert 0.02 < sum(found) / len(found) < 0.08


def test_a_difference_keeps_its_sign_and_interval():
    (one,) = contrasts({"low": {0: 1.0, 1: 1.2}, "high": {0: 2.0, 1: 2.2}})
    assert (one.one, one.other, one.mean) == ("high", "low", pytest.approx(1.0))
    assert one.half == pytest.approx(4.3027 * 0.1 * 2**0.5, rel=1e-3)


def test_differences_of_a_table_are_corrected_for_all_that_were_asked_for():
    a, b, c = {0: 1.0, 1: 1.2}, {0: 2.0, 1: 2.2}, {0: 3.0}
    family = Family(spread_within((a, b, c)))
    first, second = family.minus(b, a), family.sum((1, c), (-1, b), (1, a), note=", a note")
    half = quantile(1 - 0.025 / 2, 2) * 0.02**0.5
    assert str(first) == f"+1.0000 ({1 - half:.4f} to {1 + half:.4f})"
    wider = half * 2**0.5  # √(1 + ½ + ½) beside √(½ + ½)
    assert str(second) == f"+2.0000 ({2 - wider:.4f} to {2 + wider:.4f}), a note"
    assert str(Family(spread_within((c,))).minus(c, a)) == "+1.9000 (1 and 2 seeds)"
