"""Adaptive computation time on hand-made cases: who halts, what q learns, which rows are new."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deeploop.config.loop import HaltingConfig
from deeploop.models.accounting import flops_per_segment
from deeploop.models.halting import (
    Slots,
    act_loss,
    answers_right,
    continue_target,
    halts,
    minimum_segments,
    puzzle_loss,
    solve,
    supervise,
)
from deeploop.models.reasoner import Carry, Reasoner, Segment
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape, TRMConfig
from deeploop.nn import stablemax_cross_entropy

HRM = HaltingConfig(segments=4)
TRM = HaltingConfig(segments=4, learn_continue=False)


def tensor(*values):
    return torch.tensor(values)


def carry(rows, value=0.0):
    return Carry(torch.full((rows, 3, 2), value), torch.full((rows, 3, 2), -value))


def test_all_halt_at_the_last_segment_whatever_q_says():
    q = tensor([-9.0, 9.0], [-9.0, 9.0])
    assert halts(q, tensor(3, 4), tensor(0, 0), HRM).tolist() == [False, True]


def test_the_model_halts_where_halting_is_worth_more():
    q = tensor([1.0, 0.5], [0.5, 1.0], [-2.0, -3.0])
    steps, none = tensor(1, 1, 1), tensor(0, 0, 0)
    assert halts(q, steps, none, HRM).tolist() == [True, False, True]
    assert halts(q, steps, none, TRM).tolist() == [True, True, False]


def test_exploration_puts_a_halt_off_until_its_minimum():
    q = tensor([5.0, -5.0]).expand(3, 2)
    assert halts(q, tensor(1, 2, 3), tensor(2, 2, 4), HRM).tolist() == [False, True, False]
    assert halts(q, tensor(4, 4, 4), tensor(4, 4, 4), HRM).all()


def test_the_minimum_is_uniform_from_two_for_the_share_that_explores():
    explore = tensor(0.0999, 0.0999, 0.05, 0.1, 0.9)
    draw = tensor(0.0, 0.34, 0.999, 0.0, 0.0)
    assert minimum_segments(explore, draw, HRM).tolist() == [2, 3, 4, 0, 0]
    draws = torch.linspace(0, 1, 15_001)[:-1]
    found = minimum_segments(torch.zeros_like(draws), draws, HaltingConfig(segments=16)).bincount()
    assert found[:2].tolist() == [0, 0]
    assert found[2:].tolist() == pytest.approx([1000] * 15, abs=2)
    assert minimum_segments(explore, draw, HaltingConfig(segments=1)).tolist() == [0] * 5


def test_continuing_is_worth_the_best_of_the_next_segment_and_on_the_last_its_halting():
    q_next = tensor([1.0, 2.0], [3.0, 2.0], [1.0, 2.0])
    found = continue_target(q_next, tensor(1, 3, 4), HRM)
    torch.testing.assert_close(found, tensor(2.0, 3.0, 1.0).sigmoid())


def test_padding_is_never_scored():
    labels = tensor([2, 0, 3], [0, 0, 1])
    right, solved = answers_right(tensor([2, 5, 3], [5, 5, 2]), labels)
    assert right.tolist() == [[True, False, True], [False, False, False]]
    assert solved.tolist() == [True, False]


def test_a_puzzles_loss_is_the_mean_over_its_scored_cells():
    logits, labels = torch.randn(2, 3, 4), tensor([1, 0, 2], [3, 0, 0])
    cells = stablemax_cross_entropy(logits, labels)
    expected = torch.stack([(cells[0, 0] + cells[0, 2]) / 2, cells[1, 0]])
    torch.testing.assert_close(puzzle_loss(logits, labels), expected)


def test_the_loss_is_the_answers_and_half_of_the_heads():
    logits = torch.zeros(2, 1, 3)
    logits[:, 0, 1] = 2.0  # both answer 1; the second is wrong
    q, target = tensor([0.3, -0.2], [1.5, 0.7]), tensor(0.25, 0.5)
    found = act_loss(Segment(carry(2), logits, q), tensor([1], [2]), target)
    answer = -math.log(3 / 5) - math.log(1 / 5)
    log_sigmoid = F.logsigmoid
    halt = -log_sigmoid(q[0, 0]) - log_sigmoid(-q[1, 0])
    go_on = -(target * log_sigmoid(q[:, 1]) + (1 - target) * log_sigmoid(-q[:, 1])).sum()
    assert float(found) == pytest.approx(answer + 0.5 * float(halt + go_on), rel=1e-6)
    without = act_loss(Segment(carry(2), logits, q), tensor([1], [2]), None)
    assert float(without) == pytest.approx(answer + 0.5 * float(halt), rel=1e-6)


class Counting:
    """A stand-in for a reasoner: its state counts segments, and each puzzle says when to halt."""

    def __init__(self):
        self.calls = []
        self.weight = torch.ones((), requires_grad=True)

    def __call__(self, carry, tokens, puzzle, *, q_only=False):
        assert not (q_only and torch.is_grad_enabled())  # what is trained is asked for its answer
        self.calls.append((len(tokens), torch.is_grad_enabled()))
        high = carry.high + self.weight
        count = high[:, 0, 0]
        logits = F.one_hot(count.long().clamp(max=9), 10)[:, None].float() * self.weight
        q = torch.stack([count - puzzle[:, 0] + 0.5, torch.zeros_like(count)], dim=-1)
        return Segment(Carry(high.detach(), carry.low), logits, q)


def slots(rows):
    return Slots.waiting(rows, 1, carry(rows))


def test_only_rows_that_halted_are_new_and_start_afresh():
    before = Slots(
        inputs=tensor([1], [2], [3]),
        labels=tensor([4], [5], [6]),
        ids=tensor(7, 8, 9),
        high=carry(3, 0.5).high,
        low=carry(3, 0.5).low,
        steps=tensor(4, 2, 1),
        halted=tensor(True, False, True),
    )
    after = before.refill_(
        tensor([10], [20], [30]), tensor([40], [50], [60]), tensor(70, 80, 90), carry(1, 8.0)
    )
    assert after.inputs.flatten().tolist() == [10, 2, 30]
    assert after.labels.flatten().tolist() == [40, 5, 60]
    assert after.ids.tolist() == [70, 8, 90]
    assert after.high[:, 0, 0].tolist() == [8.0, 0.5, 8.0]
    assert after.low[:, 0, 0].tolist() == [-8.0, -0.5, -8.0]
    assert (after.steps.tolist(), after.halted.tolist()) == ([0, 2, 0], [False] * 3)


def test_slots_split_and_join():
    whole = slots(5)
    pieces = whole.split(2)
    assert [len(piece.ids) for piece in pieces] == [2, 2, 1]
    joined = Slots.joined(pieces).tensors()
    assert all(torch.equal(joined[name], own) for name, own in whole.tensors().items())


def test_a_segment_of_training_moves_the_slots_on_and_looks_one_segment_ahead():
    model = Counting()
    puzzle = tensor([1.0, 0.0], [3.0, 0.0])  # halt after one and after three segments
    now = slots(2).refill_(tensor([1], [1]), tensor([1], [1]), tensor(0, 0), carry(1))
    history = []
    for _ in range(3):
        loss, now = supervise(model, now, puzzle, tensor(0, 0), HRM)
        assert loss.requires_grad
        assert not now.high.requires_grad
        history.append((now.steps.tolist(), now.halted.tolist(), now.high[:, 0, 0].tolist()))
    assert history[0] == ([1, 1], [True, False], [1.0, 1.0])
    assert history[2] == ([3, 3], [True, True], [3.0, 3.0])  # nobody refilled the first
    assert [grad for _, grad in model.calls] == [True, False] * 3


def test_without_a_continue_head_nothing_is_run_twice():
    model = Counting()
    supervise(model, slots(2), torch.ones(2, 2), tensor(0, 0), TRM)
    assert len(model.calls) == 1


def test_with_one_segment_there_is_no_next_one_to_learn_from():
    model, now, puzzle = Counting(), slots(2), torch.full((2, 2), 9.0)
    once = HaltingConfig(segments=1)
    loss, after = supervise(model, now, puzzle, tensor(0, 0), once)
    assert [grad for _, grad in model.calls] == [True]
    assert after.halted.all()
    without, _ = supervise(model, now, puzzle, tensor(0, 0), HaltingConfig(segments=1, learn_continue=False))
    assert torch.equal(loss, without)


@pytest.mark.parametrize("adaptive", [False, True])
def test_solving_runs_all_segments_or_until_each_puzzle_wants_to_halt(adaptive):
    model = Counting()
    puzzle = tensor([1.0, 0.0], [3.0, 0.0], [9.0, 0.0])
    inputs = torch.ones(3, 1, dtype=torch.long)
    (found,) = solve(model, carry(3), inputs, puzzle, HRM, [HRM.segments], adaptive=adaptive)
    assert found.segments.tolist() == [1, 3, 4]
    assert found.tokens.flatten().tolist() == ([1, 3, 4] if adaptive else [4, 4, 4])
    assert [rows for rows, _ in model.calls] == ([3, 2, 2, 1] if adaptive else [3] * 4)
    assert not any(grad for _, grad in model.calls)


@pytest.mark.parametrize("change", [{"segments": 0}, {"exploration": 1.5}])
def test_a_wrong_setting_is_named(change):
    with pytest.raises(ValueError, match=rf"halting\.{next(iter(change))}="):
        HaltingConfig(**change)


@pytest.mark.parametrize("segments", [1, 16])
@pytest.mark.parametrize(
    "model",
    [
        HRMConfig(width=32, heads=2, hidden=64, high_blocks=2, low_blocks=1),
        HRMConfig(width=32, heads=2, hidden=64, horizon="full"),
        TRMConfig(width=32, heads=2, hidden=64, low_cycles=3, mixer="mlp"),
    ],
)
def test_flops_of_a_segment_are_those_that_torch_counts(model, segments):
    shape = PuzzleShape(vocabulary=6, length=20, puzzle_ids=1)
    reasoner = Reasoner(model, shape)
    config = HaltingConfig(segments, learn_continue=isinstance(model, HRMConfig))
    now = Slots.waiting(4, 20, reasoner.initial(4))
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        loss, _ = supervise(reasoner, now, torch.zeros(4, 32, requires_grad=True), torch.zeros(4), config)
        loss.backward()
    expected = 4 * flops_per_segment(model, shape, forward_again=config.bootstraps_continue)
    assert counted.get_total_flops() == pytest.approx(
        expected, rel=0.005
    )  # the halting head, the second head
