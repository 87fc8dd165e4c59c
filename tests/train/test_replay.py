"""Recorded steps are the steps that would have been called; the graphs themselves are tested on a GPU."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn import fused
from deeploop.train.replay import Replay

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CONFIG = GPTConfig(blocks=2, rounds=3, width=128, heads=2, hidden=256, vocabulary=1000, context=64)


class FakeGraph:
    """Counts how often anything is replayed."""

    replays = 0

    def replay(self):
        FakeGraph.replays += 1


@pytest.fixture
def recorder(monkeypatch):
    @contextmanager
    def record(graph, **_):
        yield

    FakeGraph.replays = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def linear(gradients=None):
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)

    def called(batch):
        loss = model(batch[0]).sum()
        loss.backward()
        return loss.detach()

    said = []
    return model, Replay(gradients or called, model, said.append), said


def test_a_shape_is_called_once_and_then_recorded(recorder):
    replay = linear()[1]
    for rows, replays in ((2, 0), (2, 1), (2, 2), (5, 2), (5, 3), (2, 4)):
        replay.begin_step()
        replay((torch.ones(rows, 3),))
        assert FakeGraph.replays == replays


def test_a_step_begins_at_zero_in_the_same_memory(recorder):
    model, replay, _ = linear()
    replay.begin_step()
    replay((torch.ones(2, 3),))
    replay((torch.ones(5, 3),))
    torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 7.0))
    place = model.weight.grad.data_ptr()
    model.weight.grad = None  # as zero_grad does
    replay.begin_step()
    assert model.weight.grad.data_ptr() == place
    assert not model.weight.grad.any()


def test_what_cannot_be_recorded_is_called(monkeypatch):
    @contextmanager
    def refuse(graph, **_):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model, replay, said = linear()
    for _ in range(3):
        replay.begin_step()
        assert replay((torch.ones(2, 3),)) == 6
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 2.0))
    assert said == [
        "no CUDA graph, steps are launched one by one: operation not permitted when stream is capturing"
    ]


def steps(record, rounds):
    """Losses of a model trained for one step at each of `rounds`, two micro-batches a step."""
    model = LoopedGPT(CONFIG).cuda()
    assert fused.install_rounds(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(0)

    def gradients(batch):
        tokens, targets = (tensor.cuda() for tensor in batch)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, targets).loss / 1024
        loss.backward()
        return loss.detach()

    said = []
    replay = Replay(gradients, model, said.append)
    losses = []
    for model.rounds in rounds:
        if record:
            replay.begin_step()
        for _ in range(2):
            tokens = torch.randint(1000, (8, 64), generator=draw).pin_memory()
            losses.append((replay if record else gradients)((tokens, tokens.roll(-1, 1))).clone())
        optimizer.step()
        optimizer.zero_grad()
    graphs = sum(recorded is not None for recorded in replay._recorded.values())
    return torch.stack(losses).cpu(), model, graphs, said


@pytest.mark.gpu
@needs_gpu
def test_recorded_steps_train_as_called_ones_do():
    rounds = (3, 3, 3, 2, 2, 3)
    expected, plain, _, _ = steps(False, rounds)
    losses, model, graphs, said = steps(True, rounds)
    assert graphs == 2, said
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    assert losses[-1] < losses[0]
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p - q).norm() < 0.02 * q.norm(), name
