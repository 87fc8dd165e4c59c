"""The short version of `make faults`: every fault once or a few times, with real processes."""

import pytest
from scenarios import NOTHING, SCENARIOS

SHORT = {name: (scenario, times) for name, (scenario, times, _) in SCENARIOS.items() if times}


@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_lost(name, tmp_path):
    scenario, times = SHORT[name]
    row = scenario(tmp_path, times)
    assert row.times >= times
    assert row.lost.startswith(NOTHING)
