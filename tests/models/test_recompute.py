"""Recomputation: the same gradients, fewer saved bytes, the blocks run as often as said; its estimates."""

import pytest
import torch

from deeploop.models import Block, GPTConfig, HRMConfig, LoopedGPT, PuzzleShape, Reasoner, TRMConfig
from deeploop.models.accounting import activation_bytes, reasoner_activation_bytes
from deeploop.models.reasoner import ReasonerBlock
from deeploop.nn.context import Context
from deeploop.nn.layers import rotary_table

WAYS = ["off", "round", "block"]
REASONERS = {"hrm": HRMConfig, "trm": TRMConfig}


def make_gpt(rounds, recompute="off", **changes):
    shape = {"blocks": 2, "width": 32, "heads": 2, "hidden": 48, "vocabulary": 64, "context": 16} | changes
    model = LoopedGPT(GPTConfig(rounds=rounds, **shape))
    model.recompute = recompute
    return model


def make_reasoner(kind, recompute, horizon):
    config = REASONERS[kind](width=32, heads=2, hidden=48, horizon=horizon, rule="deeploop")
    model = Reasoner(config, PuzzleShape(vocabulary=7, length=9, puzzle_ids=3), seed=1).double()
    with torch.no_grad():
        model.halting.weight.normal_(generator=torch.Generator().manual_seed(0))
    model.recompute = recompute
    return model


def gpt_loss(model, rows=2):
    tokens = torch.arange(rows * 16).view(rows, 16) * 7 % 64
    return model(tokens, tokens.flip(1)).loss


def segment_loss(model):
    tokens = torch.arange(18).view(2, 9) % 7
    segment = model(model.initial(2), tokens, model.puzzle_rows(torch.tensor([0, 2])))
    return segment.logits.square().sum() + segment.q.sum()


def block_calls(model, loss):
    """Block forwards of a forward and backward pass."""
    calls = []
    blocks = [m for m in model.modules() if isinstance(m, (Block, ReasonerBlock))]
    for block in blocks:
        # Before the call: the last one of a recomputation stops as soon as all is there again.
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    loss(model).backward()
    return len(calls)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("block", ["deeploop", "flat"])
def test_the_gradients_of_a_gpt_do_not_change(way, rounds, block):
    models = [make_gpt(rounds, recompute, rule=block).double() for recompute in ("off", way)]
    losses = [gpt_loss(model) for model in models]
    assert losses[0] == losses[1]
    for loss in losses:
        loss.backward()
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("horizon", ["last_call", "last_cycle", "full"])
@pytest.mark.parametrize("kind", REASONERS)
def test_the_gradients_of_a_reasoner_do_not_change(kind, way, horizon):
    models = [make_reasoner(kind, recompute, horizon) for recompute in ("off", way)]
    for model in models:
        segment_loss(model).backward()
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(("way", "calls"), [("off", 6), ("round", 6 + 4), ("block", 6 + 5)])
def test_all_but_the_last_are_computed_twice(way, calls):
    """2 blocks × 3 rounds: two rounds again, or five visits."""
    assert block_calls(make_gpt(3, way), gpt_loss) == calls


@pytest.mark.parametrize(("way", "extra"), [("off", 0), ("round", 4), ("block", 7)])
def test_a_reasoner_recomputes_what_is_in_the_graph_alone(way, extra):
    """HRM's graph holds a call of L and one of H, four blocks each; 2 · (2 · 4 + 4) blocks run forward."""
    assert block_calls(make_reasoner("hrm", way, "last_call"), segment_loss) == 24 + extra


@pytest.mark.parametrize("way", WAYS[1:])
def test_without_a_gradient_and_with_a_cache_nothing_is_recomputed(way):
    model, tokens = make_gpt(3, way), torch.arange(8).view(1, 8)
    expected = make_gpt(3)(tokens).states
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).states, expected, rtol=0, atol=0)
    cached = model(tokens, cache=model.new_cache()).states
    torch.testing.assert_close(cached, expected)
    assert cached.requires_grad


class Saved:
    """Bytes of what autograd holds after a forward pass, without the parameters; each memory counted once."""

    def __init__(self, model):
        self.own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
        self.held = {}

    def pack(self, tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self.own:
            self.held[memory.data_ptr()] = tensor
        return tensor

    def bytes(self, where=lambda tensor: True):
        return sum(t.untyped_storage().nbytes() for t in self.held.values() if where(t))


def saved_by(model, compute):
    saved = Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        compute()
    return saved


def test_saved_memory_is_flat_in_the_rounds():
    """Memory held after the forward pass; by round, it grows by one state of the stream per round."""

    def held(rounds, way):
        model = make_gpt(rounds, way, blocks=6, width=64, hidden=176)
        return saved_by(model, lambda: gpt_loss(model)).bytes()

    assert held(7, "off") > 5 * held(1, "off")
    assert held(7, "round") < 1.35 * held(1, "off")
    assert held(7, "block") < held(7, "round")


def kept_a_token(block, width, positions, rotary):
    """Bytes a token that a compiled block keeps in bf16, without the copies of its weights."""
    torch._dynamo.reset()
    block.compile(backend="aot_eager_decomp_partition")  # the compiler's own choice of what is kept
    x = torch.randn(3, positions, width, requires_grad=True)

    def compute():
        with torch.autocast("cpu", torch.bfloat16):
            block(x, Context(rotary))

    saved = saved_by(block, compute)
    weights = {tuple(sorted(p.shape)) for p in block.parameters() if p.ndim == 2}
    held = saved.bytes(lambda tensor: tuple(sorted(tensor.shape)) not in weights)
    return held / (3 * positions)


@pytest.mark.parametrize(("width", "heads", "hidden"), [(128, 2, 344), (96, 3, 416)])
def test_the_estimate_of_a_visit_is_what_autograd_keeps(width, heads, hidden):
    config = GPTConfig(blocks=1, rounds=1, width=width, heads=heads, hidden=hidden, vocabulary=64, context=64)
    found = kept_a_token(Block(config), width, 64, rotary_table(64, config.head_size))
    assert activation_bytes(config) == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize("mixer", ["attention", "mlp"])
def test_the_estimate_of_a_reasoners_visit_is_too(mixer):
    config = HRMConfig(width=128, heads=2, hidden=384, mixer=mixer, rule="deeploop")
    rotary = rotary_table(100, config.head_size)
    found = kept_a_token(ReasonerBlock(config, "H", 100), 128, 100, rotary)
    assert reasoner_activation_bytes(config, 100) == pytest.approx(found, rel=0.2)
