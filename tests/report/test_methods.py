"""Rules beside the paper's, and cures of the collapse, have rows of their own in one set-up."""

import json

from deeploop.report import results
from deeploop.report.beside_paper import p_sweeps
from deeploop.report.groups import along, cells, labels, method, setups
from deeploop.report.losses import depths_table
from deeploop.report.runs import differing, find_runs, read_run
from run_folders import write_run, write_sweep


def test_every_rule_has_a_row(tmp_path):
    cases = {
        "pre-norm": {"rule": "prenorm"},
        "averaged": {"rule": "averaged"},
        "factored": {"rule": "factored"},
        "factored λ=2": {"rule": "factored:gain=2"},
        "DeepLoop p=0.5": {},
        "flat": {"rule": "flat"},
        "flat λ=0.5 + unigram bias": {"rule": "flat:gain=0.5", "model": {"unigram_bias": True}},
        "DeepLoop p=0.5, α flat": {"rule": "deeploop:alpha=flat"},
        "DeepNorm p=0.25, no β": {"rule": "deepnorm:beta=off"},
        "DeepLoop p=0.5, no outer gain": {"rule": "deeploop:outer_gain=off"},
        "DeepLoop, α flat λ=2, no β": {"rule": "deeploop:alpha=flat,beta=off,gain=2"},
        "DeepLoop p=0.5 + unigram bias": {"model": {"unigram_bias": True}},
        "DeepLoop p=0.5 + Muon": {"kind": "muon"},
        "DeepLoop p=0.5 + lion": {"kind": "lion"},  # no optimizer of ours: the next one has a row too
        "flat + add + rounds uniform + gradient through 2": {
            "rule": "flat",
            "model": {"injection": "add"},
            "draws": {"sample": "uniform", "backprop": 2},
        },
        "flat + gated + from zeros + ramp sqrt + exit gate": {
            "rule": "flat",
            "draws": {"sample": "fixed", "ramp": "sqrt"},
            "model": {"injection": "gated", "first_state": "zeros", "exit_gate": True, "prelude": 0},
        },
    }
    for index, (name, fields) in enumerate(cases.items()):
        assert method(read_run(write_run(tmp_path / str(index), **fields))) == name
    (setup,) = setups(find_runs([tmp_path]))
    assert set(setup.rows) == set(cases)


def test_low_precision_is_another_set_up_and_told_apart(tmp_path):
    devices = [{"precision": "auto"}, {"precision": "bf16"}, {"precision": "fp8"}, {"stream": "bf16"}]
    for index, device in enumerate(devices):
        folder = write_run(tmp_path / str(index))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"device": device}))
    runs = find_runs([tmp_path])
    assert sorted(len(setup.runs) for setup in setups(runs)) == [1, 1, 2]
    assert differing(runs) == ["device.low_precision"]
    assert differing(runs[:2]) == []  # what a device has is no difference


def test_all_parts_of_the_flat_rule_are_the_flat_rule(tmp_path):
    parts = "deeploop:alpha=flat,beta=off,outer_gain=off"
    whole = write_run(tmp_path / "whole", rule=parts)
    bare = write_run(tmp_path / "bare", rule=f"{parts},inner_norm=off")
    assert method(read_run(whole)) == "flat"
    assert method(read_run(bare)) == "flat, no inner norm"


def test_a_p_sweep_holds_the_papers_block_alone(tmp_path):
    for p in (0.25, 0.5, 0.75):
        write_run(tmp_path / f"paper{p}", rule=f"deeploop:p={p}")
        write_run(tmp_path / f"bare{p}", rule=f"deeploop:p={p},outer_gain=off")
    (setup,) = setups(find_runs([tmp_path]))
    assert {len(runs) for runs in p_sweeps(setup).values()} == {3}


def test_removed_cures_of_the_collapse_are_settings(tmp_path):
    """Options of 0.2.0 that were removed: runs with them have rows of their own, named by the field."""
    for branch_lr in (1.0, 0.1):
        write_run(tmp_path / f"{branch_lr}", branch_lr=branch_lr)
    (setup,) = setups(find_runs([tmp_path]))
    assert [*setup.rows] == ["DeepLoop p=0.5 · branch_lr 0.1", "DeepLoop p=0.5"]


def test_a_run_of_before_muon_is_one_of_adamw(tmp_path):
    write_run(tmp_path / "before")
    write_run(tmp_path / "after", kind="adamw", seed=1)
    (setup,) = setups(find_runs([tmp_path]))
    assert [*setup.rows] == ["DeepLoop p=0.5"]


def test_a_p_sweep_with_the_bias_is_not_mixed_with_one_without(tmp_path):
    for p in (0.25, 0.5, 0.75):
        write_run(tmp_path / f"paper{p}", rule=f"deeploop:p={p}")
        write_run(tmp_path / f"stable{p}", rule=f"deeploop:p={p}", model={"unigram_bias": True})
    (setup,) = setups(find_runs([tmp_path]))
    sweeps = p_sweeps(setup)
    assert set(sweeps) == {"R=3, 1.0e-04 per step", "R=3, 1.0e-04 per step + unigram bias"}
    assert {len(runs) for runs in sweeps.values()} == {3}


def test_prelude_and_coda_make_another_set_up(tmp_path):
    write_run(tmp_path / "plain")
    write_run(tmp_path / "parts", model={"prelude": 1, "coda": 2})
    labels = [setup.label for setup in setups(find_runs([tmp_path]))]
    assert sorted("prelude 1, coda 2" in label for label in labels) == [False, True]


def test_losses_at_other_rounds_have_a_table(tmp_path):
    cells = {
        f"{name}-seed{seed}": {"cell": name, "seed": seed} for name in ("base", "fixed") for seed in (0, 1)
    }
    write_sweep(tmp_path, cells)
    for name, axes in cells.items():
        drawn = {"sample": "uniform"} if axes["cell"] == "base" else None
        by_rounds = {1: 3.0 + axes["seed"], 4: 2.0} | ({16: None} if drawn else {})
        write_run(tmp_path / name, seed=axes["seed"], draws=drawn, by_rounds=by_rounds)
    other = write_run(tmp_path / "other")
    losses = ("validation.json", {3: 2.5}, False), ("depth.json", {1: 4.0, 4: 2.0}, False)
    for file, own, recompute in (*losses, ("depth.json", {1: 3.0}, True)):
        found = {"checkpoint": "step-00000300", "data": "corpus", "sequences": 64}
        found |= {"trained_rounds": 3, "recompute_alpha": recompute, "asked": {"rounds": [*own]}}
        found["rounds"] = [{"rounds": R, "loss": loss} for R, loss in own.items()]
        results.add(other, found, ("recompute_alpha",), file)
        if file == "validation.json":  # the trained R alone
            assert depths_table(find_runs([other])) is None
    table = depths_table(find_runs([tmp_path, other]))
    assert table.header == ["run", "method", "nats per", "measured by", "seeds", "R=1", "R=3", "R=4"]
    assert "`" not in table.note  # plain text: Markdown would show them escaped
    read = "validate: step-00000300, 64 sequences of corpus"
    base, fixed = "DeepLoop p=0.5 + rounds uniform", "DeepLoop p=0.5"
    assert table.rows == [
        ["base", base, "GPT-2 token", "training", "2", "3.5000 ± 0.7071", "–", "2.0000 ± 0.0000"],
        ["fixed", fixed, "GPT-2 token", "training", "2", "3.5000 ± 0.7071", "–", "2.0000 ± 0.0000"],
        ["other", fixed, "GPT-2 token", read, "1", "4.0000", "2.5000", "2.0000"],
        ["other", fixed, "GPT-2 token", f"{read}, α of each R", "1", "3.0000", "–", "–"],
    ]


def test_cells_along_a_field_have_several_values_of_it(tmp_path):
    for rule, rounds in (("flat", 1), ("flat", 3), ("prenorm", 3)):
        write_run(tmp_path / f"{rule}-{rounds}", rule=rule, rounds=rounds)
    write_run(tmp_path / "other", rule="flat", rounds=3, peak_lr=4e-3)
    found = along(cells(find_runs([tmp_path])), "model.rounds")
    assert {name: [cell.first.name for cell in own] for name, own in found.items()} == {
        "flat": ["flat-1", "flat-3"]
    }


def test_what_all_runs_have_is_in_no_label(tmp_path):
    for rule in ("flat", "prenorm"):
        write_run(tmp_path / rule, rule=rule, model={"unigram_bias": True})
    write_run(tmp_path / "muon", rule="flat", kind="muon", model={"unigram_bias": True})
    found = cells(find_runs([tmp_path]))
    assert labels(found) == ["flat", "flat + Muon", "pre-norm"]
    assert labels(found[:1]) == ["flat + unigram bias"]
