"""Iterated tasks in a report: who goes on beyond the trained steps, counted over seeds."""

import json
from dataclasses import replace

import pytest

from deeploop.config.json import to_dict
from deeploop.report.beyond import beyond_parts
from deeploop.report.document import make_sections
from deeploop.report.groups import Histories
from deeploop.report.listing import text
from deeploop.report.runs import find_runs
from iterate_runs import make_iterate_config


def write_iterated(folder, block, seed, far, noise=0.0):
    """A finished run that is right inside its 3 trained steps from step 4 on, and `far` right at 9."""
    base = make_iterate_config(folder, model={"rule": block}, rounds={"noise": noise})
    config = replace(base, seed=seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "run.json").write_text(json.dumps({"format": 1, "task": "iterate", "written": "2026-01-01"}))
    lines = [
        {"kind": "validation", "step": step, "loss": 0.1, "cells": 1.0, "exact": float(step >= 4),
         "beyond": 1 - far, "steps": [1, 3, 9], "cells_by_steps": [1.0, 1.0, far]}
        for step in (0, 4, 8)
    ]  # fmt: skip
    lines.insert(-1, {"kind": "train", "step": 8, "loss": 0.1, "tokens": 8, "seconds": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "weights-dropped").touch()


@pytest.fixture
def runs(tmp_path):
    for seed, far in enumerate((1.0, 0.6)):
        write_iterated(tmp_path / f"flat-{seed}", "flat", seed, far, noise=0.3)
        write_iterated(tmp_path / f"prenorm-{seed}", "prenorm", seed, 0.5)
    return find_runs([tmp_path])


def test_runs_that_extrapolate_are_counted_over_seeds_the_furthest_first(runs):
    table, chart = beyond_parts(runs, Histories())
    assert table.title.endswith(": automaton of rule 86, length 10, trained on 1 to 3 steps")
    assert table.header == [
        "rule",
        "seeds",
        "extrapolates",
        "learned at step",
        *(f"{h} steps" for h in (1, 3, 9)),
    ]
    flat, prenorm = "flat · noise 0.3", "pre-norm · noise 0"
    whole = "1.000 ± 0.000"
    assert table.rows == [
        [flat, "2", "1/2", "4", whole, whole, "0.800 ± 0.283"],
        [prenorm, "2", "0/2", "4", whole, whole, "0.500 ± 0.000"],
    ]
    (panel,) = chart.panels
    assert [line.label for line in panel.lines] == [flat, prenorm]
    assert [*panel.lines[0].y] == [1.0, 1.0, 0.8]


def test_the_report_has_a_section_only_where_there_are_such_runs(runs):
    titles = [section.title for section in make_sections(runs, Histories())]
    assert "Deeper than trained" in titles
    assert "Deeper than trained" not in [section.title for section in make_sections([], Histories())]


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("metrics.jsonl", "cells_by_steps", {"a": 1}),
        ("metrics.jsonl", "cells_by_steps", [1.0]),
        ("metrics.jsonl", "steps", [1, 3, "x"]),
        ("metrics.jsonl", "beyond", [1]),
        ("config.json", "data", "x"),
    ],
)
def test_a_damaged_run_is_left_out(tmp_path, file, field, value):
    for name in ("whole", "damaged"):
        write_iterated(tmp_path / name, "flat", 0, 1.0)
    path = tmp_path / "damaged" / file
    *others, last = path.read_text().splitlines()
    path.write_text("\n".join([*others, json.dumps(json.loads(last) | {field: value})]))
    runs = find_runs([tmp_path])
    assert "whole" in text(runs, None)
    table, _ = beyond_parts(runs, Histories())
    assert [row[:3] for row in table.rows] == [["flat", "1", "1/1"]]
    make_sections(runs, Histories())
