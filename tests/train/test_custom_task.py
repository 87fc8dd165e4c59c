"""A task of one's own: examples/own_task.py in the training loop, and the rows of ranks and micro-batches."""

import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deeploop import LoopedGPT
from deeploop.cli import main
from deeploop.tasks.language.task import LanguageTask
from deeploop.train import CustomTask, DeviceConfig, TrainConfig, load_last, train
from deeploop.train.distributed import World
from deeploop.train.metrics import read_metrics
from deeploop.train.opening import check_recompute
from deeploop.train.stop import StopRequest

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_task.py"))
Sorting = EXAMPLE["Sorting"]


def short(out, steps=4, micro_batch=0):
    """The example's config, for a few steps."""
    config = EXAMPLE["config"](out)
    return replace(
        config,
        model=replace(config.model, rounds=2, width=32, hidden=32),
        data=replace(config.data, validate_every=4),
        optim=replace(config.optim, steps=steps, batch=8, warmup_steps=8),
        device=DeviceConfig(kind="cpu", micro_batch=micro_batch),
        log=replace(config.log, every=1),
    )


def losses(run):
    return [line["loss"] for line in read_metrics(run, "train")]


def test_the_example_trains_and_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    result = train(short(whole, 8), task=Sorting, quiet=True)
    assert result["ended"] == "finished"
    assert 0 <= result["right"] <= 1
    train(short(cut, 4), task=Sorting, quiet=True)  # the rate is the same: all eight steps are warm-up
    train(replace(short(cut, 8), resume=True), task=Sorting, quiet=True)
    assert len(losses(cut)) == 8
    assert losses(cut) == losses(whole)


def test_what_a_task_draws_itself_goes_on_after_a_resume(tmp_path):
    class Noisy(Sorting):
        def loss(self, *args):
            return super().loss(*args) * (1 + 0.1 * torch.rand(()))

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(short(whole), task=Noisy, quiet=True)
    train(short(cut, 2), task=Noisy, quiet=True)
    torch.rand(3)  # a resumed run does not depend on what its process drew
    train(replace(short(cut), resume=True), task=Noisy, quiet=True)
    assert losses(cut) == losses(whole)


def test_the_last_weights_are_those_that_the_run_ended_with(tmp_path):
    trained = []

    class Kept(Sorting):
        def build(self):
            trained.append(super().build())
            return trained[-1]

    train(short(tmp_path / "run"), task=Kept, quiet=True)
    model = LoopedGPT(short(tmp_path).model, seed=1)
    load_last(model, tmp_path / "run")
    torch.testing.assert_close(model.state_dict(), trained[0].state_dict(), rtol=0, atol=0)


def test_a_loss_that_is_not_finite_ends_in_a_report(tmp_path):
    class Broken(Sorting):
        def batch_loss(self, model, inputs, targets):
            return super().batch_loss(model, inputs, targets) / (self.step < 3)  # step 3: by zero

    with pytest.raises(FloatingPointError, match=r"step 3: loss inf, .* last good checkpoint: none was"):
        train(short(tmp_path / "run"), task=Broken, quiet=True)


def test_a_metric_that_is_no_number_does_not_stand_against_a_resume(tmp_path):
    class Measures(Sorting):
        measured = math.nan

        def evaluate(self, model):
            return {**super().evaluate(model), "exact": self.measured}

    run = tmp_path / "run"
    assert train(short(run, 4), task=Measures, quiet=True)["exact"] is None
    assert train(replace(short(run, 8), resume=True), task=Measures, quiet=True)["step"] == 8
    for bad, told in (([0.5], r"exact=\[0\.5\]: must be a number"), (torch.ones(()), "exact=tensor.*plain")):
        Measures.measured = bad
        with pytest.raises(ValueError, match=rf"Measures\.evaluate: returned {told}.*: none was saved yet"):
            train(short(tmp_path / "refused"), task=Measures, quiet=True)


class Measured(Sorting):
    """One number more, and a list, on each line of training metrics."""

    def metrics(self, model):
        return {
            "gains": [round(p.norm().item(), 3) for p in model.parameters() if p.ndim == 1],
            "seen": self.step,
        }


def test_a_number_of_the_task_is_on_every_line(tmp_path):
    train(short(tmp_path / "run"), task=Measured, quiet=True)
    lines = read_metrics(tmp_path / "run", "train")
    assert [line["seen"] for line in lines] == [1, 2, 3, 4]
    assert all(len(line["gains"]) > 1 for line in lines)
    Measured.metrics = lambda self, model: {"exact": torch.ones(())}
    with pytest.raises(ValueError, match=r"Measured\.metrics: returned exact=tensor.*plain"):
        train(short(tmp_path / "refused"), task=Measured, quiet=True)


def test_a_subclass_of_a_stock_task_adds_a_number(tiny_config):
    class Measured(LanguageTask):
        def metrics(self, model):
            return {"width": model.config.width}

    config = tiny_config(optim={"steps": 1})
    train(config, task=Measured, quiet=True)
    assert [line["width"] for line in read_metrics(config.out, "train")] == [config.model.width]


def test_a_long_evaluation_is_shown_and_can_be_stopped(tmp_path):
    class Long(Sorting):
        def evaluate(self, model, on_batch):
            on_batch(0.5)
            stop.requested = self.step == 0
            on_batch(0.9)
            return super().evaluate(model)

    stop = StopRequest()
    result = train(short(tmp_path / "run"), task=Long, quiet=True, stop=stop)
    assert (result["ended"], result["step"]) == ("stopped", 0)
    assert read_metrics(tmp_path / "run") == []


def test_a_plain_optimizer_follows_the_schedule(tmp_path):
    class Plain(Sorting):
        def make_optimizer(self, model):
            self.optimizer = torch.optim.SGD(model.parameters())
            return self.optimizer

    tasks = []
    train(short(tmp_path), task=lambda *given: tasks.append(Plain(*given)) or tasks[-1], quiet=True)
    rate = read_metrics(tmp_path, "train")[-1]["lr"]
    assert rate == pytest.approx(short(tmp_path).optim.peak_lr * 4 / 8)
    assert tasks[0].optimizer.param_groups[0]["lr"] == rate


def test_recompute_reaches_the_model_or_is_refused(tmp_path):
    class Foreign(Sorting):
        def build(self):
            return torch.nn.Linear(2, 2)

    config = short(tmp_path)
    config = replace(config, device=replace(config.device, recompute="round"))
    assert Sorting(config, World(0, 1, torch.device("cpu"))).build().recompute == "round"
    with pytest.raises(
        ValueError, match=r"device\.recompute=round: the Linear of Foreign\.build does not set"
    ):
        train(config, task=Foreign, quiet=True)
    foreign = torch.nn.Linear(2, 2)
    foreign.recompute = False  # of its own, and nothing is asked for
    check_recompute(Sorting(short(tmp_path), World(0, 1, torch.device("cpu"))), foreign)


def test_shares_of_ranks_and_micro_batches_add_up_to_the_mean_loss(tmp_path):
    whole = Sorting(short(tmp_path), World(0, 1, torch.device("cpu")))
    model = whole.build()
    expected = whole.batch_loss(model, *whole.batch(0))
    parts = []
    for rank in (0, 1):
        task = Sorting(short(tmp_path, micro_batch=2), World(rank, 2, torch.device("cpu")))
        parts += [task.loss(model, batch) for batch in task.batches(0).batches]
    assert len(parts) == 4
    torch.testing.assert_close(sum(parts), expected)


def test_mistakes_are_named(tmp_path, capsys):
    class Short(Sorting):
        def batch(self, step):
            return tuple(part[:3] for part in super().batch(step))

    class Empty(CustomTask):
        pass

    with pytest.raises(ValueError, match=r"Short\.batch: returned \[3, 3\] rows, must be optim.batch=8 each"):
        train(short(tmp_path / "a"), task=Short, quiet=True)
    with pytest.raises(NotImplementedError, match=r"Empty\.evaluate: must return"):
        train(short(tmp_path / "b"), task=Empty, quiet=True)
    with pytest.raises(ValueError, match="task: must be given"):
        train(short(tmp_path / "c"), quiet=True)
    with pytest.raises(
        ValueError,
        match=r"task: is for a CustomTrainConfig, not for a TrainConfig, .* subclass of LanguageTask",
    ):
        train(TrainConfig(out=tmp_path / "d"), task=Sorting, quiet=True)
    train(short(tmp_path / "e"), task=Sorting, quiet=True)
    assert main(["validate", str(tmp_path / "e")]) == 2
    assert "a run of a task of somebody's own" in capsys.readouterr().err
    own = str(tmp_path / "e" / "config.json")
    for words in (["--config", own, "--out", str(tmp_path / "f")], ["--resume", str(tmp_path / "e")]):
        assert main(["train", *words]) == 2
        assert "error: task: must be given for a CustomTrainConfig" in capsys.readouterr().err
