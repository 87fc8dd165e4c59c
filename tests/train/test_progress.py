"""The clock counts training alone; utilization knows the devices it can know."""

import pytest
import torch

from deeploop.train import progress
from deeploop.train.progress import Clock, Display, peak_flops


def test_the_clock_counts_what_lies_between_start_and_stop(monkeypatch):
    now = iter([10.0, 10.5, 20.0, 21.5, 30.0, 31.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    clock = Clock()
    for _ in range(2):
        clock.start()
        clock.stop()
    assert clock.total == 2.0
    assert clock.read() == 1.0  # two steps in two seconds
    assert clock.read() == 0.0
    clock.start()
    clock.stop()
    assert (clock.read(), clock.total) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Unheard Of", None),
    ],
)
def test_peaks_are_found_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None


def test_only_the_first_rank_speaks(capsys):
    for shown in (True, False):
        display = Display(total=3, done=1, shown=shown, title="run")
        display.step(2.0, 1e-3, 12_345.0)
        display.say(f"shown: {shown}")
        display.close()
    captured = capsys.readouterr()
    assert captured.out == "shown: True\n"
    assert captured.err == ""  # no bar where nobody watches
