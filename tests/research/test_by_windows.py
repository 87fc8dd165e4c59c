"""The tables of the studies that are evaluated by windows."""

from statistics import fmean

import pytest

from research import DOCS, RESULTS
from research.tables import by_windows


def test_a_gain_is_pre_norm_minus_deeploop_over_the_four_seeds_of_the_chosen_rates():
    cells = by_windows.gain_cells(RESULTS)
    assert {tuple(losses) for losses in cells.values()} == {(2, 3, 4, 5)}
    assert len(cells) == 6
    three = fmean(cells["prenorm", 3].values()) - fmean(cells["deeploop", 3].values())
    assert by_windows.gains(cells)[3] == pytest.approx(three)
    assert cells["deeploop", 1][3] == pytest.approx(1.22624, abs=1e-5)  # 1.23879 at 6.4e-2


def test_a_loop_equals_a_stack_by_interpolation_over_log_blocks():
    cells = {
        "loop1": {2: 1.20, 3: 1.20},
        "loop3": {2: 1.151, 3: 1.149},
        "loop7": {2: 1.10, 3: 1.10},
        "stack12": {2: 1.10, 3: 1.10},
    }
    phi, half = by_windows.equivalence(cells, 3)
    assert phi == pytest.approx(0.5)  # halfway from 4 to 12 blocks
    # By hand: sd² = 2e-6 / 4 over 4 degrees of freedom, t(0.9875, 4) = 3.4954
    assert half == pytest.approx(3.4954 * (2e-6 / 4) ** 0.5 * (0.5 * 1.5) ** 0.5 / 0.10, rel=1e-3)
    assert by_windows.equivalence(cells, 7)[0] == pytest.approx(0.5646, abs=1e-4)  # ln 3 / ln 7: 12 blocks
    with pytest.raises(ValueError, match=r"R = 3: the loss 1\.3000"):
        by_windows.equivalence(cells | {"loop3": {2: 1.3, 3: 1.3}}, 3)


def test_a_round_is_compared_with_equal_flops_on_the_same_windows():
    cells = by_windows.worth_cells(RESULTS)
    assert {shape: len(losses) for shape, losses in cells.items()} == {
        shape: 4 if shape == "loop7" else 2 for shape in by_windows.SHAPES
    }
    behind = fmean(cells["loop7"].values()) - fmean(cells["stack28"].values())
    assert f"| {behind:.3f} below a loop, R = 7 |" in (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert all(by_windows.SHAPES[a][1] == by_windows.SHAPES[b][1] for a, b in by_windows.COMPARED)


def test_a_parabola_through_the_stacks_finds_their_own_blocks():
    cells = {shape: {2: loss} for shape, loss in {"loop1": 1.2, "stack12": 1.1, "stack28": 1.05}.items()}
    cells["loop3"], cells["loop7"] = cells["stack12"], cells["stack28"]
    assert by_windows.equivalence_on_a_curve(cells, 3) == pytest.approx(1)  # 12 blocks = 4 * 3
    assert by_windows.equivalence_on_a_curve(cells, 7) == pytest.approx(1)
    with pytest.raises(ValueError, match="R = 7: the loss is not between"):
        by_windows.equivalence_on_a_curve(cells | {"loop7": {2: 1.0}}, 7)
