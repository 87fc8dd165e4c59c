"""The short version of `make faults`: every fault once or a few times, with real processes."""

import shutil

import pytest
from scenarios import SCENARIOS
from victims import differences, undisturbed

from deeploop.runs.folder import last_checkpoint

SHORT = {name: (scenario, times) for name, (scenario, times, _) in SCENARIOS.items() if times}


@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_lost(name, tmp_path):
    """A scenario raises where a run ends in another way than the undisturbed one."""
    scenario, times = SHORT[name]
    assert scenario(tmp_path, times).times >= times


def test_a_run_that_ends_in_another_way_is_told(tmp_path):
    reference = undisturbed()
    run = shutil.copytree(reference, tmp_path / "copy")
    assert differences(run, reference) == []
    for file in ("model", "optimizer", "rng"):
        path = last_checkpoint(run) / f"{file}.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert differences(run, reference) == [f"{path.name} differs"]
        path.write_bytes(content)
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 1', 1))
    (found,) = differences(run, reference)
    assert found.startswith("metrics differ")
    shutil.rmtree(last_checkpoint(run))
    assert "last checkpoint" in differences(run, reference)[-1]
