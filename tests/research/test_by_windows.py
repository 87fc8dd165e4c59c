"""The tables of the studies that are evaluated by windows."""

from statistics import fmean

import pytest

from research import RESULTS
from research.tables import by_windows


def test_a_gain_is_pre_norm_minus_deeploop_over_the_four_seeds_of_the_chosen_rates():
    cells = by_windows.gain_cells(RESULTS)
    assert {tuple(losses) for losses in cells.values()} == {(2, 3, 4, 5)}
    assert len(cells) == 6
    three = fmean(cells["prenorm", 3].values()) - fmean(cells["deeploop", 3].values())
    assert by_windows.gains(cells)[3] == pytest.approx(three)
    assert cells["deeploop", 1][3] == pytest.approx(1.22624, abs=1e-5)  # 1.23879 at 6.4e-2
