"""Means over seeds of reasoners on boards: a row for each set of seeds, from their last validations."""

import csv
import json
from pathlib import Path

import pytest

from deeploop.commands.report import ReportArgs, run
from deeploop.report.groups import Histories, cells
from deeploop.report.means import seeds_table
from deeploop.report.runs import find_runs
from deeploop.report.tables import MISSING

pytestmark = pytest.mark.usefixtures("undrawn")

MODEL = {
    "width": 64,
    "cycles": 2,
    "low_cycles": 2,
    "horizon": "last_call",
    "rule": "postnorm",
    "high_rule": "",
}
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
    table = seeds_table(cells(find_runs([folder])), Histories(), "seeds", "")
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_a_row_is_the_mean_and_spread_of_its_seeds(tmp_path):
    for seed, (exact, share) in enumerate([(0.80, 0.95), (0.86, 0.97)]):
        write_reasoner(tmp_path / f"s{seed}", exact, cells=share, seed=seed)
    write_reasoner(tmp_path / "s2", 0.1, seed=2, step=50)  # half way
    (row,) = table_of(tmp_path)
    assert row == {
        "method": "Vanilla HRM",
        "seeds": "3",
        "unfinished": "1",
        "loss, nats/cell": "0.1000 ± 0.0000",
        "solved, %": "83.0 ± 4.2",
        "cells, %": "96.0 ± 1.4",
    }


def test_a_lone_or_unfinished_seed_has_no_spread(tmp_path):
    write_reasoner(tmp_path / "alone", 0.5)
    write_reasoner(tmp_path / "half", 0.5, step=50, model={"low_cycles": 8})
    alone, half = table_of(tmp_path)
    assert (alone["low_cycles"], alone["solved, %"], alone["cells, %"]) == ("2", "50.0", "90.0")
    assert (half["low_cycles"], half["solved, %"], half["unfinished"]) == ("8", MISSING, "1")


def test_a_seed_that_was_run_twice_is_not_two_seeds(tmp_path):
    for name, step in (("first", 100), ("again", 100), ("half", 50)):
        write_reasoner(tmp_path / name, 0.5, step=step)
    (row,) = table_of(tmp_path)
    assert (row["seeds"], row["unfinished"]) == ("3 runs of 1 seed", "1")


def test_schedules_are_columns_and_methods_are_named(tmp_path):
    for horizon in ("last_call", "last_cycle"):
        for rule, high in (("deeploop", ""), ("postnorm", ""), ("deepnorm", "deeploop")):
            model = {"horizon": horizon, "rule": rule, "high_rule": high}
            write_reasoner(tmp_path / f"{horizon}-{rule}", 0.5, model=model)
    write_reasoner(tmp_path / "trm", 0.5, task="trm")
    found = {(row["horizon"], row["method"]) for row in table_of(tmp_path)}
    hrm = ["Vanilla HRM", "HRM DeepNorm p=0.25, H DeepLoop p=0.5", "HRM DeepLoop p=0.5"]
    schedules = {(horizon, name) for horizon in ("last_call", "last_cycle") for name in hrm}
    assert found == schedules | {("last_call", "Vanilla TRM")}


def test_the_flat_rule_is_a_method_and_configs_of_0_2_0_fit_in(tmp_path):
    old = {name: value for name, value in MODEL.items() if name not in ("rule", "high_rule")}
    folder = write_reasoner(tmp_path / "old", 0.2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model": {**old, "p": 0.0, "high_p": None}}))
    for seed, rule in ((1, "postnorm"), (2, "flat"), (3, "flat:gain=0.5")):
        write_reasoner(tmp_path / f"s{seed}", 0.2, seed=seed, model={"rule": rule})
    found = {row["method"]: row["seeds"] for row in table_of(tmp_path)}
    assert found["HRM flat"] == found["HRM flat λ=0.5"] == "1"
    assert found["Vanilla HRM"] == "2"


def test_runs_that_differ_elsewhere_are_not_averaged(tmp_path):
    write_reasoner(tmp_path / "a", 0.2)
    write_reasoner(tmp_path / "b", 0.6, seed=1, peak_lr=2e-3)
    write_reasoner(tmp_path / "c", 0.8, seed=2, peak_lr=2e-3, puzzles="b" * 64)
    found = {(row["peak_lr"], row["puzzles"]): row["solved, %"] for row in table_of(tmp_path)}
    assert found == {
        ("0.001", "a" * 12): "20.0",
        ("0.002", "a" * 12): "60.0",
        ("0.002", "b" * 12): "80.0",
    }


@pytest.mark.parametrize("damage", [{"shape": 3}, {"shape": {"puzzle_ids": None}}, {"puzzles": None}])
def test_a_damaged_stamp_does_not_spoil_it(tmp_path, damage):
    write_reasoner(tmp_path / "whole", 0.25)
    stamp = json.loads((tmp_path / "whole" / "run.json").read_text()) | damage
    (write_reasoner(tmp_path / "damaged", 0.5) / "run.json").write_text(json.dumps(stamp))
    assert {row["solved, %"][:4] for row in table_of(tmp_path)} & {"25.0", "37.5"}


def test_the_recorded_runs_give_the_numbers_beside_them(tmp_path):
    """docs/results/sudoku6/README.md: 84.2% and 82.6% of vanilla HRM at C_L = 2 and the last call."""
    run(ReportArgs((RECORDED,), tmp_path))
    with (tmp_path / "tables" / "seeds.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    (row,) = [
        row
        for row in found
        if (row["method"], row["low_cycles"], row["horizon"]) == ("Vanilla HRM", "2", "last_call")
    ]
    assert (row["seeds"], row["solved, %"]) == ("2", "83.4 ± 1.1")
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "Means over seeds: reasoners" in text
        assert "83.4" in text
        assert "Beside the paper" not in text  # it has language models and ARC
