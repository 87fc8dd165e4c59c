"""The recorded ending of a run, which an interruption at a bad moment does not change."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
from acting import acting, stopped_in
from tqdm import tqdm

from deeploop.cli import main
from deeploop.config.run import LogConfig
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.loop import train
from deeploop.train.metrics import MetricsWriter, read_metrics
from deeploop.train.progress import Display
from deeploop.train.stop import StopRequest

COLLAPSED = {"loss": 3.0, "floor": 3.0, "similarity": 0.99, "verdict": "collapsed"}
GUARDED = {"optim": {"steps": 9}, "guard": {"stop": True}, "data": {"validate_every": 5}}
CLOCKS = ("seconds", "tokens_per_s", "mfu")


class Collapsing(LanguageTask):
    def evaluate(self, model, on_batch):
        return dict(COLLAPSED)


def ended(config):
    return json.loads((config.out / "run.json").read_text()).get("ended")


def lines(config):
    """Every kind of line, less the times it took."""
    return [
        {key: value for key, value in line.items() if key not in CLOCKS} for line in read_metrics(config.out)
    ]


def test_run_json_says_how_a_run_ended(tiny_config):
    config = tiny_config()
    assert stopped_in(3, config)["ended"] == "stopped"
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


def test_a_run_that_goes_on_has_not_ended(tiny_config):
    train(tiny_config(optim={"steps": 4}))

    def look(model):
        assert ended(config) is None

    config = tiny_config(resume=True)
    assert train(config, task=acting(config, 5, look))["ended"] == "finished"


def test_what_the_guard_ended_stays_ended(tiny_config, capsys):
    config = tiny_config(**GUARDED)
    assert train(config, task=Collapsing)["ended"] == "collapsed"
    before = lines(config)
    result = train(tiny_config(**GUARDED, resume=True), task=Collapsing)
    assert (result["ended"], result["step"], lines(config)) == ("collapsed", 5, before)
    assert "ended at step 5: collapsed; start anew" in capsys.readouterr().out
    unguarded = tiny_config(**{**GUARDED, "guard": {"stop": False}}, resume=True)
    assert train(unguarded, task=Collapsing)["step"] == 9


def test_a_stop_in_the_step_that_collapses_does_not_save_it(tiny_config):
    config = tiny_config(**GUARDED)
    assert stopped_in(5, config, Collapsing)["ended"] == "stopped"
    for _ in range(2):
        result = train(tiny_config(**GUARDED, resume=True), task=Collapsing)
        assert (result["ended"], result["step"]) == ("collapsed", 5)
        assert [line["step"] for line in read_metrics(config.out, "validation")] == [0, 5]


class Killed(BaseException):
    pass


def test_a_kill_before_the_save_of_a_collapse_does_not_save_it(tiny_config):
    class KilledInItsSecondSave(Collapsing):
        saves = 0

        def tensors(self):
            self.saves += 1
            if self.saves == 2:
                raise Killed
            return super().tensors()

    config = tiny_config(**GUARDED)
    with pytest.raises(Killed):
        train(config, task=KilledInItsSecondSave)
    assert last_checkpoint(config.out).name == "step-00000004"
    result = train(tiny_config(**GUARDED, resume=True), task=Collapsing)
    assert (result["ended"], result["step"]) == ("collapsed", 5)


def test_a_diagnosis_that_a_stop_left_out_is_the_same(tiny_config, tmp_path):
    """Its step effect needs the rate of the step that was taken, not of the next nor the peak."""
    diagnosis = {"every": 1, "iterations": 1, "sublayers": ("blocks.0.mlp",)}
    changes = {"diagnose": diagnosis, "optim": {"steps": 3}}
    whole = tiny_config(tmp_path / "whole", **changes)
    train(whole)
    cut = tiny_config(tmp_path / "cut", **changes)
    assert stopped_in(2, cut)["ended"] == "stopped"
    train(tiny_config(tmp_path / "cut", resume=True, **changes))
    assert {line["kind"] for line in lines(whole)} == {"train", "validation", "diagnose"}
    assert sorted(map(str, lines(cut))) == sorted(map(str, lines(whole)))


def test_a_skipped_step_is_one_line_after_a_resume(tiny_config, poison):
    def kill(model):
        raise Killed

    poison(3, float("nan"))
    changes = {"optim": {"non_finite": "skip"}, "checkpoint": {"every": 2}}
    config = tiny_config(**changes)
    with pytest.raises(Killed):
        train(config, task=acting(config, 4, kill))
    poison(1, float("nan"))  # the third step, which is taken again
    train(tiny_config(resume=True, **changes))
    assert [line["step"] for line in read_metrics(config.out, "skipped")] == [3]


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_folder_that_is_gone_ends_the_run_with_an_error(tiny_config, tmp_path, how):
    config = tiny_config()

    def lose(model):
        if how == "removed":
            shutil.rmtree(config.out)
        else:
            config.out.rename(tmp_path / "elsewhere")
        if how == "replaced":
            shutil.copytree(tmp_path / "elsewhere", config.out)

    with pytest.raises(OSError, match="the run folder was moved or removed"):
        train(config, task=acting(config, 2, lose))


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


def test_a_full_disk_names_the_file(tmp_path):
    writer = MetricsWriter(tmp_path, LogConfig(), {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl: can't be written \(File too large\)"):
            writer.write("train", 1, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.close()
