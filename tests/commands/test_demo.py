"""The demo end to end as a quick look: what it prints, draws and writes is what its models answered."""

import contextlib
import io
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace

import pytest

from deeploop.commands.demo import DemoArgs, run, train_cells
from deeploop.commands.demo_models import DRAWN, MODELS, QUICK_ROWS, TRAINED_STEPS, grid
from deeploop.commands.demo_page import TABLE
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import Grid
from deeploop.tasks.iterate.load import load_iterate
from deeploop.tasks.iterate.problems.base import solve
from deeploop.tasks.iterate.problems.examples import held_out
from deeploop.tasks.iterate.scoring import score_sums, scores
from deeploop.train.metrics import read_metrics


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    config = DemoArgs(out=tmp_path_factory.mktemp("demo"), quick=True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        text = run(config)
    return config, said.getvalue() + text


def folder(config):
    return config.out / "runs" / "seed0-quick"


def record(config):
    return json.loads((config.out / "demo.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_shares_are_those_of_the_evaluation(demo, name):
    config, printed = demo
    model, settings = load_iterate(folder(config) / name)
    examples = settings.examples
    cells = [(settings.rounds.at_test(h, settings.model.rounds), h) for h in TABLE]
    found = scores(score_sums(model, examples, held_out(examples.task, QUICK_ROWS), cells))
    own = record(config)["models"][name]
    for at in cells:
        assert own["cells"][str(at[1])] == pytest.approx(found[at].cells)
        assert own["exact"][str(at[1])] == pytest.approx(found[at].exact)
    row = next(line for line in printed.splitlines() if re.match(rf"{name}\s+0", line))
    assert row.split()[1:] == [f"{found[at].cells:.3f}" for at in cells]


def test_the_drawn_row_is_a_held_out_one_and_goes_on_to_the_last_step(demo):
    config, _ = demo
    found = record(config)
    task = grid(0, quick=True).cells()[0].config().examples.task
    truth = solve(task, held_out(task, 1), range(201))
    assert found["truth"] == ["".join(map(str, truth[h][0])) for h in range(201)]
    for own in found["models"].values():
        assert len(own["states"]) == 200
        assert {len(state) for state in own["states"]} == {found["length"]}


def test_the_loops_states_are_its_answers_at_each_step(demo):
    """The drawn row is the first scored one, though 200 rounds are read out for it and a few to score."""
    config, _ = demo
    found = record(config)
    model, settings = load_iterate(folder(config) / "flat")
    examples = settings.examples
    sums = scores(score_sums(model, examples, held_out(examples.task, 1), [(h, h) for h in DRAWN]))
    for h in DRAWN:
        pairs = zip(found["models"]["flat"]["states"][h - 1], found["truth"][h], strict=True)
        assert sums[h, h].cells == pytest.approx(sum(a == b for a, b in pairs) / found["length"])


def test_the_page_stands_alone_and_makes_no_claim(demo):
    config, printed = demo
    text = (config.out / "index.html").read_text(encoding="utf-8")
    assert (config.out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert str(config.out / "index.html") in printed
    assert [text.count(f'<svg class="{kind}"') for kind in ("page", "phone")] == [2, 2]
    assert text.index("<svg") < text.index("<h2")  # it opens with the picture
    # Nothing is fetched: the only addresses are names of XML vocabularies.
    assert not re.search(r"(src|href)\s*=\s*[\"']https?:", text)
    assert "<script" not in text
    assert "A quick look" in text
    assert "A quick look" in printed
    assert printed.startswith("--quick checks the installation: 24 steps, so the models are not trained")


def test_a_second_start_trains_nothing_again(demo):
    config, printed = demo
    runs = [folder(config) / name / "metrics.jsonl" for name in MODELS]
    before = [file.read_bytes() for file in runs]
    assert printed.endswith(run(config))
    assert [file.read_bytes() for file in runs] == before


def test_a_run_of_other_settings_is_not_taken_for_this_one(demo):
    config, _ = demo
    out = folder(config)
    (name, axis), *_ = grid(0, quick=True).axes.items()
    other = {name: {**axis, "flat": {**axis["flat"], "optim.peak_lr": 1e-3}}}
    with pytest.raises(ValueError, match=r"its cell flat has optim.peak_lr=0.004, not 0.001"):
        train_cells(out, replace(grid(0, quick=True), axes=other), here=True)


def test_models_differ_in_what_the_demo_names_alone():
    deeploop, flat, prenorm, stack = (cell.config() for cell in grid(3, quick=False).cells())
    assert deeploop.model == replace(flat.model, rule="deeploop")
    assert (deeploop.data, deeploop.rounds) == (flat.data, flat.rounds)
    assert flat.model == replace(prenorm.model, rule="flat")
    assert flat.data == prenorm.data == replace(stack.data, validate_every=flat.data.validate_every)
    assert (stack.model.blocks, stack.model.rounds, stack.rounds.tells_steps) == (4, 1, True)
    assert 2 * stack.optim.steps == flat.optim.steps == prenorm.optim.steps
    assert flat.data.train_steps == TRAINED_STEPS


# ── Side by side ────────────────────────────────────────────────────────────────────────────────────────
def few_steps(*names):
    """The flat model for four steps, once for each name."""
    (flat, *_) = grid(0, quick=True).cells()
    axis = {name: {"seed": seed} for seed, name in enumerate(names)}
    return Grid("demo", flat.recipe, {"model": axis}, {**flat.settings, "optim.steps": 4})


def in_place_of_training(monkeypatch, line):
    """Each process runs a line of shell."""
    monkeypatch.setattr(SweepFolder, "next_command", lambda self, cell: ["sh", "-c", line])


def test_runs_train_as_processes_with_one_thread(tmp_path, capsys):
    train_cells(tmp_path, few_steps("flat"), here=False)
    last = [line.split() for line in capsys.readouterr().out.splitlines()]
    validated = read_metrics(tmp_path / "flat", "validation")[-1]
    share = f"{validated['cells_by_steps'][-1]:.1%}"
    assert ["flat", "finished", "4/4"] in [words[:3] for words in last if share in words]
    assert "1 CPU thread\n" in (tmp_path / "flat.log").read_text()
    lines = (tmp_path / "flat" / "metrics.jsonl").read_bytes()
    train_cells(tmp_path, few_steps("flat"), here=False)  # nothing is left
    assert (tmp_path / "flat" / "metrics.jsonl").read_bytes() == lines
    assert capsys.readouterr().out == ""


def test_ctrl_c_lets_both_save(tmp_path, monkeypatch):
    saves = (
        "trap 'echo saved; exit 143' TERM; echo ready; for wait in $(seq 400); do sleep 0.05; done; exit 1"
    )
    in_place_of_training(monkeypatch, saves)
    logs = [tmp_path / f"{name}.log" for name in ("flat", "other")]

    def interrupt():
        while not all(log.exists() and "\nready" in log.read_text() for log in logs):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        train_cells(tmp_path, few_steps("flat", "other"), here=False)
    assert all(log.read_text().endswith("ready\nsaved\n") for log in logs)


def test_a_run_that_fails_is_named_with_its_log(tmp_path, monkeypatch):
    in_place_of_training(monkeypatch, "echo deeploop train: error: no corpus >&2; exit 2")
    with pytest.raises(ValueError, match=r"(flat|other): no corpus; its log: .*.log"):
        train_cells(tmp_path, few_steps("flat", "other"), here=False)


def test_a_seed_below_0_is_refused():
    with pytest.raises(ValueError, match="seed=-1: must be at least 0"):
        DemoArgs(seed=-1)
