"""`deeploop runs` finds runs and sweeps, tells their state, fits the terminal, reads files from the end."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from deeploop.cli import main
from deeploop.commands.runs import RunsArgs, run
from deeploop.config import old_names
from deeploop.config.json import flatten, to_dict
from deeploop.report.runs import DEFINING, differing, find_runs, read_history, read_run
from deeploop.runs import sweeps
from deeploop.runs.packed import opened
from deeploop.tasks.language.config import TrainConfig
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics, stream_back
from run_folders import write_run, write_sweep

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def listed(*folders, **more):
    return json.loads(run(RunsArgs(folders, json=True, **more)))


def test_a_real_run(tiny_config):
    config = tiny_config("real")
    result = train(config)
    (found,) = listed(config.out)
    assert (found["step"], found["steps"], found["state"]) == (6, 6, "finished")
    assert found["loss"] == result["loss"]
    assert found["gpu_hours"] is None  # it ran on a CPU
    assert json.loads((config.out / "run.json").read_text())["ranks"] == 1


@pytest.mark.parametrize(
    ("changes", "log", "state"),
    [
        ({}, None, "finished"),
        ({"step": 20}, None, "started"),
        ({"step": 20}, "deeploop train: error: no space left\n", "failed"),
        ({"step": 20}, "deeploop train: error: once\nstep 4 validation\n", "started"),
        ({"step": 20, "guard": True, "loss": 3.1, "similarity": 1.0}, None, "collapsed"),
        ({"step": 8, "guard": True, "loss": 3.1, "similarity": 1.0}, None, "started"),  # in warm-up
        ({"step": 20, "guard": False, "loss": 3.1, "similarity": 1.0}, None, "started"),
    ],
)
def test_states(tmp_path, changes, log, state):
    folder = write_run(tmp_path / "cell", **changes)
    if log:
        (tmp_path / "cell.log").write_text(log)
    assert read_run(folder).state == state


def test_a_stopped_run_is_listed_with_its_step(tmp_path):
    ended = {"how": "stopped", "step": 23}
    write_run(tmp_path / "run", step=20, stamp={"ended": ended})
    (found,) = listed(tmp_path)
    assert (found["state"], found["step"]) == ("stopped", 23)


def test_a_sweep_lists_what_is_missing(tmp_path):
    write_run(tmp_path / "sweep" / "p0.5", p=0.5)
    write_sweep(tmp_path / "sweep", {"p0.5": {"p": 0.5}, "p0.25": {"p": 0.25}}, compare_at=20)
    absent, there = find_runs([tmp_path / "sweep"])
    assert (absent.name, absent.state, absent.axes) == ("p0.25", "absent", {"p": 0.25})
    assert (there.state, there.compare_at) == ("finished", 20)
    assert "absent" in run(RunsArgs((tmp_path,)))


def test_damage_is_shown_not_fatal(tmp_path):
    write_run(tmp_path / "good")
    for name, text in (("config.json", "{"), ("run.json", "[]")):
        (write_run(tmp_path / name) / name).write_text(text)
    with (tmp_path / "good" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    states = {one["name"]: one["state"] for one in listed(tmp_path)}
    assert states == {"good": "finished", "config.json": "unreadable", "run.json": "unreadable"}


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("config.json", ("optim", "steps"), "x"),
        ("config.json", ("optim", "peak_lr"), None),
        ("config.json", ("model", "rule"), "half"),
        ("config.json", ("model", "rule"), 3),
        ("config.json", ("model", "vocabulary"), [[]]),
        ("config.json", ("data", "path"), 3),
        ("config.json", ("optim", "kind"), ["adamw"]),
        ("config.json", ("seed",), "0"),
        ("run.json", ("ranks",), "two"),
        ("run.json", ("written",), 5),
        ("run.json", ("command",), 5),
        ("metrics.jsonl", ("loss",), "x"),
    ],
)
def test_a_value_of_another_kind_is_damage(tmp_path, file, path, value):
    write_run(tmp_path / "good")
    place = write_run(tmp_path / "odd") / file
    *lines, last = place.read_text().splitlines()
    record = inner = json.loads(last)
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    place.write_text("\n".join([*lines, json.dumps(record)]))
    for sort in ("name", "loss", "started"):
        assert "unreadable" in run(RunsArgs((tmp_path,), sort=sort))
    assert {one["name"]: one["state"] for one in listed(tmp_path)} == {
        "good": "finished",
        "odd": "unreadable",
    }


def test_a_sweep_that_may_not_be_read_is_named(tmp_path, monkeypatch, capsys):
    folder, real = write_sweep(tmp_path / "sweep", {"cell": {}}), os.open

    def refuse(path, *flags, **options):
        if Path(path).name == "sweep.json":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *flags, **options)

    monkeypatch.setattr(os, "open", refuse)  # by mode: root may read every file
    assert main(["runs", str(folder)]) == 2
    assert capsys.readouterr().err == f"deeploop runs: error: {folder / 'sweep.json'}: Permission denied\n"


def test_a_field_is_compared_among_the_runs_that_have_it(tmp_path):
    """A reasoner has no context; that alone makes no column beside a language model."""
    write_run(tmp_path / "gpt")
    folder = write_run(tmp_path / "hrm", stamp={"task": "hrm"})
    config = json.loads((folder / "config.json").read_text())
    model = {"width": 16, "cycles": 2, "p": 0.5}
    (folder / "config.json").write_text(json.dumps(config | {"model": model}))
    last = {"kind": "validation", "step": 40, "loss": 1.0, "exact": 0.125}
    (folder / "metrics.jsonl").write_text(json.dumps(last))
    found = find_runs([tmp_path])
    assert differing(found) == ["model.width"]
    assert "12.5% exact" in run(RunsArgs((tmp_path,)))
    assert [one["exact"] for one in listed(tmp_path)] == [None, 0.125]
    del config["model"]["rule"]  # of before there was such a field: it has a default
    write_run(tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    assert differing(find_runs([tmp_path])) == ["model.width"]


def test_only_differing_settings_are_columns(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"r1-s{seed}", rounds=1, seed=seed)
        write_run(tmp_path / f"r12-s{seed}", rounds=12, seed=seed, peak_lr=2e-3)
    runs = find_runs([tmp_path])
    assert differing(runs) == ["model.rounds", "optim.peak_lr"]
    assert [one.name for one in runs] == ["r1-s0", "r1-s1", "r12-s0", "r12-s1"]  # 12 after 1, as numbers
    header = run(RunsArgs((tmp_path,))).splitlines()[0].split()
    assert header[:4] == ["run", "rounds", "peak_lr", "seed"]
    assert header[-1] == "started"


def test_sorting(tmp_path):
    for name, loss, seed in (("a", 2.5, 1), ("b", 1.5, 2), ("c", 2.0, 0)):
        write_run(tmp_path / name, loss=loss, seed=seed)
    write_sweep(tmp_path / "sweep", {"none": {}})
    assert [one["name"] for one in listed(tmp_path, sort="loss")] == ["b", "c", "a", "none"]
    assert [one["name"] for one in listed(tmp_path, sort="started")] == ["none", "c", "a", "b"]


@pytest.mark.parametrize("width", [200, 100, 60, 44])
def test_narrow_terminals(tmp_path, width):
    write_run(tmp_path / "a-rather-long-name-of-a-run-folder", rounds=1)
    write_run(tmp_path / "b", rounds=7)
    lines = run(RunsArgs((tmp_path,)), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "loss" in lines[0]
    said = " ".join(lines[4:])
    alike = "the same in all: seed 0, step 40/40, state finished, floor 3.000, verdict escaped"
    assert (alike in said) == (width < 120)
    assert ("not shown: " in said) == (width < 100)


def test_what_is_the_same_in_all_is_said_only_of_several_runs(tmp_path):
    write_run(tmp_path / "alone")
    assert "the same in all" not in run(RunsArgs((tmp_path,)), 40)


def test_losses_of_several_units_fit_too(tmp_path):
    for step, vocabulary in ((40, 257), (36, 50257), (32, 4096)):
        name = f"a-rather-long-name-of-a-run-folder-{step}"
        write_run(tmp_path / name, model={"vocabulary": vocabulary}, step=step)
    lines = run(RunsArgs((tmp_path,)), 80).splitlines()
    assert " ".join(lines[0].split()) == "run nats/GPT-2 token nats/byte nats/token bits/byte"
    assert max(map(len, lines)) <= 80


def test_the_verdict_outlasts_settings_and_whole_names(tmp_path):
    for rounds in (1, 7):
        name = f"a-rather-long-name-of-a-run-folder-{rounds}"
        write_run(tmp_path / name, rounds=rounds, peak_lr=rounds, loss=rounds / 2, step=40 - 4 * (rounds > 1))
    assert headings(tmp_path, 80, 64, 52, 40, 32) == {
        80: ["run", "rounds", "peak_lr", "step", "state", "loss", "verdict"],
        64: ["run", "step", "state", "loss", "verdict"],
        52: ["run", "step", "state", "loss"],
        40: ["run", "step", "loss"],
        32: ["run", "loss"],
    }


def test_a_state_stays_unless_it_is_the_same_in_all_and_the_rule_is_the_first_setting(tmp_path):
    write_run(tmp_path / "a", rounds=1, width=32)
    write_run(tmp_path / "b", rounds=7, rule="prenorm", model={"hidden": 96}, step=20)
    found = headings(tmp_path, 200, 48)
    assert found[200][:5] == ["run", "rule", "rounds", "hidden", "width"]
    assert found[48] == ["run", "rule", "rounds", "step", "state", "loss"]


def test_a_single_run_shows_its_main_settings(tmp_path):
    write_run(tmp_path / "a", rounds=3, width=32)
    found = headings(tmp_path, 200)[200]
    main = ["rule", "rounds", "blocks", "width", "peak_lr", "warmup_steps", "path"]
    assert found[: found.index("seed")] == ["run", *main]
    assert run(RunsArgs((tmp_path,)), 200).splitlines()[-1] == "loss: nats per GPT-2 token"


def headings(folder, *widths):
    return {width: run(RunsArgs((folder,)), width).splitlines()[0].split() for width in widths}


def test_each_kind_of_run_has_a_table_with_its_own_settings(tmp_path):
    for name, rounds in (("a", 1), ("b", 7)):
        write_run(tmp_path / name, rounds=rounds)
    for name, p in (("h", 0.25), ("t", 0.5)):
        write_run(tmp_path / name, model={"p": p}, stamp={"task": name + "rm"})
    for name, seed, task in (("o", 0, "custom"), ("p", 1, "custom"), ("z", 0, "later")):
        write_run(tmp_path / name, seed=seed, stamp={"task": task})
    assert [read_run(tmp_path / name).unit for name in "hto"] == ["cell", "cell", "target"]
    for name, task in (("s", "addition"), ("x", "sorting")):
        folder = write_run(tmp_path / name, stamp={"task": "iterate"})
        config = json.loads((folder / "config.json").read_text())
        config["data"]["task"] = task
        (folder / "config.json").write_text(json.dumps(config))
    found = {}
    for part in run(RunsArgs((tmp_path,)), 100).split("\n\n"):
        name, heading, *_ = part.splitlines()
        found[name] = heading.split()[:2]
        assert max(map(len, part.splitlines())) <= 100
        assert "loss" in heading  # one unit within a table
        assert "GPU-h" not in part  # all on CPUs
    assert found == {
        "language models": ["run", "rounds"],
        "reasoners": ["run", "rule"],
        "task later": ["run", "rule"],  # a single run
        "iterated tasks": ["run", "task"],
        "tasks of your own": ["run", "seed"],
    }
    write_sweep(tmp_path / "sweep", {"none": {}})
    assert "\n\nnot started, or unreadable\nrun" in run(RunsArgs((tmp_path,)))


def test_a_long_list_of_what_is_not_shown_is_cut(tmp_path):
    write_run(tmp_path / "a")
    write_run(
        tmp_path / "b", model={name: 1 for name in ("width", "heads", "hidden", "context", "blocks")}, clip=2,
        seed=1, loss=9.0, step=20,
    )  # fmt: skip
    *_, said = run(RunsArgs((tmp_path,)), 44).split("\nnot shown: ")
    assert re.match(r"(\S+, ){7}\w+ and \d more", " ".join(said.split()))


def test_gpu_hours_count_ranks(tmp_path):
    folder = write_run(tmp_path / "run", stamp={"ranks": 8, "device": "NVIDIA H200"})
    assert read_run(folder).gpu_hours == pytest.approx(8 * 36 / 3600)
    old = write_run(tmp_path / "old", mfu=0.3)  # before the stamp knew: a known GPU, one rank
    assert read_run(old).gpu_hours == pytest.approx(36 / 3600)


def test_names_tell_folders_apart_and_do_not_move_the_cursor(tmp_path):
    for parent in ("x", "y"):
        write_run(tmp_path / parent / "run")
    write_run(tmp_path / "e\x1b[2Jvil")
    assert {one["name"] for one in listed(tmp_path)} == {"x/run", "y/run", f"{tmp_path.name}/e\x1b[2Jvil"}
    assert "\x1b" not in run(RunsArgs((tmp_path,)))


def test_backwards_is_forwards_reversed(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n{"half": \n{"kind": "train", "step": 44, "loss": 1.0}')  # no newline at the end
    for block in (1, 7, 64, 1 << 16):
        assert [*stream_back(folder, block)] == read_metrics(folder)[::-1]


def test_many_lines(tmp_path):
    folder = write_run(tmp_path / "long")
    line = json.dumps({"kind": "train", "step": 30, "loss": 2.5, "tokens_per_s": 5.0, "seconds": 1.0}) + "\n"
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(line * 300_000 + text)
    start = time.process_time()
    assert listed(folder)[0]["loss"] == 2.0
    assert time.process_time() - start < 1  # the end is enough
    start = time.process_time()
    assert len(read_history(folder).curve) <= 800
    assert time.process_time() - start < 10


def test_mistakes(tmp_path, capsys):
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert main(["runs", str(tmp_path)]) == 2
    (tmp_path / "sweep.json").write_text("[]")
    assert main(["runs", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 3)[-1] for line in lines[:2]] == [
        "no such folder",
        "holds no run folder (run.json) and no sweep (sweep.json)",
    ]
    assert "sweep.json: not a sweep's" in lines[2]


def test_the_default_folder(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "mine" in capsys.readouterr().out
    assert RunsArgs().folders == (Path("runs"),)


def test_fields_that_an_older_config_leaves_out_have_their_defaults():
    fields = flatten(to_dict(TrainConfig()))
    folder = RESULTS / "rules" / next(iter(sweeps.read_sweep(RESULTS / "rules").cells))
    old, written = read_run(folder), json.loads((opened(folder) / "config.json").read_text())
    later = fields.keys() - old_names.fields(flatten(written), "language").keys()
    later = {name for name in later if name.startswith(DEFINING)}
    assert {"optim.kind", "rounds.sample", "data.mix"} <= later
    assert {name: old.fields[name] for name in later} == {name: fields[name] for name in later}


def test_lists_are_words_and_what_does_nothing_is_no_column(tmp_path):
    """The stage of a gate that a model does not have, the spread of rounds that are fixed."""
    changes = {
        "plain": {},
        "other": {"gate": {"stage": "gate-only"}, "rounds": {"spread": 0.9}},
        "mixed": {"data": {"mix": ["data/mine=0.7", "data/other=0.3"]}},
        "gated": {"model": {"exit_gate": True}, "gate": {"stage": "gate-only"}},
    }
    for name, change in changes.items():
        path = write_run(tmp_path / name) / "config.json"
        config = json.loads(path.read_text())
        for part, values in change.items():
            config.setdefault(part, {}).update(values)
        path.write_text(json.dumps(config))
    assert differing(find_runs([tmp_path])) == ["model.exit_gate", "data.mix"]
    assert " data/mine=0.7 data/other=0.3 " in run(RunsArgs((tmp_path,)))
    path = write_run(tmp_path / "joint") / "config.json"
    config["gate"]["stage"] = "joint"
    path.write_text(json.dumps(config))
    lines = {line.split()[0]: line for line in run(RunsArgs((tmp_path,))).splitlines() if line}
    assert "gate-only" in lines["gated"]
    assert "gate-only" not in lines["other"]


def test_runs_that_were_cut_off_are_named_with_the_command_that_continues_them(tmp_path):
    write_run(tmp_path / "whole")
    write_run(tmp_path / "without-checkpoint", step=20)
    for name in ("a", "b c", "d", "e"):
        (write_run(tmp_path / name, step=20) / "checkpoints" / "step-00000020").mkdir(parents=True)
    cell = write_run(tmp_path / "sweep" / "cell", step=20)
    (cell / "checkpoints" / "step-00000020").mkdir(parents=True)
    write_sweep(tmp_path / "sweep", {"cell": {"p": 0.5}})  # a sweep continues its own
    _, said = run(RunsArgs((tmp_path,))).split("to continue:\n")
    assert said.splitlines() == [
        *(
            f"  deeploop train --resume {folder}"
            for folder in (tmp_path / "a", f"'{tmp_path}/b c'", tmp_path / "d")
        ),
        "  and 1 more",
    ]
    assert "to continue" not in run(RunsArgs((tmp_path / "whole",)))
