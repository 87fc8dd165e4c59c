"""A schedule that is held while all positions are merged, counted in the checkpoint."""

import math

import pytest
import torch

from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language import task as language
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.checkpoint import read_state
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics


def rates(folder):
    return [record["lr"] / 3e-3 * 4 for record in read_metrics(folder, "train")]  # in steps of the ramp


@pytest.fixture
def merged(monkeypatch):
    """Says that positions are merged at the given calls, counted from 1: one per step."""

    def at(*calls):
        seen = iter(range(1, 100))
        monkeypatch.setattr(language, "token_similarity", lambda _: 0.9 if next(seen) in calls else 0.1)

    return at


def test_the_rate_waits_and_then_goes_on(tiny_config, merged):
    merged(2, 3, 4)
    config = tiny_config(optim={"wait_for_escape": True})
    train(config)
    assert rates(config.out) == pytest.approx([1, 2, 2, 2, 2, 3])


def test_the_cosine_has_the_steps_that_are_left_and_is_not_held(tiny_config, merged):
    merged(2, 3, 4, 8, 9)  # the last two after warm-up, which ends with step 7
    config = tiny_config(optim={"wait_for_escape": True, "steps": 11})
    train(config)
    found = rates(config.out)
    assert found[:7] == pytest.approx([1, 2, 2, 2, 2, 3, 4])
    floor = config.optim.floor_lr / 3e-3 * 4
    cosine = [floor + (4 - floor) * 0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(4)]
    assert found[7:] == pytest.approx(cosine)


def test_a_resumed_run_goes_on_from_the_held_rate(tiny_config, merged):
    merged(1, 2)
    train(tiny_config(optim={"wait_for_escape": True, "steps": 4}))
    merged()
    config = tiny_config(optim={"wait_for_escape": True, "steps": 6}, resume=True)
    train(config)
    assert rates(config.out) == pytest.approx([1, 1, 1, 2, 3, 4])


def test_without_it_nobody_looks(tiny_config, merged):
    merged(1, 2, 3, 4, 5, 6)
    config = tiny_config(optim={"steps": 4})
    train(config)
    assert rates(config.out) == pytest.approx([1, 2, 3, 4])


def test_the_states_of_a_real_step_are_looked_at(tiny_config):
    """At the start positions are far apart; nothing is held, and the numbers are those of a run without."""
    plain, waiting = tiny_config("plain"), tiny_config("waiting", optim={"wait_for_escape": True})
    results = [train(config) for config in (plain, waiting)]
    assert results[0]["loss"] == results[1]["loss"]
    assert rates(plain.out) == rates(waiting.out)


def test_a_real_collapse_holds_it(tiny_config):
    """This ramp has all positions in one state by step 20."""
    ramp = {"warmup_steps": 40, "peak_lr": 3e-2}  # that of the others, for longer
    config = tiny_config(optim={"steps": 20, "wait_for_escape": True, **ramp})
    result = train(config)
    held = read_state(last_checkpoint(config.out))["held"]
    assert result["similarity"] > language.MERGED
    assert 0 < held < 20
    assert rates(config.out)[-1] == pytest.approx(rates(config.out)[-2])


def test_two_ranks_wait_by_the_mean_of_their_similarities(tiny_config, monkeypatch):
    class TwoAlike(World):
        def sum(self, tensor):
            return 2 * tensor

    task = LanguageTask(tiny_config(optim={"wait_for_escape": True}), TwoAlike(0, 2, torch.device("cpu")))
    model, batch = task.build(), task.batches(0).batches[0]
    for similarity, held in ((0.4, 0), (0.6, 1)):
        monkeypatch.setattr(language, "token_similarity", lambda _, s=similarity: s)
        task.loss(model, batch)
        task.after_step(0)
        assert task.held == held
