"""The clock counts training alone; utilization knows the devices it can know."""

import sys

import pytest
import torch

from deeploop.train import progress
from deeploop.train.device import peak_flops
from deeploop.train.progress import Clock, Display, hours_minutes_seconds


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


@pytest.fixture
def clock(monkeypatch):
    """The time of day that a display sees: `clock[0]`."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_now_and_then(clock, capsys):
    display = Display(total=700, done=20, shown=True, title="run")
    for step in range(21, 61):
        clock[0] += 1.5
        display.step(5.1324, 3.14e-4, 1_234.0 if step % 2 == 0 else None)  # logged at every second step
    time_left, *lines = capsys.readouterr().out.splitlines()
    assert time_left == "time:      about 16:56 left for 677 steps"  # of 1.5 s
    assert lines[0] == "step 28/700  loss 5.132  lr 3.1e-04  1.23k tok/s  16:48 left"  # 672 steps of 1.5 s
    assert [line.split()[1] for line in lines] == [f"{step}/700" for step in (28, 36, 44, 52, 60)]


def test_a_long_run_has_at_most_a_hundred_lines(clock, capsys):
    display = Display(total=2_000, done=0, shown=True, title="run")
    for _ in range(2_000):
        clock[0] += 60
        display.step(5.0, 1e-3, 1.0)
    time_left, *lines = capsys.readouterr().out.splitlines()
    assert time_left == "time:      about 33:18:00 left for 1,998 steps"
    assert len(lines) == 100
    assert lines[-1].startswith("step 2000/2000  ")
    assert lines[-1].endswith("  0:00 left")


def test_a_long_validation_has_lines_too(clock, capsys):
    display = Display(total=700, done=20, shown=True, title="run")
    for share in [done / 100 for done in range(100)] + [1.0]:
        display.validating(share)
        clock[0] += 0.5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 20/700  validating: 20% done, 0:40 left"
    assert [line.split()[3] for line in lines] == ["20%", "40%", "60%", "80%"]
    for share in (0.0, 0.5, 1.0):  # ten seconds after the last line, but a short one
        clock[0] += 1
        display.validating(share)
    assert capsys.readouterr().out == ""


def test_a_terminal_has_a_validation_in_its_bar(clock, capsys, monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    display = Display(total=3, done=0, shown=True, title="run")
    display.step(5.0, 1e-3, 1_000.0)
    for share in (0.0, 0.25, 1.0):
        display.validating(share)
        clock[0] += 60
    display.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    bar = captured.err.split("\r")
    assert any("validating: 25% done, 3:00 left" in text for text in bar)
    assert "tok/s" in bar[-1]  # as before


def test_a_terminal_has_the_bar_alone(clock, capsys, monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    display = Display(total=3, done=0, shown=True, title="run")
    clock[0] += 60
    display.step(5.0, 1e-3, 1_000.0)
    display.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "run" in captured.err
    assert "tok/s" in captured.err


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (201, "3:21"), (3599.6, "1:00:00")])
def test_a_time_for_a_person(seconds, text):
    assert hours_minutes_seconds(seconds) == text
