"""Recorded steps are the steps that would have been called; the graphs themselves are tested on a GPU."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from deeploop.accelerate import install
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.train import replay as replay_module
from deeploop.train.distributed import World, open_world
from deeploop.train.gradients import GradientMemory
from deeploop.train.opening import open_run
from deeploop.train.replay import GraphReplay
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest
from iterate_runs import make_iterate_config

CONFIG = GPTConfig(blocks=2, rounds=3, width=128, heads=2, hidden=256, vocabulary=1000, context=64)
ALONE = World(0, 1, device=torch.device("cpu"))


def steps(rounds, *, recorded, device="cpu"):
    """Losses and the model, trained for one step at each of `rounds`, in micro-batches of two sizes."""
    model = LoopedGPT(CONFIG).to(device)
    assert device == "cpu" or install.install_rounds(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)

    def gradients(batch):
        tokens, targets = (tensor.to(device) for tensor in batch)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(tokens, targets).loss / 512
        loss.backward()
        return (loss.detach(),)

    said = []
    replay, memory = GraphReplay(gradients, model, said.append), GradientMemory(model)
    losses = []
    for model.rounds in rounds:
        if recorded:
            memory.begin_step()
        for size in (4, 4, 2):
            tokens = torch.randint(1000, (size, 64), generator=draw)
            losses += (replay if recorded else gradients)((tokens, tokens.roll(-1, 1)))
        optimizer.step()
        optimizer.zero_grad()
    assert said == []
    return torch.stack(losses).cpu(), model


def test_replayed_steps_are_the_steps_that_would_have_been_called(recordings):
    rounds = (3, 3, 2, 2, 3)
    expected, plain = steps(rounds, recorded=False)
    losses, model = steps(rounds, recorded=True)
    assert len(recordings) == 4  # two sizes at two numbers of rounds
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_least_used_graph_is_given_up_for_one_that_comes_twice_as_often(recordings, monkeypatch):
    monkeypatch.setattr(replay_module, "MOST_GRAPHS", 2)
    model = nn.Linear(3, 1, bias=False)
    replay = GraphReplay(lambda batch: model(batch[0]).sum().backward() or (), model, print)
    memory = GradientMemory(model)

    def recorded_after(*rounds):
        for model.rounds in rounds:
            memory.begin_step()
            replay((torch.ones(2, 3),))
            torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 2.0))
        return {key[-1] for key in replay._recorded}

    assert recorded_after(1, 2, 3) == set()  # what comes once is called
    assert recorded_after(1, 2, 2) == {1, 2}
    assert recorded_after(3, 3) == {1, 2}  # 1 came twice, 3 not yet four times
    assert recorded_after(3) == {2, 3}
    assert len(recordings) == 3


@pytest.mark.gpu
def test_graphs_train_as_called_kernels_do():
    rounds = (3, 3, 3, 2, 2, 3)
    expected, plain = steps(rounds, recorded=False, device="cuda")
    losses, model = steps(rounds, recorded=True, device="cuda")
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    assert losses[-1] < losses[0]
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (p - q[1]).norm() < 0.02 * q[1].norm(), name


def test_a_step_begins_at_zero_in_the_same_memory():
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1).double(), nn.Linear(1, 5, bias=False))
    model[2].requires_grad_(False)
    memory = GradientMemory(model)
    memory.begin_step()
    model[0](torch.ones(2, 3)).sum().backward()
    model[0](torch.ones(5, 3)).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, torch.full((1, 3), 7.0))
    trained = [*model[:2].parameters()]
    places = [p.grad.data_ptr() for p in trained]
    assert all(place % 16 == 0 for place in places)
    assert [p.grad.dtype for p in trained] == [p.dtype for p in trained]
    assert model[2].weight.grad is None
    model.zero_grad()
    memory.begin_step()
    assert [p.grad.data_ptr() for p in trained] == places
    assert not any(p.grad.any() for p in trained)


def refused(monkeypatch, error, on_leaving=None):
    """A linear model's replay whose recording fails."""

    @contextmanager
    def refuse(graph, **_):
        try:
            yield
            raise error
        except RuntimeError:
            raise (on_leaving or error)  # noqa: B904

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    model, said = nn.Linear(3, 1, bias=False), []
    nn.init.ones_(model.weight)
    return GraphReplay(lambda batch: (model(batch[0]).sum().detach(),), model, said.append), said


def test_without_memory_for_a_graph_the_batch_is_called(monkeypatch):
    replay, said = refused(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    for _ in range(3):
        assert replay((torch.ones(2, 3),)) == (6,)
    assert said == ["no memory for a CUDA graph: kernels are launched one by one"]


def test_what_cannot_be_recorded_is_an_error_that_names_the_cause(monkeypatch):
    cause = RuntimeError("operation not permitted when stream is capturing\nCompile with …")
    replay, _ = refused(monkeypatch, cause, RuntimeError("operation failed due to a previous error"))
    replay((torch.ones(2, 3),))
    with pytest.raises(ValueError, match=r"not permitted when stream is capturing\); .* --device.no-graph"):
        replay((torch.ones(2, 3),))


def test_a_driver_without_memory_is_no_fault_of_the_recording(monkeypatch):
    cause = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …")
    replay, _ = refused(monkeypatch, cause, RuntimeError("operation failed due to a previous error"))
    replay((torch.ones(2, 3),))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        replay((torch.ones(2, 3),))


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_replays_where_its_execution_says_so(tiny_config, execute, recordings, graph):
    execute(graph=graph)
    queue = StepQueue(open_run(tiny_config(), ALONE), StopRequest())
    for _ in range(2):
        queue.take()
    assert len(recordings) == graph


def test_an_iterated_task_is_recorded_once_for_each_number_of_rounds(tmp_path, execute, recordings):
    found = {}
    for graph in (False, True):
        execute(graph=graph)
        config = make_iterate_config(tmp_path / str(graph), optim={"steps": 30})
        queue = StepQueue(open_run(config, ALONE), StopRequest())
        found[graph] = [queue.take().loss for _ in range(20)]
    assert {recording.rounds for recording in recordings} == {1, 2, 3}
    assert len(recordings) == 3
    assert found[True] == pytest.approx(found[False], rel=1e-6)


PARTS = {"prelude": 1, "coda": 1, "injection": "gated", "first_state": "noise", "rule": "flat"}


@pytest.mark.parametrize("gate", [False, True])
def test_a_recurrent_run_is_recorded_once_for_each_number_of_rounds_that_comes_again(
    gate, tiny_config, execute, recordings
):
    """With drawn rounds, drawn first states, and a truncated gradient or an exit gate."""
    found, rounds = {}, {"sample": "uniform", "backprop": 0 if gate else 2}
    for graph in (False, True):
        execute(graph=graph)
        config = tiny_config(
            str(graph), model=PARTS | {"exit_gate": gate}, rounds=rounds, optim={"steps": 20}
        )
        queue = StepQueue(open_run(config, ALONE), StopRequest())
        results = [queue.take() for _ in range(12)]
        found[graph] = [result.loss for result in results]
    drawn = [result.rounds for result in results]
    assert {recording.rounds for recording in recordings} == {R for R in drawn if drawn.count(R) > 1}
    assert found[True] == pytest.approx(found[False], rel=1e-6)


@pytest.mark.parametrize("kind", ["hrm", "trm"])
def test_segments_of_a_reasoner_are_replayed_over_the_same_memory(
    kind, make_puzzle_config, tmp_path, execute, recordings
):
    """Slots halt and are refilled, in two micro-batches: the weights, puzzle rows and slots are the same."""
    found = {}
    for graph in (False, True):
        execute(graph=graph)
        config = make_puzzle_config(tmp_path / str(graph), kind, device={"micro_batch": 4})
        run = open_run(config, ALONE)
        queue = StepQueue(run, StopRequest())
        for _ in range(8):
            queue.take()
        assert 0 < run.task.slots.steps.sum() < 8 * len(run.task.slots.steps)
        found[graph] = {**run.model.state_dict(), **run.task.slots.tensors()}
    assert len(recordings) == 1
    assert all(torch.equal(own, found[True][name]) for name, own in found[False].items())


@pytest.mark.gpu
@pytest.mark.parametrize("injection", ["none", "add", "linear", "gated"])
def test_a_recurrent_run_trains_alike_with_graphs_and_without(injection, tiny_config):
    """Kernels in a chain, with the injection between rounds and the earlier rounds outside of the graph."""
    found = {}
    parts = {"prelude": 1, "coda": 1, "injection": injection, "rule": "flat", "width": 128, "hidden": 256}
    sampled = {"sample": "uniform", "backprop": 0 if injection == "none" else 2}
    noise = {} if injection == "none" else {"first_state": "noise"}
    for name, device in (
        ("graph", {"kind": "cuda"}),
        ("kernels", {"kind": "cuda", "graph": False}),
        ("eager", {"kind": "cuda", "compile": "off"}),
    ):
        config = tiny_config(name, model=parts | noise, rounds=sampled, optim={"steps": 20}, device=device)
        with open_world(config.device) as world:
            run = open_run(config, world)
            queue = StepQueue(run, StopRequest())
            found[name] = [queue.take().loss for _ in range(12)]
            assert run.execution.graph == (name == "graph")
            run.close()
    assert found["graph"] == pytest.approx(found["kernels"], rel=2e-3)
    assert found["kernels"] == pytest.approx(found["eager"], rel=2e-2)


def test_replicas_name_parameters_that_nobody_used():
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "idle": nn.Linear(3, 1)})
    memory = GradientMemory(model)
    memory.begin_step()
    with (
        pytest.raises(
            ValueError, match=r"idle.bias, idle.weight: got no gradient in the first step; .*freeze"
        ),
        memory.all_used(ALONE),
    ):
        model["used"](torch.ones(2, 3)).sum().backward()
    model["idle"].requires_grad_(False)
    memory = GradientMemory(model)
    memory.begin_step()
    with memory.all_used(ALONE):
        model["used"](torch.ones(2, 3)).sum().backward()
