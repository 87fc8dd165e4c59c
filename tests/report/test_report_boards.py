"""The table of reasoners on boards: a row for each set of seeds, its numbers from their last validations."""

import csv
import json
from pathlib import Path

import pytest

from deeploop.commands.report import ReportArgs, run
from deeploop.report.boards import boards_table
from deeploop.report.page import MISSING
from deeploop.report.runs import find_runs

pytestmark = pytest.mark.usefixtures("undrawn")

MODEL = {"width": 64, "cycles": 2, "low_cycles": 2, "horizon": "last_call", "p": 0.0, "high_p": None}
OPTIM = {"steps": 100, "batch": 8, "peak_lr": 1e-3, "warmup_steps": 10}
RECORDED = Path(__file__).parents[2] / "docs" / "results" / "sudoku6"


def write_reasoner(
    folder, exact, *, seed=0, cells=0.9, step=100, task="hrm", puzzles="a" * 64, ids=1, model=None, **optim
):  # fmt: skip
    folder.mkdir(parents=True)
    config = {
        "seed": seed,
        "model": MODEL | (model or {}),
        "data": {"path": "data/sudoku4", "test_examples": 500, "validate_every": 50},
        "optim": OPTIM | optim,
        "halting": {"segments": 8},
    }
    shape = {"vocabulary": 6, "length": 16, "puzzle_ids": ids}
    stamp = {"format": 1, "task": task, "puzzles": puzzles, "shape": shape}
    lines = [{"kind": "validation", "step": 0, "loss": 2.0, "exact": 0.0, "cells": 0.1}]
    lines.append({"kind": "validation", "step": step, "loss": 0.1, "exact": exact, "cells": cells})
    for name, value in (("config.json", config), ("run.json", stamp)):
        (folder / name).write_text(json.dumps(value))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def table_of(folder):
    table = boards_table(find_runs([folder]))
    return [dict(zip(table.header, row, strict=True)) | {"row": row} for row in table.rows]


def test_a_row_is_the_mean_and_spread_of_its_seeds(tmp_path):
    for seed, (exact, cells) in enumerate([(0.80, 0.95), (0.86, 0.97)]):
        write_reasoner(tmp_path / f"s{seed}", exact, cells=cells, seed=seed)
    write_reasoner(tmp_path / "s2", 0.1, seed=2, step=50)  # half way
    (row,) = boards_table(find_runs([tmp_path])).rows
    assert row == [
        *("sudoku4", "2", "last_call", "100", "Vanilla HRM", "2", "1"),
        *("83.0", "4.2", "80.0", "86.0", "96.0", "1.4", MISSING, "s0 s1 s2"),
    ]


def test_a_lone_or_unfinished_seed_has_no_spread(tmp_path):
    write_reasoner(tmp_path / "alone", 0.5)
    write_reasoner(tmp_path / "half", 0.5, step=50, model={"low_cycles": 8})
    alone, half = (row["row"][5:13] for row in table_of(tmp_path))
    assert alone == ["1", "0", "50.0", MISSING, "50.0", "50.0", "90.0", MISSING]
    assert half == ["0", "1", *[MISSING] * 6]


def test_a_seed_that_was_run_twice_is_not_two_seeds(tmp_path):
    for name, step in (("first", 100), ("again", 100), ("half", 50)):
        write_reasoner(tmp_path / name, 0.5, step=step)
    (row,) = table_of(tmp_path)
    assert (row["seeds"], row["unfinished"]) == ("2 runs of 1 seed", "1")


def test_methods_stand_below_each_other_in_each_schedule(tmp_path):
    for horizon in ("last_call", "last_cycle"):
        for p, high_p in ((0.5, None), (0.0, None), (0.25, 0.5)):
            model = {"horizon": horizon, "p": p, "high_p": high_p}
            write_reasoner(tmp_path / f"{horizon}-{p}", 0.5, model=model)
    write_reasoner(tmp_path / "trm", 0.5, task="trm")
    found = [(row["horizon"], row["method"]) for row in table_of(tmp_path)]
    hrm = ["Vanilla HRM", "HRM, DeepLoop p=1/2", "HRM DeepNorm p=0.25, H DeepLoop p=0.5"]
    call, cycle = ([(horizon, name) for name in hrm] for horizon in ("last_call", "last_cycle"))
    assert found == [call[0], ("last_call", "Vanilla TRM"), *call[1:], *cycle]


def test_the_flat_rule_is_a_method_and_configs_from_before_it_fit_in(tmp_path):
    write_reasoner(tmp_path / "old", 0.2)
    for seed, flat in ((1, {}), (2, {"flat": True}), (3, {"flat": True, "flat_gain": 0.5})):
        model = {"flat": False, "flat_gain": 1.0} | flat
        write_reasoner(tmp_path / f"s{seed}", 0.2, seed=seed, model=model)
    found = {row["method"]: (row["seeds"], row["other settings"]) for row in table_of(tmp_path)}
    assert found == {"Vanilla HRM": ("2", "–"), "HRM flat": ("1", "–"), "HRM flat λ=0.5": ("1", "–")}


def test_runs_that_differ_elsewhere_are_not_averaged(tmp_path):
    write_reasoner(tmp_path / "a", 0.2)
    write_reasoner(tmp_path / "b", 0.6, seed=1, peak_lr=2e-3)
    write_reasoner(tmp_path / "c", 0.8, seed=2, peak_lr=2e-3, puzzles="b" * 64)
    found = {row["other settings"]: row["exact, %"] for row in table_of(tmp_path)}
    assert found == {
        "peak_lr 0.001, puzzles aaaaaaaaaaaa": "20.0",
        "peak_lr 0.002, puzzles aaaaaaaaaaaa": "60.0",
        "peak_lr 0.002, puzzles bbbbbbbbbbbb": "80.0",
    }


def test_arc_and_language_models_are_not_in_it(tmp_path):
    write_reasoner(tmp_path / "arc", 0.5, ids=2001)
    write_reasoner(tmp_path / "gpt", 0.5, task="language")
    assert boards_table(find_runs([tmp_path])) is None


@pytest.mark.parametrize("damage", [{"shape": 3}, {"shape": {"puzzle_ids": None}}, {"puzzles": None}])
def test_a_damaged_stamp_does_not_spoil_it(tmp_path, damage):
    write_reasoner(tmp_path / "whole", 0.5)
    stamp = json.loads((tmp_path / "whole" / "run.json").read_text()) | damage
    (write_reasoner(tmp_path / "damaged", 0.5) / "run.json").write_text(json.dumps(stamp))
    assert "whole" in [row["runs' names"] for row in table_of(tmp_path)]


def test_the_recorded_runs_give_the_numbers_beside_them(tmp_path):
    """docs/results/sudoku6/README.md: 84.2% and 82.6% of vanilla HRM at C_L = 2 and the last call."""
    run(ReportArgs((RECORDED,), tmp_path))
    with (tmp_path / "tables" / "boards.csv").open(newline="", encoding="utf-8") as file:
        _, first, *_ = csv.reader(file)
    assert first[:5] == ["sudoku6", "2", "last_call", "2400", "Vanilla HRM"]
    assert first[5:11] == ["2", "0", "83.4", "1.1", "82.6", "84.2"]
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "Reasoners on Sudoku and mazes" in text
        assert "83.4" in text
        assert "Where these runs differ" not in text  # of language models alone
