"""The output of `--dry-run`: the cells, deeploop's GPU-hours, and the paper's beside them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deeploop.cli import main
from deeploop.commands import prepare_puzzles
from deeploop.models.accounting import flops_per_segment, flops_per_token
from deeploop.models.reasoner_config import PuzzleShape
from deeploop.sweep import budget
from deeploop.sweep.grid import named_grid
from deeploop.tasks.language.recipes import gpt2_small
from deeploop.tasks.puzzles.recipes import hrm_sudoku4
from deeploop.tasks.recipes import get_recipe


def test_hours_by_hand():
    """12 blocks × 3 rounds of 7,077,888 entries, head 50,304 × 768, causal attention 6·T·width a visit."""
    flops = 6 * (36 * 7_077_888 + 50_304 * 768) + 36 * 6 * 1024 * 768
    hours = 49_152_000_000 * flops / (0.45 * 989e12) / 3600
    assert budget.cost(gpt2_small()).gpu_hours() == pytest.approx(hours)
    assert hours == pytest.approx(59.2, abs=0.1)  # the paper: 90


def test_the_default_is_the_throughput_that_was_measured():
    """On one H200, with a step that was timed beside its reference."""
    file = Path(__file__).parents[2] / "docs" / "results" / "speed" / "gpt2-small.json"
    (cell,) = [row for row in json.loads(file.read_text())["cells"] if row["cell"] == "gpt2-small R=3"]
    hours = 49.152e9 / cell["tokens_per_s"] / 3600
    assert budget.cost(gpt2_small()).gpu_hours() == pytest.approx(hours, rel=0.02)


def test_reasoners_have_a_cost_too(tmp_path):
    """By the boards that the recipe expects, or those that lie there."""
    config = hrm_sudoku4()
    shape = PuzzleShape(vocabulary=6, length=16, puzzle_ids=1)
    flops = 2_000 * 128 * flops_per_segment(config.model, shape, forward_again=True)
    assert budget.cost(config).gpu_hours(0.5) == pytest.approx(flops / (0.5 * 989e12) / 3600)
    assert budget.cost(config).tokens == 2_000 * 128 * 16
    once = replace(config, halting=replace(config.halting, segments=1))
    flops = 2_000 * 128 * flops_per_segment(config.model, shape, forward_again=False)
    assert budget.cost(once).gpu_hours(0.5) == pytest.approx(flops / (0.5 * 989e12) / 3600)
    elsewhere = replace(config, data=replace(config.data, path=tmp_path / "mine"))
    assert budget.cost(elsewhere) is None
    prepare_puzzles.run(prepare_puzzles.PrepareSudoku(out=tmp_path / "mine", size=4, train=20, test=4))
    assert budget.cost(elsewhere) == budget.cost(config)


def test_the_p_sweep_has_the_six_hours_of_its_text(capsys):
    """90 minutes on four GPUs for each of 7 exponents × 5 seeds."""
    assert main(["sweep", "p-sweep", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[-1] for line in lines[2:37]} == {"6"}
    assert lines[37].split()[-1] == "210"


def test_table1_beside_the_paper(capsys):
    assert main(["sweep", "table1", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[2:18]]
    assert [row[0] for row in rows] == [cell.name for cell in named_grid("table1", "paper").cells()]
    assert {row[1] for row in rows} == {"49,152,000,000"}
    assert [int(row[4]) for row in rows] == [37, 90, 145, 200] * 2 + [95, 260, 420, 620] * 2
    assert lines[18].split() == ["16", "cells", "786,432,000,000", "2,615", "3,734"]
    shared = "steps 100,000, batch 480, peak rate 0.001, warm-up 2,000, unigram bias off"
    assert lines[20] == f"every cell: {shared}."
    assert "45% of one H200's 989 TFLOP/s" in lines[21]


def test_half_the_utilization_is_twice_the_hours(capsys):
    assert main(["sweep", "table1", "--dry-run", "--utilization", "0.20"]) == 0
    assert capsys.readouterr().out.splitlines()[18].split()[-2:] == ["5,885", "3,734"]


def test_other_scales_have_no_hours_of_the_papers(capsys):
    assert main(["sweep", "table1", "--scale", "gpu", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[18].split()[-1] == "–"


def test_a_sweep_for_a_laptop_is_told_in_flops(capsys):
    """One ten-thousandth of a GPU-hour tells nobody anything."""
    assert main(["sweep", "escape", "--scale", "laptop", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "cell warm-up unigram bias tokens GFLOP a token TFLOP"
    assert [line.split()[1:3] for line in (lines[2], lines[61])] == [["100", "off"], ["50", "on"]]
    costs = [budget.cost(cell.config()) for cell in named_grid("escape", "laptop").cells()]
    assert lines[2].split()[-1] == f"{costs[0].tokens * costs[0].flops_per_token / 1e12:.2g}"
    assert lines[62].split() == ["60", "cells", "9,216,000", f"{sum(c.flops for c in costs) / 1e12:.0f}"]
    assert "in all under 0.01 hours of one H200" in lines[65]


def test_where_the_cells_would_go_is_said(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "tiny"\n[axes]\nseed = [0]')
    for words, out in (
        (["table1"], "runs/sweeps/table1-paper"),
        ([str(file)], "runs/sweeps/mine-own"),
        ([str(file), "--out", "there"], "there"),
    ):
        assert main(["sweep", *words, "--dry-run", "--data", str(tmp_path / "none")]) == 0
        printed = capsys.readouterr()
        assert printed.out.splitlines()[-1] == f"cells  {out}"
        assert printed.err.startswith(f"data.path={tmp_path / 'none'}: no such folder; ")
        assert printed.err.count("\n") == 1


def test_an_iterated_task_is_counted_by_its_sequences_and_its_mean_rounds():
    config = get_recipe("hops")
    tokens = config.examples.tokens  # begin, 8 entries, 8 starts
    assert tokens == 17 < config.model.context
    expected = flops_per_token(replace(config.model, context=tokens), 2.5)
    assert budget.cost(config) == (config.optim.steps * config.optim.batch * tokens, expected)
