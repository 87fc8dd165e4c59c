"""A non-finite loss stops the run and names step, first broken tensor and last good checkpoint."""

import shutil
from dataclasses import replace

import pytest
import torch
from acting import acting

from deeploop.cli import main
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.checkpoint import read_state
from deeploop.train.distributed import open_world
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.opening import open_run

WEIGHT = "blocks.1.mlp.branch.up"


def nan_weight(model):
    model.get_parameter(f"{WEIGHT}.weight")[3, 5] = float("nan")


def overflow(model):
    """All weights stay finite; the products of this one do not."""
    model.get_parameter(f"{WEIGHT}.weight").fill_(3e38)


def infinite_gradient(model):
    model.get_parameter(f"{WEIGHT}.weight").register_hook(lambda gradient: gradient * float("inf"))


HARM = {
    nan_weight: f"weight {WEIGHT}.weight",
    overflow: f"output of {WEIGHT}",
    infinite_gradient: f"gradient of {WEIGHT}.weight",
}


def harmed_in_step_6(config, harm):
    return acting(config, 6, torch.no_grad()(harm))


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_the_run_stops_and_names_where_it_broke(tiny_config, harm):
    config = tiny_config(optim={"steps": 20}, device={"micro_batch": 4})
    with pytest.raises(FloatingPointError) as error:
        train(config, task=harmed_in_step_6(config, harm))
    message = str(error.value)
    assert message.startswith("step 6: loss ")
    assert f"first non-finite tensor: {HARM[harm]};" in message
    assert message.endswith(f"last good checkpoint: {config.out / 'checkpoints' / 'step-00000004'}")


def test_before_the_first_checkpoint_it_says_that_there_is_none(tiny_config):
    config = tiny_config(checkpoint={"every": 100})
    with pytest.raises(FloatingPointError, match="last good checkpoint: none was saved yet"):
        train(config, task=harmed_in_step_6(config, nan_weight))


def test_on_the_command_line_it_is_one_line(train_arguments, tmp_path, poison, capsys):
    poison(6, float("nan"))
    assert main(train_arguments(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert error.startswith("deeploop train: error: step 6: loss nan")
    assert error.count("\n") == 1


def test_a_step_may_be_skipped_and_is_counted(tiny_config, poison, capsys):
    """One poisoned batch: the weights stay as they were before it, and the run goes on."""
    poison(3, float("nan"))
    config = tiny_config(optim={"non_finite": "skip"})
    assert train(config)["ended"] == "finished"
    (skipped,) = read_metrics(config.out, "skipped")
    assert skipped["step"] == 3
    assert skipped["so_far"] == 1
    assert "step 3: loss nan" in capsys.readouterr().out
    losses = {line["step"]: line["loss"] for line in read_metrics(config.out, "train")}
    assert [step for step, loss in losses.items() if loss is None] == [3]
    assert read_state(last_checkpoint(config.out))["skipped"] == 1


class Overflowing(LanguageTask):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("inf")


def test_twenty_in_a_row_end_the_run(tiny_config):
    with pytest.raises(FloatingPointError, match="step 21: loss inf"):
        train(tiny_config(optim={"non_finite": "skip", "steps": 30}), task=Overflowing)


def test_a_checkpoint_that_is_not_finite_says_where_to_go_on_from(tiny_config):
    """A step can make weights infinite whose own loss was finite."""
    config = tiny_config(optim={"steps": 4}, checkpoint={"every": 2})
    train(config)
    with open_world(config.device) as world:
        run = open_run(replace(config, resume=True), world)
        run.model.get_parameter(f"{WEIGHT}.weight").data.fill_(float("inf"))
        run.step = 6
        bad = run.save()
        run.close()
    further = tiny_config(optim={"steps": 8}, resume=True)
    with pytest.raises(ValueError, match=r"not finite.*move that folder away to resume from"):
        train(further)
    shutil.move(bad, config.out / "aside")
    assert train(further)["ended"] == "finished"
