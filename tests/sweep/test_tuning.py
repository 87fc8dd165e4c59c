"""The best trial of a search, and the cells that take it."""

import json

import pytest

from deeploop.sweep.grid import named_grid
from deeploop.sweep.tuning import tuned
from run_folders import write_run, write_sweep

RATES = {"slow": 1e-4, "good": 1e-3, "fast": 1e-2}
LOSSES = {("prenorm", "slow"): 2.4, ("prenorm", "good"): 2.2, ("prenorm", "fast"): 2.1}
LOSSES |= {("deeploop", "slow"): 2.3, ("deeploop", "good"): 2.0, ("deeploop", "fast"): 3.1}


def search(folder, rules=("prenorm", "deeploop"), unfinished=(), error=""):
    names = {f"{rule}-{trial}": (rule, trial) for rule, trial in LOSSES if rule in rules}
    write_sweep(folder, {name: {"rule": rule, "trial": trial} for name, (rule, trial) in names.items()})
    record = json.loads((folder / "sweep.json").read_text())
    for name, (rule, trial) in names.items():
        cell = record["cells"][name]
        cell["settings"] = {"optim.steps": 40, "model.context": 64, "optim.peak_lr": RATES[trial]}
        if rule == "prenorm":
            cell["settings"]["model.rule"] = "prenorm"
        write_run(folder / name, loss=LOSSES[rule, trial], step=36 if name in unfinished else 40)
        (folder / f"{name}.log").write_text(error if name in unfinished else "")
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder


def cells(*rules):
    return [cell for cell in named_grid("rules", "laptop").cells() if cell.axes["rule"] in rules]


def test_each_rule_takes_its_own_best_trial_and_nothing_else(tmp_path):
    found = tuned(cells("prenorm", "deeploop"), search(tmp_path), {})
    rates = {(cell.axes["rule"], cell.config().optim.peak_lr) for cell in found}
    assert rates == {("prenorm", 1e-2), ("deeploop", 1e-3)}
    assert {cell.config().optim.steps for cell in found} == {600}
    assert len(found) == 2 * 4 * 2


@pytest.mark.parametrize(
    ("rules", "unfinished", "message"),
    [
        (("prenorm",), (), "has 0 searches for the cell deeploop-rounds1-seed0"),
        (("prenorm", "deeploop"), ("deeploop-good",), "its cell deeploop-good is started, not finished"),
    ],
)
def test_a_search_that_does_not_fit(tmp_path, rules, unfinished, message):
    with pytest.raises(ValueError, match=message):
        tuned(cells("deeploop"), search(tmp_path, rules, unfinished), {})


def test_a_trial_that_broke_off_has_lost_and_one_that_nobody_needs_may_go_on(tmp_path):
    error = "deeploop train: error: step 37: loss nan\n"
    folder = search(tmp_path / "broken", unfinished=["deeploop-good"], error=error)
    assert {cell.config().optim.peak_lr for cell in tuned(cells("deeploop"), folder, {})} == {1e-4}
    broken = [f"deeploop-{trial}" for trial in RATES]
    folder = search(tmp_path / "all broken", unfinished=broken, error=error)
    with pytest.raises(ValueError, match=r"none of deeploop-slow, .* came to its end"):
        tuned(cells("deeploop"), folder, {})
    folder = search(tmp_path / "going on", unfinished=["deeploop-good"])
    assert {cell.config().optim.peak_lr for cell in tuned(cells("prenorm"), folder, {})} == {1e-2}


def test_the_worst_of_several_seeds_decides(tmp_path):
    """The best single run stands at a cliff: the other seed of its trial came out worst."""
    losses = {("cliff", 0): 1.9, ("cliff", 1): 2.9, ("safe", 0): 2.2, ("safe", 1): 2.1}
    names = {f"deeploop-{trial}-seed{seed}": (trial, seed) for trial, seed in losses}
    axes = {name: {"rule": "deeploop", "trial": t, "seed": s} for name, (t, s) in names.items()}
    write_sweep(tmp_path, axes)
    record = json.loads((tmp_path / "sweep.json").read_text())
    for name, (trial, seed) in names.items():
        rate = {"cliff": 4e-3, "safe": 1e-3}[trial]
        record["cells"][name]["settings"] = {"optim.peak_lr": rate, "seed": seed}
        write_run(tmp_path / name, loss=losses[trial, seed], seed=seed)
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    found = tuned(cells("deeploop"), tmp_path, {})
    assert {cell.config().optim.peak_lr for cell in found} == {1e-3}
    assert {cell.config().seed for cell in found} == {0, 1}  # the cells' own, not the search's


def test_the_search_of_the_paper_grids_has_two_seeds_that_its_rules_do_not_train():
    search, rules = ({cell.config().seed for cell in named_grid(name, "laptop").cells()} for name in
                     ("rules-search", "rules"))  # fmt: skip
    assert (len(search), search & rules) == (2, set())


def test_what_the_command_line_sets_stays(tmp_path):
    overrides = {"optim.peak_lr": 7e-4}
    assert {cell.config().optim.peak_lr for cell in tuned(cells("prenorm"), search(tmp_path), overrides)} == {
        7e-4
    }


@pytest.mark.parametrize("text", [None, "{", "[]", '{"cells": [1]}', '{"cells": {"a": {}}}'])
def test_a_folder_without_a_sweep(tmp_path, text):
    if text is not None:
        (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match="holds no sweep that can be read"):
        tuned([], tmp_path, {})


def test_a_sweep_that_is_no_search(tmp_path):
    write_sweep(tmp_path, {"a": {"seed": 0}})
    with pytest.raises(ValueError, match="no axis trial"):
        tuned([], tmp_path, {})
