"""The host a step ahead of what it knows: the same run, the same files, and nothing late where it counts."""

import pytest

from deeploop.report.runs import read_run
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.task import LanguageTask
from deeploop.train import loop, steps
from deeploop.train.metrics import read_metrics
from deeploop.train.optim import clipped_step
from deeploop.train.stop import StopRequest

STEPS = {"steps": 14, "warmup_steps": 2}
RARELY = {"checkpoint": {"every": 100}, "log": {"every": 5}}


@pytest.fixture
def late(monkeypatch, execute, recordings):
    """A device that takes the optimizer's step by itself, on a CPU; returns how late each step was read."""

    def step_if(optimizer, norm, clip, *, only_if):
        if only_if:
            clipped_step(optimizer, norm, clip)

    execute(graph=True, lag=1)
    monkeypatch.setattr(steps, "clipped_step", step_if)
    return note_lag(monkeypatch)


def note_lag(monkeypatch):
    """By how many steps each step is read back behind the newest."""
    seen, finish = [], steps.StepQueue._finish

    def noted(queue, queued):
        seen.append(queue._run.step - queued.step)
        return finish(queue, queued)

    monkeypatch.setattr(steps.StepQueue, "_finish", noted)
    return seen


def lines(config):
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_s")}
        for kind in ("train", "validation", "skipped")
        for line in read_metrics(config.out, kind)
    ]


def tensors(config):
    """The bytes of the last checkpoint's weights and moments."""
    files = ("model.safetensors", "optimizer.safetensors")
    return {name: (last_checkpoint(config.out) / name).read_bytes() for name in files}


def test_a_run_that_is_read_back_behind_is_the_run(tiny_config, tmp_path, request):
    plain = tiny_config(optim=STEPS, data={"validate_every": 7}, out=tmp_path / "plain", **RARELY)
    loop.train(plain)
    seen = request.getfixturevalue("late")
    late = tiny_config(optim=STEPS, data={"validate_every": 7}, out=tmp_path / "late", **RARELY)
    loop.train(late)
    assert lines(late) == lines(plain)
    assert tensors(late) == tensors(plain)
    # Logged at 5, 10 and 14, validated at 7 and 14: these are known at once, and with them those before.
    at_once = (5, 7, 10, 14)
    assert seen == [0 if step in at_once else 1 for step in range(1, 15)]


def test_what_is_not_finite_is_skipped_under_its_own_number(tiny_config, late, poison, capsys):
    poison(3, float("nan"))
    config = tiny_config(optim={**STEPS, "non_finite": "skip"}, **RARELY)
    assert loop.train(config)["ended"] == "finished"
    (skipped,) = read_metrics(config.out, "skipped")
    assert (skipped["step"], skipped["so_far"]) == (3, 1)
    assert "step 3: loss nan" in capsys.readouterr().out


def test_what_is_not_finite_ends_the_run_under_its_own_number(tiny_config, late, poison):
    poison(3, float("inf"))
    with pytest.raises(FloatingPointError, match="step 3: loss inf"):
        loop.train(config := tiny_config(optim=STEPS, **RARELY))
    assert late[-1] == 1
    assert read_run(config.out).state == "failed"


def test_what_is_not_finite_is_repeated_at_its_own_rounds(tiny_config, late, poison):
    """The step after it is under way by then, at others."""
    poison(3, float("inf"))
    seen = []

    class Noting(LanguageTask):
        def loss(self, model, batch):
            seen.append(model.rounds)
            return super().loss(model, batch)

    config = tiny_config(model={"rounds": 5}, rounds={"sample": "uniform"}, optim=STEPS, **RARELY)
    with pytest.raises(FloatingPointError, match="step 3: loss inf"):
        loop.train(config, task=Noting)
    *_, third, fourth, for_gradients, for_outputs = seen
    assert for_gradients == for_outputs == third != fourth


def test_asked_to_stop_it_settles_what_is_under_way_and_resumes_to_the_same_end(tiny_config, late, tmp_path):
    changes = {"optim": STEPS, "data": {"validate_every": 100}, **RARELY}
    whole = tiny_config(out=tmp_path / "whole", **changes)
    loop.train(whole)
    cut = tiny_config(out=tmp_path / "cut", **changes)

    class AskedInTheEighthStep(StopRequest):
        asked = 0

        @property
        def requested(self):
            self.asked += 1
            return self.asked >= 2 + 8  # the first validation has two batches

        @requested.setter
        def requested(self, value):
            pass

    result = loop.train(cut, stop=AskedInTheEighthStep())
    # Asked in step 8, known when step 9 is under way.
    assert (result["ended"], result["step"]) == ("stopped", 9)
    loop.train(tiny_config(out=tmp_path / "cut", resume=True, **changes))
    assert tensors(cut) == tensors(whole)


@pytest.mark.gpu
def test_on_a_gpu_steps_are_read_back_behind_and_are_the_same(tiny_config, tmp_path, monkeypatch):
    seen = note_lag(monkeypatch)
    runs = {}
    for graph in (True, False):
        config = tiny_config(
            out=tmp_path / f"{graph}",
            model={"width": 128, "heads": 2, "hidden": 256},
            optim=STEPS,
            device={"kind": "cuda", "graph": graph},
            data={"validate_every": 7},
            **RARELY,
        )
        loop.train(config)
        runs[graph] = [line["loss"] for line in read_metrics(config.out, "train")]
    assert seen == [0 if step in (5, 7, 10, 14) else 1 for step in range(1, 15)] + [0] * 14
    assert runs[True] == pytest.approx(runs[False], rel=2e-3)
