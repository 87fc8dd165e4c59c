"""How a run ended is kept, and what interrupts it in a bad moment changes nothing of it."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from tqdm import tqdm

from deeploop.cli import main
from deeploop.config.run import LogConfig
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.active import ActiveRun
from deeploop.train.loop import train
from deeploop.train.metrics import MetricsWriter, read_metrics
from deeploop.train.progress import Display
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

COLLAPSED = {"loss": 3.0, "floor": 3.0, "similarity": 0.99, "verdict": "collapsed"}
GUARDED = {"optim": {"steps": 9}, "guard": {"stop": True}, "data": {"validate_every": 5}}
CLOCKS = ("seconds", "tokens_per_s", "mfu")


@pytest.fixture
def collapsing(monkeypatch):
    monkeypatch.setattr(LanguageTask, "evaluate", lambda self, model, on_batch: dict(COLLAPSED))


@pytest.fixture
def at_step(monkeypatch):
    """`at_step(3, do)`: calls do(queue) before step 3 is queued, once."""

    def plan(step, do):
        real, done = StepQueue.submit, []

        def submit(queue):
            if queue._run.step == step - 1 and not done:
                done.append(step)
                do(queue)
            real(queue)

        monkeypatch.setattr(StepQueue, "submit", submit)

    return plan


def ask_to_stop(queue):
    queue._stop.requested = True


def ended(config):
    return json.loads((config.out / "run.json").read_text()).get("ended")


def lines(config):
    """Every kind of line, less the times it took."""
    return [
        {key: value for key, value in line.items() if key not in CLOCKS} for line in read_metrics(config.out)
    ]


def test_run_json_says_how_a_run_ended(tiny_config, at_step):
    at_step(3, ask_to_stop)
    config = tiny_config()
    assert train(config)["ended"] == "stopped"
    assert ended(config) == {"how": "stopped", "step": 3}
    for fewer in (2, 3):
        with pytest.raises(
            ValueError, match=rf"optim.steps={fewer}: the run in .* is at step 3 already; give"
        ):
            train(tiny_config(resume=True, optim={"steps": fewer}))
    assert ended(config) == {"how": "stopped", "step": 3}
    assert train(tiny_config(resume=True))["ended"] == "finished"
    assert ended(config) == {"how": "finished", "step": 6}
    train(tiny_config(resume=True))
    assert ended(config) == {"how": "finished", "step": 6}


def test_a_run_that_goes_on_has_not_ended(tiny_config, at_step):
    train(tiny_config(optim={"steps": 4}))

    def look(queue):
        assert ended(config) is None

    at_step(5, look)
    config = tiny_config(resume=True)
    assert train(config)["ended"] == "finished"


def test_what_the_guard_ended_stays_ended(tiny_config, collapsing, capsys):
    config = tiny_config(**GUARDED)
    assert train(config)["ended"] == "collapsed"
    before = lines(config)
    result = train(tiny_config(**GUARDED, resume=True))
    assert (result["ended"], result["step"], lines(config)) == ("collapsed", 5, before)
    assert "ended at step 5: collapsed; start anew" in capsys.readouterr().out
    unguarded = tiny_config(**{**GUARDED, "guard": {"stop": False}}, resume=True)
    assert train(unguarded)["step"] == 9


def test_a_stop_in_the_step_that_collapses_does_not_save_it(tiny_config, collapsing, at_step):
    at_step(5, ask_to_stop)
    config = tiny_config(**GUARDED)
    assert train(config)["ended"] == "stopped"
    for _ in range(2):
        result = train(tiny_config(**GUARDED, resume=True))
        assert (result["ended"], result["step"]) == ("collapsed", 5)
        assert [line["step"] for line in read_metrics(config.out, "validation")] == [0, 5]


def test_a_kill_before_the_save_of_a_collapse_does_not_save_it(tiny_config, collapsing, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(run):
        if run.step == 5:
            raise Killed
        return save(run)

    save = ActiveRun.save
    monkeypatch.setattr(ActiveRun, "save", kill)
    config = tiny_config(**GUARDED)
    with pytest.raises(Killed):
        train(config)
    monkeypatch.setattr(ActiveRun, "save", save)
    assert last_checkpoint(config.out).name == "step-00000004"
    result = train(tiny_config(**GUARDED, resume=True))
    assert (result["ended"], result["step"]) == ("collapsed", 5)


def test_a_diagnosis_that_a_stop_left_out_is_the_same(tiny_config, at_step, tmp_path):
    """Its step effect needs the rate of the step that was taken, not of the next nor the peak."""
    diagnosis = {"every": 1, "iterations": 1, "sublayers": ("blocks.0.mlp",)}
    changes = {"diagnose": diagnosis, "optim": {"steps": 3}}
    whole = tiny_config(tmp_path / "whole", **changes)
    train(whole)
    at_step(2, ask_to_stop)
    cut = tiny_config(tmp_path / "cut", **changes)
    assert train(cut)["ended"] == "stopped"
    train(tiny_config(tmp_path / "cut", resume=True, **changes))
    assert {line["kind"] for line in lines(whole)} == {"train", "validation", "diagnose"}
    assert sorted(map(str, lines(cut))) == sorted(map(str, lines(whole)))


def test_a_skipped_step_is_one_line_after_a_resume(tiny_config, poison, at_step, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(queue):
        raise Killed

    poison(3, float("nan"))
    at_step(4, kill)
    changes = {"optim": {"non_finite": "skip"}, "checkpoint": {"every": 2}}
    with pytest.raises(Killed):
        train(tiny_config(**changes))
    real = LanguageTask.loss
    calls = []

    def first_is_poisoned(self, model, batch):
        calls.append(1)
        return real(self, model, batch) * (float("nan") if len(calls) == 1 else 1)

    monkeypatch.setattr(LanguageTask, "loss", first_is_poisoned)
    config = tiny_config(resume=True, **changes)
    train(config)
    assert [line["step"] for line in read_metrics(config.out, "skipped")] == [3]


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_folder_that_is_gone_ends_the_run_with_an_error(tiny_config, at_step, tmp_path, how):
    config = tiny_config()

    def lose(queue):
        if how == "removed":
            shutil.rmtree(config.out)
        else:
            config.out.rename(tmp_path / "elsewhere")
        if how == "replaced":
            shutil.copytree(tmp_path / "elsewhere", config.out)

    at_step(2, lose)
    with pytest.raises(OSError, match="the run folder was moved or removed while the run went on"):
        train(config)


def test_a_hang_up_asks_to_stop():
    before = signal.getsignal(signal.SIGHUP)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_reader_that_leaves_does_not_end_the_run(monkeypatch):
    display = Display(total=1, done=0, shown=True, title="")
    said = []

    def broken(text):
        said.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(tqdm, "write", broken)
    for text in ("one", "two"):
        display.say(text)
    assert said == ["one"]


def test_train_into_head_is_trained_to_its_end(train_arguments, tmp_path):
    command = [sys.executable, "-u", "-m", "deeploop", *train_arguments(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert last_checkpoint(tmp_path / "run").name == "step-00000006"


def test_a_finished_run_without_weights_is_not_started_anew(train_arguments, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(train_arguments(out)) == 0
    shutil.rmtree(out / "checkpoints")
    assert main(train_arguments(out)) == 2
    said = capsys.readouterr().err
    assert "holds a run that ended at step 6 (finished) and kept no checkpoint; choose another --out" in said
    for index in (1, 2):  # who asks for it gets it, and loses nothing
        assert main(train_arguments(out, "--resume")) == 0
        kept = sorted(path.name for path in out.glob("metrics.previous*"))
        assert kept == ["metrics.previous-2.jsonl", "metrics.previous.jsonl"][2 - index :]
        shutil.rmtree(out / "checkpoints")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_names_the_file(tmp_path):
    writer = MetricsWriter(tmp_path, LogConfig(), {})
    writer._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(OSError, match=r"metrics\.jsonl: can't be written \(No space left on device\)"):
        writer.write("train", 1, {"loss": 1.0})
    writer.close()
