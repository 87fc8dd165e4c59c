"""Fixtures of the tests of training: tiny boards, a run that takes a second, graphs without a GPU."""

from dataclasses import replace

import pytest

from deeploop.config.loop import HaltingConfig
from deeploop.config.optim import ReasonerOptimConfig
from deeploop.config.run import CheckpointConfig, DeviceConfig, LogConfig
from deeploop.tasks.language.task import LanguageTask
from deeploop.tasks.puzzles.config import PuzzleDataConfig
from deeploop.train import opening, steps
from deeploop.train.execution import Execution
from deeploop.train.replay import GraphReplay, Recorded
from puzzle_runs import MODELS, write_boards


@pytest.fixture(scope="session")
def boards(tmp_path_factory):
    """A folder of boards; a test that damages it copies it first."""
    return write_boards(tmp_path_factory.mktemp("puzzles") / "boards").folder


@pytest.fixture(scope="session")
def make_puzzle_config(boards):
    """`make_puzzle_config(out, "trm", optim={"steps": 3})`: a tiny run with some fields changed."""

    def make(out, kind="hrm", **changes):
        config, model = MODELS[kind]
        base = config(
            model=model,
            data=PuzzleDataConfig(path=boards, test_examples=7, validate_every=4),
            optim=ReasonerOptimConfig(
                steps=10, batch=8, warmup_steps=2, peak_lr=1e-2, ema=0.9 if kind == "trm" else 0.0
            ),
            halting=HaltingConfig(segments=3, exploration=0.5, learn_continue=kind == "hrm"),
            checkpoint=CheckpointConfig(every=4),
            device=DeviceConfig(kind="cpu"),
            log=LogConfig(every=1),
        )
        parts = {
            name: replace(getattr(base, name), **change) if isinstance(change, dict) else change
            for name, change in changes.items()
        }
        return replace(base, out=out, **parts)

    return make


@pytest.fixture
def execute(monkeypatch):
    """`execute(graph=True, lag=1)`: how runs are executed from here on, whatever this CPU could do."""

    def choose(*, graph=False, lag=0):
        chosen = Execution("eager", chained=False, precision="fp32", graph=graph, lag=lag)
        monkeypatch.setattr(opening, "choose_execution", lambda *_, **__: chosen)
        if lag:
            monkeypatch.setattr(steps, "supports_conditional_step", lambda optimizer: True)

    return choose


@pytest.fixture
def poison(monkeypatch):
    """`poison(3, float("nan"))`: the loss of the third micro-batch is that many times what it was."""

    def plan(call, factor):
        real, calls = LanguageTask.loss, []

        def poisoned(self, model, batch):
            calls.append(1)
            loss = real(self, model, batch)
            return loss * factor if len(calls) == call else loss

        monkeypatch.setattr(LanguageTask, "loss", poisoned)

    return plan


class Recording:
    """In place of a graph: does the work again, on the memory and at the rounds it was recorded at."""

    def __init__(self, replay, batch):
        self.replay_of, self.batch, self.rounds = replay, batch, getattr(replay._model, "rounds", None)
        self.left = []

    def replay(self):
        model = self.replay_of._model
        rounds = getattr(model, "rounds", None)
        model.rounds = self.rounds
        left = [tensor.clone() for tensor in self.replay_of._gradients(self.batch)]
        self.left.extend(left[len(self.left) :])
        for place, tensor in zip(self.left, left, strict=True):
            place.copy_(tensor)
        model.rounds = rounds


@pytest.fixture
def recordings(monkeypatch):
    made = []

    def record(self, batch):
        made.append(Recording(self, tuple(tensor.clone() for tensor in batch)))
        return Recorded(made[-1], made[-1].batch, made[-1].left)

    monkeypatch.setattr(GraphReplay, "_record", record)
    return made
