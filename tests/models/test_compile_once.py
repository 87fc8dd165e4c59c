"""Blocks are compiled once, not once a round: the backend is asked as often at R=1 as at R=7."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from deeploop.config.loop import HaltingConfig
from deeploop.models import GPTConfig, HRMConfig, LoopedGPT, PuzzleShape, Reasoner, Slots
from deeploop.models.halting import supervise


class Compiler:
    """A backend that counts the graphs it is given, forward and backward."""

    def __init__(self):
        torch._dynamo.reset()
        self.forward = self.backward = 0
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def _forward(self, graph, inputs):
        self.forward += 1
        return make_boxed_func(graph.forward)

    def _backward(self, graph, inputs):
        self.backward += 1
        return make_boxed_func(graph.forward)

    @property
    def count(self):
        return self.forward, self.backward

    def compile(self, *blocks):
        for block in blocks:
            block.compile(backend=self.backend, fullgraph=True)


@pytest.fixture
def compiler():
    yield Compiler()
    torch._dynamo.reset()


def make_gpt(rounds=1, **changes):
    sizes = {"blocks": 3, "width": 32, "heads": 2, "hidden": 48, "vocabulary": 64, "context": 16}
    return LoopedGPT(GPTConfig(rounds=rounds, **sizes | changes))


def step(model):
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens).loss.backward()


@pytest.mark.parametrize("rounds", [1, 7])
def test_one_graph_serves_all_blocks_and_rounds(compiler, rounds):
    model = make_gpt(rounds)
    compiler.compile(*model.blocks)
    step(model)
    assert compiler.count == (1, 1)


@pytest.mark.parametrize("recompute", ["off", "round", "block"])
def test_another_depth_compiles_nothing(compiler, recompute):
    model = make_gpt(3)
    model.recompute = recompute
    compiler.compile(*model.blocks)
    for rounds in (3, 1, 7, 2):
        model.set_rounds(rounds)
        step(model)
    assert compiler.count == (1, 1)


def test_another_alpha_is_compiled_at_most_twice(compiler):
    model = make_gpt(3)
    compiler.compile(*model.blocks)
    for rounds in (3, 1, 7, 2, 5):
        model.set_rounds(rounds, recompute_alpha=True)
        step(model)
    # Once for the first number, once for any: the second time alpha becomes an input of the graph.
    assert compiler.count == (2, 2)


def test_an_epsilon_that_varies_with_the_rounds_is_compiled_once(compiler):
    model = make_gpt(4, rule="prenorm:q=0.5", recompute_alpha=True, kv_heads=1, prelude=1)
    compiler.compile(*model.prelude, *model.blocks)
    for rounds in (4, 1, 7, 2, 5):
        model.set_rounds(rounds)
        step(model)
        assert float(model.blocks[0].mlp.scale) == pytest.approx(rounds**-0.5)
    assert compiler.count == (1, 1)


def segment(model, rows=4):
    halting = HaltingConfig(segments=3)
    shape = model.shape
    slots = Slots.waiting(rows, shape.length, model.initial(rows))
    puzzle = model.puzzle_rows(slots.ids).requires_grad_()
    loss, _ = supervise(model, slots, puzzle, torch.zeros(rows), halting)
    loss.backward()


@pytest.mark.parametrize(
    ("cycles", "high", "recompute", "forward"),
    [(2, "", "off", 2), (5, "", "round", 2), (5, "deepnorm", "block", 3)],
)
def test_a_segment_is_compiled_once_in_the_graph_and_once_outside(compiler, cycles, high, recompute, forward):
    """Two modules with an alpha of their own need one graph more, in which alpha is an input."""
    sizes = {"width": 32, "heads": 2, "hidden": 48, "high_blocks": 2, "low_blocks": 3}
    config = HRMConfig(rule="deeploop", high_rule=high, cycles=cycles, **sizes)
    model = Reasoner(config, PuzzleShape(vocabulary=7, length=9, puzzle_ids=3))
    model.recompute = recompute
    compiler.compile(*(block for stack in model.stacks.values() for block in stack.blocks))
    for _ in range(2):
        segment(model)
    assert compiler.count == (forward, 1)
