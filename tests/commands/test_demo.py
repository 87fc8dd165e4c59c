"""The demo end to end as a quick look: what it prints, draws and writes is what its models answered."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from deeploop.commands import demo_training
from deeploop.commands.demo import DemoConfig, run
from deeploop.commands.demo_models import DRAWN, MODELS, QUICK_ROWS, cell
from deeploop.commands.demo_training import is_finished, standing, train_beside
from deeploop.report.demo import TABLE
from deeploop.tasks.iterate.load import load_iterate
from deeploop.tasks.iterate.problems.base import solve
from deeploop.tasks.iterate.problems.examples import held_out
from deeploop.tasks.iterate.scoring import score_sums, scores
from deeploop.train.metrics import read_metrics


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    config = DemoConfig(out=tmp_path_factory.mktemp("demo"), quick=True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        text = run(config)
    return config, said.getvalue() + text


def record(config):
    return json.loads((config.out / "demo.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_shares_are_those_of_the_evaluation(demo, name):
    config, printed = demo
    model, settings = load_iterate(cell(name, out=config.out, seed=0, quick=True).out)
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
    task = cell("flat", out=config.out, seed=0, quick=True).examples.task
    truth = solve(task, held_out(task, 1), range(201))
    assert found["truth"] == ["".join(map(str, truth[h][0])) for h in range(201)]
    for own in found["models"].values():
        assert len(own["states"]) == 200
        assert {len(state) for state in own["states"]} == {found["length"]}


def test_the_loops_states_are_its_answers_at_each_step(demo):
    """The drawn row is the first scored one, though 200 rounds are read out for it and a few to score."""
    config, _ = demo
    found = record(config)
    model, settings = load_iterate(cell("flat", out=config.out, seed=0, quick=True).out)
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
    assert text.count("<svg") == 3
    assert text.index("<svg") < text.index("<h2")  # it opens with the picture
    # Nothing is fetched: the only addresses are names of XML vocabularies.
    assert not re.search(r"(src|href)\s*=\s*[\"']https?:", text)
    assert "<script" not in text
    assert "A quick look" in text
    assert "A quick look" in printed
    assert printed.startswith("--quick checks the installation: 24 steps, so the models are not trained")


def test_a_second_start_trains_nothing_again(demo):
    config, printed = demo
    runs = [cell(name, out=config.out, seed=0, quick=True).out / "metrics.jsonl" for name in MODELS]
    before = [file.read_bytes() for file in runs]
    assert printed.endswith(run(config))
    assert [file.read_bytes() for file in runs] == before


def test_a_run_of_other_settings_is_not_taken_for_this_one(demo):
    config, _ = demo
    settings = cell("flat", out=config.out, seed=0, quick=True)
    assert is_finished(settings)
    other = replace(settings, optim=replace(settings.optim, peak_lr=1e-3))
    with pytest.raises(ValueError, match=r"holds a run with optim.peak_lr=0.004, this demo has 0.001"):
        is_finished(other)


def test_models_differ_in_what_the_demo_names_alone(tmp_path):
    flat, prenorm, stack = (cell(name, out=tmp_path, seed=3, quick=False) for name in MODELS)
    assert flat.model == replace(prenorm.model, rule="flat")
    assert flat.data == prenorm.data == replace(stack.data, validate_every=flat.data.validate_every)
    assert (stack.model.blocks, stack.model.rounds, stack.rounds.tells_steps) == (4, 1, True)
    assert 2 * stack.optim.steps == flat.optim.steps == prenorm.optim.steps


# ── Side by side ────────────────────────────────────────────────────────────────────────────────────────
def few_steps(tmp_path, **optim):
    settings = cell("flat", out=tmp_path, seed=0, quick=True)
    return replace(settings, optim=replace(settings.optim, steps=4, **optim))


def test_a_run_trains_as_a_process_with_one_thread(tmp_path, capsys):
    flat = few_steps(tmp_path)
    train_beside({"flat": flat})
    assert is_finished(flat)
    step, text = standing(flat)
    assert step == 4
    # The last line is printed after the last evaluation, however few seconds the run took.
    assert capsys.readouterr().out.endswith(f"flat  step     4/4  {text}\n")
    assert "1 CPU thread\n" in flat.out.with_name(f"{flat.out.name}.log").read_text()
    lines = (flat.out / "metrics.jsonl").read_bytes()
    train_beside({"flat": flat})  # nothing is left
    assert (flat.out / "metrics.jsonl").read_bytes() == lines


def fake(code):
    """A stand-in for a run: a process of this code, which finds the run's folder in sys.argv[1]."""

    def start_run(config):
        config.out.mkdir(parents=True)
        return subprocess.Popen([sys.executable, "-c", code, str(config.out)])

    return start_run


SAVES = """
import pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (out / "saved").touch() or sys.exit())
(out / "ready").touch()
time.sleep(60)
"""


def test_ctrl_c_lets_both_save(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_training, "start_run", fake(SAVES))
    flat = few_steps(tmp_path)
    cells = {"flat": flat, "other": replace(flat, out=flat.out.with_name("other"))}

    def interrupt():
        while not all((settings.out / "ready").exists() for settings in cells.values()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_beside(cells, meanwhile=interrupt)
    assert all((settings.out / "saved").exists() for settings in cells.values())
    assert "the same command goes on" in capsys.readouterr().out


def test_a_run_that_fails_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_training, "start_run", fake("raise SystemExit(1)"))
    with pytest.raises(ValueError, match=r"flat: exit code 1; its log: .*flat.log"):
        train_beside({"flat": few_steps(tmp_path)})


def test_what_runs_beside_ends_with_an_error_of_ours(tmp_path, monkeypatch):
    """No process is left behind."""
    processes = []

    def remember(config):
        processes.append(fake(SAVES)(config))
        return processes[-1]

    monkeypatch.setattr(demo_training, "start_run", remember)
    with pytest.raises(ZeroDivisionError):
        train_beside({"flat": few_steps(tmp_path)}, meanwhile=lambda: 1 / 0)
    assert processes[0].wait(timeout=10) != 0


def test_standing_says_accuracies_once_they_are_measured(demo, tmp_path):
    config, _ = demo
    settings = cell("flat", out=config.out, seed=0, quick=True)
    step, text = standing(settings)
    last = read_metrics(settings.out, "validation")[-1]
    assert step == last["step"] == settings.optim.steps
    assert text == f"cells right at step {step}: {last['cells_by_steps'][-1]:.0%} after 4 steps"
    assert standing(few_steps(tmp_path)) == (0, "starting")


def test_a_seed_below_0_is_refused():
    with pytest.raises(ValueError, match="seed=-1: must be 0 or more"):
        DemoConfig(seed=-1)
