"""LoopedGPT with prelude, coda, injection and first state: the loop unrolled, scales, cache, cost."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from deeploop.models import GPTConfig, LoopedGPT
from deeploop.models.accounting import flops_per_token, parameter_count
from deeploop.nn import ScaledResidual
from deeploop.nn.context import Context
from deeploop.nn.injection import GatedInjection, LinearInjection

TINY = GPTConfig(
    blocks=2, rounds=3, prelude=1, coda=2, width=16, heads=2, hidden=24, vocabulary=50, context=12,
    injection="add", rule="flat",
)  # fmt: skip
INJECTIONS = ("none", "add", "linear", "gated")


def build(seed=3, **fields):
    """A tiny model in double precision whose weights were moved: fresh ones hide too much."""
    model = LoopedGPT(replace(TINY, **fields), seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.fixture
def tokens():
    return torch.randint(50, (3, 10), generator=torch.Generator().manual_seed(2))


def unrolled(model, tokens, targets, blocks):
    """The network as a stack of `blocks` that are visited once, written by hand."""
    context = Context((model.cos[: tokens.shape[1]], model.sin[: tokens.shape[1]]))
    e = model.input_norm(model.embedding(tokens))
    for block in blocks[:1]:
        e = block(e, context)
    starts = {"embedding": e, "zeros": 0 * e}
    if model.config.first_state == "noise":
        starts["noise"] = model.first_noise[: tokens.shape[1]] + 0 * e
    x = starts[model.config.first_state]
    w = model.injection
    for index in range(3):
        if model.config.injection == "add":
            x = x + e
        elif model.config.injection == "linear":
            x = torch.cat([x, e], -1) @ w.weight.T
        elif model.config.injection == "gated":
            step = torch.log1p(torch.exp(w.dt))
            x = torch.exp(-step * torch.exp(w.A_log)) * x + step * (e @ w.B.T)
        for block in blocks[1 + 2 * index : 3 + 2 * index]:
            x = block(x, context)
    for block in blocks[7:]:
        x = block(x, context)
    return model.read_out(x, targets).loss


@pytest.mark.parametrize("kind", ["flat", "deeploop", "prenorm"])
@pytest.mark.parametrize(
    ("injection", "first_state"),
    [
        ("none", "embedding"),
        ("add", "embedding"),
        ("add", "zeros"),
        ("linear", "embedding"),
        ("linear", "noise"),
        ("gated", "zeros"),
        ("gated", "noise"),
    ],
)
def test_an_untied_stack_has_the_same_loss_and_gradients(kind, injection, first_state, tokens):
    model = build(rule=kind, injection=injection, first_state=first_state)
    targets = tokens.roll(-1, 1)
    loss = model(tokens, targets).loss
    loss.backward()
    tied = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    stack = copy.deepcopy([*model.prelude, *[*model.blocks] * 3, *model.coda])
    copies = [copy.deepcopy(block) for block in stack]  # a list that repeats a block holds it once
    plain = unrolled(model, tokens, targets, copies)
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        if not name.startswith(("prelude", "blocks", "coda")):
            torch.testing.assert_close(parameter.grad, tied[name], rtol=1e-9, atol=1e-12)
    places = {"prelude": [[0]], "blocks": [[1, 3, 5], [2, 4, 6]], "coda": [[7], [8]]}
    for part, numbers in places.items():
        for k, visits in enumerate(numbers):
            for name, _ in copies[visits[0]].named_parameters():
                total = sum(copies[v].get_parameter(name).grad for v in visits)
                torch.testing.assert_close(tied[f"{part}.{k}.{name}"], total, rtol=1e-9, atol=1e-12)


def test_the_plain_loop_draws_and_names_what_it_always_did():
    plain = replace(TINY, prelude=0, coda=0, injection="none")
    model = LoopedGPT(plain, seed=5)
    assert plain.is_plain_loop
    assert not TINY.is_plain_loop
    generator = torch.Generator().manual_seed(5)
    std = 0.5 / math.sqrt(16)
    for name, parameter in model.named_parameters():
        assert name.split(".")[0] in ("embedding", "input_norm", "blocks", "final_norm")
        if parameter.ndim == 2:
            scale = 0.02 if "embedding" in name else std
            assert torch.equal(parameter, torch.empty(parameter.shape).normal_(0, scale, generator=generator))


def test_scales_and_draws_of_prelude_and_coda_are_those_of_one_visit():
    model = LoopedGPT(replace(TINY, rule="deeploop", rounds=8))
    alphas = {name: m.alpha for name, m in model.named_modules() if isinstance(m, ScaledResidual)}
    expected = {"prelude": math.sqrt(2), "blocks": math.sqrt(2 * 16), "coda": math.sqrt(4)}
    for name, alpha in alphas.items():
        assert alpha == pytest.approx(expected[name.split(".")[0]])
    big = LoopedGPT(replace(TINY, rule="deeploop", rounds=8, width=128, hidden=256, coda=1))
    for part, N in (("prelude", 1), ("blocks", 16), ("coda", 1)):
        drawn = big.get_parameter(f"{part}.0.mlp.branch.up.weight").std().item()
        assert drawn == pytest.approx(0.5 / math.sqrt(128) / math.sqrt(8 * N), rel=0.02)
    model.set_rounds(2, recompute_alpha=True)
    assert model.blocks[0].mlp.alpha == pytest.approx(math.sqrt(8))
    assert model.prelude[0].mlp.alpha == pytest.approx(math.sqrt(2))


def test_injections_start_as_stated():
    linear, gated = LinearInjection(4), GatedInjection(4)
    x, e = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert torch.equal(linear(x, linear.enter(e)), x)
    carried = gated(x, torch.zeros_like(x)) / x
    torch.testing.assert_close(carried, torch.full_like(x, math.sqrt(1 / 5)))
    torch.testing.assert_close(gated.enter(e), math.log(5) / 2 * e)
    with torch.no_grad():
        gated.A_log.fill_(30.0)
        gated.dt.fill_(-3.0)
    assert (gated(x, torch.zeros_like(x)) == 0).all()  # contracts, whatever is learned


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize("first_state", ["embedding", "noise"])
def test_a_cache_with_a_slot_per_visit_changes_nothing(injection, first_state, tokens):
    if (injection, first_state) == ("none", "noise"):
        return
    model = build(injection=injection, first_state=first_state).eval()
    whole = model(tokens).states
    cache = model.new_cache()
    assert cache.slots == model.visits == 1 + 2 * 3 + 2
    parts = [model(tokens[:, a:b], cache=cache).states for a, b in ((0, 4), (4, 5), (5, 10))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("recompute", ["round", "block"])
@pytest.mark.parametrize("injection", INJECTIONS)
def test_recomputed_activations_give_the_same_gradients(recompute, injection, tokens):
    found = []
    for how in ("off", recompute):
        model = build(injection=injection)
        model.recompute = how
        model(tokens, tokens).loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("injection", INJECTIONS)
def test_parameters_and_flops_are_counted(injection):
    config = replace(TINY, injection=injection)
    model = LoopedGPT(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    bare = replace(config, prelude=0, coda=0, injection="none")
    per_visit = (flops_per_token(replace(bare, rounds=2)) - flops_per_token(replace(bare, rounds=1))) / 2
    products = {"linear": 4, "gated": 1}.get(injection, 0)  # of e once, of the stream in each of 3 rounds
    assert flops_per_token(config) == flops_per_token(bare) + 3 * per_visit + 6 * products * 16**2


def test_a_model_without_memory_can_be_filled():
    config = replace(TINY, injection="gated", first_state="noise")
    with torch.device("meta"):
        model = LoopedGPT(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor, math.nan)
    model.init_weights(4)
    whole = LoopedGPT(config, seed=4)
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        assert torch.equal(tensor, {**dict(model.named_parameters()), **dict(model.named_buffers())}[name])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prelude": -1}, "model.prelude=-1: must be 0 (none) or more"),
        ({"injection": "sum"}, "model.injection=sum: must be one of none, add, linear, gated"),
        ({"injection": "none", "first_state": "zeros"}, "model.first_state=zeros: must be embedding with"),
        (
            {"injection": "linear", "first_state": "zeros"},
            "model.first_state=zeros: must be embedding or noise",
        ),
        (
            {"injection": "gated", "mup_base_width": 8},
            "model.mup_base_width=8: must be 0 with model.injection=",
        ),
    ],
)
def test_what_does_not_go_together_is_an_error_of_one_line(fields, message):
    with pytest.raises(ValueError) as caught:
        replace(TINY, **fields)
    assert str(caught.value).startswith(message)


def detached(model, tokens, kept):
    """The loss of the full graph in which the output of the rounds before the last `kept` is detached."""
    context = Context((model.cos[: tokens.shape[1]], model.sin[: tokens.shape[1]]))
    e = model.once("prelude", model.input_norm(model.embedding(tokens)), context)
    x = model.initial_state(e, 0)
    entered = None if model.injection is None else model.injection.enter(e)
    for index in range(model.rounds):
        if 0 < index == model.rounds - kept:  # the first state is no round's output
            x = x.detach()
        x = model.round(x, index, context, entered)
    return model.read_out(model.once("coda", x, context), tokens).loss


@pytest.mark.parametrize(
    ("kept", "recompute", "precision"),
    [
        (1, "off", "fp32"),
        (1, "round", "bf16"),
        (2, "off", "bf16"),
        (2, "round", "fp32"),
        (2, "block", "bf16"),
        (4, "block", "fp32"),
        (9, "round", "bf16"),
    ],
)
@pytest.mark.parametrize("injection", INJECTIONS)
def test_a_truncated_gradient_is_that_of_earlier_rounds_detached_bit_for_bit(
    injection, kept, recompute, precision, tokens
):
    def gradients(loss_of):
        model = build(injection=injection, rounds=4).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(model)
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    def truncated(model):
        model.backprop, model.recompute = kept, recompute
        return model(tokens, tokens).loss

    expected, found = gradients(lambda model: detached(model, tokens, kept)), gradients(truncated)
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    if injection != "none":
        assert all(gradient is not None for gradient in found)


def test_rounds_outside_of_the_graph_keep_nothing(tokens):
    def kept_bytes(rounds, backprop):
        model = build(rounds=rounds)
        model.backprop = backprop
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model(tokens, tokens)
        return sum(sizes)

    assert kept_bytes(32, 4) == kept_bytes(4, 4)
    assert kept_bytes(4, None) == kept_bytes(4, 4)
    assert kept_bytes(32, None) > 5 * kept_bytes(4, None)


def test_flops_of_a_truncated_gradient():
    full = flops_per_token(TINY, 8)
    assert full == flops_per_token(TINY, 8, 8)
    # Four more rounds that are not in the graph cost a third of four that are.
    more = flops_per_token(TINY, 8, 4) - flops_per_token(TINY, 4)
    assert more == pytest.approx((full - flops_per_token(TINY, 4)) / 3)
