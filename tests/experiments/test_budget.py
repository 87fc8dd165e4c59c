"""What `--dry-run` prints: the cells, our GPU-hours, and the paper's beside them."""

import pytest

from deeploop.cli import main
from deeploop.experiments import budget
from deeploop.experiments.paper_grids import GRIDS
from deeploop.experiments.recipes import gpt2_small


def test_hours_by_hand():
    """12 blocks × 3 rounds of 7,077,888 entries, head 50,304 × 768, causal attention 6·T·width a visit."""
    flops = 6 * (36 * 7_077_888 + 50_304 * 768) + 36 * 6 * 1024 * 768
    hours = 49_152_000_000 * flops / (0.33 * 989e12) / 3600
    assert budget.gpu_hours(gpt2_small()) == pytest.approx(hours)
    assert hours == pytest.approx(80.8, abs=0.1)  # the paper: 90


def test_the_default_is_the_throughput_that_was_measured():
    """169 K tokens/s on one H200 (docs/results/gpt2-small-r3-britannica), so 49.152 B tokens take 80.8 h."""
    assert budget.gpu_hours(gpt2_small()) == pytest.approx(49.152e9 / 169e3 / 3600, rel=0.01)


def test_table1_beside_the_paper(capsys):
    assert main(["sweep", "table1", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[2:18]]
    assert [row[0] for row in rows] == [cell.name for cell in GRIDS["table1"]("paper").cells()]
    assert {row[1] for row in rows} == {"49,152,000,000"}
    assert [int(row[4]) for row in rows] == [37, 90, 145, 200] * 2 + [95, 260, 420, 620] * 2
    assert lines[18].split() == ["16", "cells", "786,432,000,000", "3,566", "3,734"]
    assert "33% of one H200's 989 TFLOP/s" in lines[20]


def test_half_the_utilization_is_twice_the_hours(capsys):
    assert main(["sweep", "table1", "--dry-run", "--utilization", "0.165"]) == 0
    assert capsys.readouterr().out.splitlines()[18].split()[-2:] == ["7,133", "3,734"]


def test_other_scales_have_no_hours_of_the_papers(capsys):
    assert main(["sweep", "table1", "--scale", "gpu", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[18].split()[-1] == "–"
