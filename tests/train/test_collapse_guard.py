"""A run that sits on the unigram floor after warm-up says so, once, and stops if asked to."""

import pytest

from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.checkpoint import read_state
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

COLLAPSED, ESCAPED = (3.0, 0.99, "collapsed"), (2.0, 0.1, "escaped")


def scripted(*results):
    """A task whose validations say what the test wants, one after the other; the last one repeats."""
    left = list(results)

    class Scripted(LanguageTask):
        def evaluate(self, model, on_batch):
            loss, similarity, verdict = left.pop(0) if len(left) > 1 else left[0]
            return {"loss": loss, "floor": 3.0, "similarity": similarity, "verdict": verdict}

    return Scripted


def collapses(config):
    return [record["step"] for record in read_metrics(config.out, "collapse")]


def test_a_violent_ramp_collapses_and_is_told_once(tiny_config, capsys):
    """Nothing scripted: at 3/4 of 1e-3 per step this block is in one state by step 20 and stays there."""
    config = tiny_config(optim={"steps": 28})
    result = train(config)
    assert result["verdict"] == "collapsed"
    assert result["similarity"] > 0.95
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("COLLAPSED")]
    assert len(said) == len(collapses(config)) == 1
    assert "rose by 7.5e-04 per step" in said[0]
    tried = "--model.unigram-bias or --warmup 16 or --rule deeploop:p=1, or a lower --lr"
    assert tried in said[0]


def test_it_waits_for_the_end_of_warmup(tiny_config):
    config = tiny_config(optim={"steps": 12, "warmup_steps": 6}, data={"validate_every": 3})
    train(config, task=scripted(COLLAPSED))
    assert collapses(config) == [6]


@pytest.mark.parametrize("results", [[COLLAPSED, ESCAPED], [ESCAPED]])
def test_a_run_that_leaves_during_warmup_is_not_accused(tiny_config, results):
    config = tiny_config()
    train(config, task=scripted(*results))
    assert collapses(config) == []


def test_stop_ends_the_run_with_a_checkpoint(tiny_config):
    config = tiny_config(optim={"steps": 50}, guard={"stop": True}, data={"validate_every": 5})
    result = train(config, task=scripted(COLLAPSED))
    assert (result["ended"], result["step"]) == ("collapsed", 5)
    assert read_state(last_checkpoint(config.out))["step"] == 5


def test_a_resumed_run_does_not_repeat_itself(tiny_config, capsys):
    train(tiny_config(optim={"steps": 4}), task=scripted(COLLAPSED))
    assert capsys.readouterr().out.count("COLLAPSED") == 1
    config = tiny_config(optim={"steps": 8}, resume=True)
    train(config, task=scripted(COLLAPSED))
    assert "COLLAPSED" not in capsys.readouterr().out
    assert collapses(config) == [4]


def test_stop_spares_a_resumed_run_that_has_escaped_since(tiny_config):
    task = scripted(COLLAPSED, COLLAPSED, ESCAPED)  # at steps 0, 4 and 8
    train(tiny_config(optim={"steps": 8}), task=task)
    config = tiny_config(optim={"steps": 12}, resume=True, guard={"stop": True})
    result = train(config, task=task)
    assert (result["ended"], result["step"]) == ("finished", 12)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"rule": "prenorm"}, "try --model.unigram-bias or --warmup 16, or a lower"),
        (
            {"rule": "deepnorm"},
            "try --model.unigram-bias or --warmup 16 or --rule deeploop, or a lower",
        ),
        (
            {"rule": "flat:gain=2", "unigram_bias": True},
            "try --rule flat:gain=8 or --warmup 16, or a lower",
        ),
    ],
)
def test_the_advice_is_of_the_rule(tiny_config, capsys, model, told):
    train(tiny_config(model=model), task=scripted(COLLAPSED))
    assert told in capsys.readouterr().out
