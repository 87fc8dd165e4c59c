"""A reasoner whose host is a step ahead: the same run, and a bad step leaves no trace.

On a CPU a device that takes the step by itself is played by the optimizer's own conditional step.
"""

import pytest
import torch
from acting import stopped_in
from test_loss_readback import lines, note_lag

from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.tasks.puzzles.task import PuzzleTask
from deeploop.train import steps
from deeploop.train.checkpoint import read_state
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

ALONE = World(0, 1, torch.device("cpu"))
KINDS = ["hrm", "trm"]
PARTS = ("model", "optimizer", "task", "rng")
RARELY = {
    "optim": {"steps": 14},
    "data": {"validate_every": 7},
    "checkpoint": {"every": 100},
    "log": {"every": 5},
    "device": {"micro_batch": 4},
}


@pytest.fixture
def late(monkeypatch, execute):
    """Runs are read back a step behind; by how many steps each was."""
    execute(lag=1)
    return note_lag(monkeypatch)


@pytest.fixture(scope="session")
def sudoku(tmp_path_factory):
    """Puzzles of 4 × 4, which all share one vector."""
    return build_sudoku(tmp_path_factory.mktemp("sudoku") / "sudoku4", size=4, train=24, test=8).folder


def end_of(folder):
    """Bytes of the last checkpoint's tensors, and where its data stand."""
    saved = last_checkpoint(folder)
    tensors = {name: (saved / f"{name}.safetensors").read_bytes() for name in PARTS}
    return tensors, {key: read_state(saved)[key] for key in ("step", "loader", "segment", "tokens")}


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("puzzles", ["boards", "sudoku"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reasoner_that_is_read_back_behind_is_the_reasoner(
    make_puzzle_config, tmp_path, kind, puzzles, clip, request, monkeypatch
):
    changes = {**RARELY, "optim": {"steps": 14, "clip": clip}}
    changes["data"] = {"validate_every": 7, "path": request.getfixturevalue(puzzles)}
    if clip:  # where the device clips, it divides by the inverse: let it do so in both
        monkeypatch.setattr(steps, "supports_conditional_step", lambda optimizer: True)
    plain = make_puzzle_config(tmp_path / "plain", kind, **changes)
    train(plain)
    seen = request.getfixturevalue("late")
    behind = make_puzzle_config(tmp_path / "late", kind, **changes)
    train(behind)
    assert lines(behind) == lines(plain)
    assert end_of(behind.out) == end_of(plain.out)
    # Logged at 5, 10 and 14, validated at 7 and 14: these are known at once, and with them those before.
    assert seen == [0 if step in (5, 7, 10, 14) else 1 for step in range(1, 15)]


@pytest.mark.parametrize("kind", KINDS)
def test_asked_to_stop_it_settles_what_is_under_way_and_resumes_to_the_same_end(
    make_puzzle_config, tmp_path, kind, late
):
    train(make_puzzle_config(tmp_path / "whole", kind, **RARELY))
    stopped = stopped_in(8, make_puzzle_config(tmp_path / "cut", kind, **RARELY))
    # Asked in step 8, known when step 9 is under way.
    assert (stopped["ended"], stopped["step"]) == ("stopped", 9)
    assert late[-2:] == [1, 0]
    train(make_puzzle_config(tmp_path / "cut", kind, resume=True, **RARELY))
    assert end_of(tmp_path / "cut") == end_of(tmp_path / "whole")


def trained(run):
    """Weights, puzzle rows, moments and averages, copied."""
    moments = {
        f"{name}:{index}": value
        for index, own in enumerate(run.optimizer.state.values())
        for name, value in own.items()
        if name != "step"
    }
    return {name: value.clone() for name, value in {**run.model.state_dict(), **moments}.items()}


def assert_same(one, two):
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def third_step(monkeypatch):
    """`third_step(spoil)`: the loss of that step's first micro-batch is spoiled, whenever it is computed."""
    real, batches = PuzzleTask.loss, []

    def plan(spoil):
        def loss(task, model, batch):
            if not any(batch is known for known in batches):
                batches.append(batch)
            spoiled = len(batches) >= 5 and batch is batches[4]  # two in each step
            return spoil(model, real(task, model, batch), spoiled)

        monkeypatch.setattr(PuzzleTask, "loss", loss)

    return plan


def nan_loss(model, loss, spoiled):
    return loss * float("nan") if spoiled else loss


class Infinite(torch.autograd.Function):
    """Passes a weight on, and its gradient as infinite."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("inf"))


def infinite_gradient(model, loss, spoiled):
    return loss + 0 * Infinite.apply(model.head.weight).sum() if spoiled else loss


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan_loss, "step 3: loss nan, .* first non-finite tensor: gradient of embedding.weight;"),
        (infinite_gradient, r"step 3: loss \d.*norm inf; first non-finite tensor: gradient of head.weight;"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_and_the_one_behind_it_leave_everything_as_it_was(
    make_puzzle_config, tmp_path, kind, late, third_step, spoil, message
):
    """The step behind it is finite by itself, for the spoiled states were never carried."""
    third_step(spoil)
    run = open_run(make_puzzle_config(tmp_path, kind, **RARELY), ALONE)
    queue = StepQueue(run, StopRequest())
    assert [result.step for _ in range(2) for result in queue.advance()] == [1]
    before, slots = trained(run), run.task.slots
    assert run.model.puzzles.any()
    assert [result.step for result in queue.advance()] == [2]
    assert_same(trained(run), before)
    assert run.task.slots is not slots
    with pytest.raises(FloatingPointError, match=message):
        queue.advance()
    assert late == [1, 1, 1]
    assert_same(trained(run), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_that_is_the_last_one_queued_has_its_own_report(
    make_puzzle_config, tmp_path, kind, late, third_step
):
    """Settle the previous step first, as if a line or a validation were due."""
    third_step(infinite_gradient)
    run = open_run(make_puzzle_config(tmp_path, kind, **RARELY), ALONE)
    queue = StepQueue(run, StopRequest())
    for _ in range(2):
        queue.advance()
    queue.submit()
    with pytest.raises(FloatingPointError, match=r"first non-finite tensor: gradient of head\.weight;"):
        queue.settle(everything=True)
