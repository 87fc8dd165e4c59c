"""LoopedGPT: the loop, the maths of the whole forward pass, the head, test-time depth."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from deeploop.accelerate.known import obstacle
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn.context import Context
from shaken import shaken

TINY = GPTConfig(blocks=2, rounds=3, width=16, heads=2, hidden=24, vocabulary=50, context=12)
KINDS = ("prenorm", "postnorm", "deeploop", "factored", "averaged", "flat")


def build(dtype=torch.float32, **fields):
    """A tiny model with random gains and larger weights: fresh ones hide too much."""
    return shaken(LoopedGPT(replace(TINY, **fields)).to(dtype))


@pytest.fixture
def tokens():
    return torch.randint(50, (3, 10), generator=torch.Generator().manual_seed(2))


def rotary(model, length):
    return model.cos[:length], model.sin[:length]


@pytest.mark.parametrize("kind", KINDS)
def test_one_round_is_a_plain_stack_bit_for_bit(kind, tokens):
    model = build(rule=kind, rounds=1)
    x = model.input_norm(model.embedding(tokens))
    x = model.blocks[0](x, Context(rotary(model, 10)))
    x = model.blocks[1](x, Context(rotary(model, 10)))
    assert torch.equal(model(tokens).states, model.final_norm(x))


@pytest.mark.parametrize("kind", KINDS)
def test_three_rounds_are_the_list_three_times_bit_for_bit(kind, tokens):
    model = build(rule=kind, rounds=3)
    x = model.input_norm(model.embedding(tokens))
    for block in [*model.blocks, *model.blocks, *model.blocks]:
        x = block(x, Context(rotary(model, 10)))
    assert torch.equal(model(tokens).states, model.final_norm(x))


def reference_states(model, tokens, alpha):
    """A model by the paper's rule, written as functions of its parameters from Eq. (deeploop-block)."""
    w = dict(model.named_parameters())
    T, D = tokens.shape[1], TINY.head_size

    def norm(x, name):  # the flat block's outer norms have no weight
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.get(name + ".weight", 1.0)

    def rotate(x):  # (B, T, H, D)
        angle = torch.arange(T, dtype=x.dtype)[:, None] * 10000 ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        y = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat((y.real, y.imag), -1)

    def attention(x, at):
        q, k, v = ((x @ w[f"{at}.{m}.weight"].T).unflatten(-1, (-1, D)) for m in "qkv")
        q, k = norm(rotate(q), f"{at}.q_norm"), norm(rotate(k), f"{at}.k_norm")
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(D)
        weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", weights, v).flatten(2) @ w[f"{at}.o.weight"].T

    def mlp(x, at):
        gate, up, down = (w[f"{at}.{m}.weight"].T for m in ("gate", "up", "down"))
        return ((x @ gate) * torch.sigmoid(x @ gate) * (x @ up)) @ down

    x = norm(w["embedding.weight"][tokens], "input_norm")
    for _ in range(3):
        for k in range(2):
            for name, f in (("attention", attention), ("mlp", mlp)):
                at = f"blocks.{k}.{name}"
                x = norm(alpha * x + f(norm(x, f"{at}.inner"), f"{at}.branch"), f"{at}.outer")
    return norm(x, "final_norm")


def test_the_deeploop_model_equals_a_reference_from_the_paper(tokens):
    model = build(torch.float64)
    expected = reference_states(model, tokens, alpha=math.sqrt(12))  # N = 2·3
    torch.testing.assert_close(model(tokens).states, expected, rtol=0, atol=1e-5)  # fp32 rotary table


def test_the_flat_model_and_its_gradients_equal_the_reference_without_outer_gains(tokens):
    model = build(torch.float64, rule="flat")
    assert not [name for name, _ in model.named_parameters() if "outer" in name]
    states = model(tokens).states, reference_states(model, tokens, alpha=3 * math.sqrt(2))
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)
    weights = torch.randn(states[0].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours, exact = (torch.autograd.grad((x * weights).sum(), [*model.parameters()]) for x in states)
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("narrow", [False, True])
def test_a_flat_model_of_many_rounds_is_finite_at_its_start(narrow, tokens):
    model = LoopedGPT(replace(TINY, rule="flat", rounds=256))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
        output = model(tokens, tokens.roll(-1, 1))
    assert output.loss.item() / tokens.numel() == pytest.approx(math.log(64), abs=0.5)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_over_visits_of_the_gradients_is_the_gradient(kind, tokens):
    """Every visit gets its own clone of its block's parameters; K·R = 6 visits."""
    model = build(torch.float64, rule=kind)
    targets = tokens.roll(-1, 1)
    model(tokens, targets).loss.backward()

    x = model.input_norm(model.embedding(tokens))
    visits = []
    for _ in range(3):
        for k, block in enumerate(model.blocks):
            alias = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
            visits.append((k, alias))
            x = functional_call(block, alias, (x, Context(rotary(model, 10))))
    logits = model.final_norm(x) @ model.embedding.weight.T
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()

    for k, block in enumerate(model.blocks):
        for name, parameter in block.named_parameters():
            parts = [alias[name].grad for at, alias in visits if at == k]
            assert len(parts) == 3
            assert not torch.allclose(parts[0], parts[1])
            torch.testing.assert_close(sum(parts), parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_does_not_change_earlier_states(kind, tokens):
    model = build(rule=kind)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 50
    before, after = model(tokens).states, model(changed).states
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.isclose(before[:, 6:], after[:, 6:]).all(dim=-1).any()


def padded_loss(model, tokens, targets, words):
    logits = model(tokens).states @ model.embedding.weight[:words].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def test_padding_is_in_the_softmax_in_training_and_masked_in_evaluation(tokens):
    targets = tokens.roll(-1, 1)
    model = build(torch.float64)
    whole, real = (padded_loss(model, tokens, targets, words) for words in (64, 50))
    assert whole > real + 1
    torch.testing.assert_close(model(tokens, targets).loss, whole)
    torch.testing.assert_close(model.eval()(tokens, targets).loss, real)
    unmasked = build(torch.float64, mask_padding=False).eval()
    torch.testing.assert_close(unmasked(tokens, targets).loss, whole)


def test_targets_below_zero_are_not_counted(tokens):
    model, targets = build(torch.float64).eval(), tokens.roll(-1, 1)
    kept = targets.clone()
    kept[1:] = -1
    torch.testing.assert_close(model(tokens, kept).loss, model(tokens[:1], targets[:1]).loss)


def test_logits_cover_the_real_vocabulary_and_agree_with_the_loss(tokens):
    model, targets = build().eval(), tokens.roll(-1, 1)
    output = model(tokens, targets)
    logits = model.logits(output.states)
    assert (logits.shape, logits.dtype) == ((3, 10, 50), torch.float32)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(output.loss, expected)
    assert model(tokens).loss is None


def test_width_mup_multiplies_the_logits(tokens):
    plain, mup = build().eval(), build(mup_base_width=40).eval()
    states = plain(tokens).states
    assert torch.equal(mup(tokens).states, states)
    torch.testing.assert_close(mup.logits(states), plain.logits(states) * 2.5)
    expected = F.cross_entropy((plain.logits(states) * 2.5).flatten(0, 1), tokens.flatten(), reduction="sum")
    torch.testing.assert_close(mup(tokens, tokens).loss, expected)


def test_the_final_norm_is_switchable(tokens):
    with_norm, without = build(), build(final_norm=False)
    without.load_state_dict({k: v for k, v in with_norm.state_dict().items() if k != "final_norm.weight"})
    assert torch.equal(with_norm.final_norm(without(tokens).states), with_norm(tokens).states)


def alphas(model):
    return {r.alpha for block in model.blocks for r in (block.attention, block.mlp)}


def epsilons(model):
    return {r.epsilon for block in model.blocks for r in (block.attention, block.mlp)}


def test_set_rounds_keeps_the_trained_alpha(tokens):
    model = build()
    model.set_rounds(5)
    assert alphas(model) == {math.sqrt(12)}
    x = model.input_norm(model.embedding(tokens))
    for block in 5 * [*model.blocks]:
        x = block(x, Context(rotary(model, 10)))
    assert torch.equal(model(tokens).states, model.final_norm(x))


def test_set_rounds_recomputes_alpha_where_asked(tokens):
    model = build(recompute_alpha=True)
    model.set_rounds(5)
    assert alphas(model) == {math.sqrt(20)}
    model.set_rounds(3)
    assert alphas(model) == {math.sqrt(12)}
    assert torch.equal(model(tokens).states, build()(tokens).states)


def test_set_rounds_leaves_prenorm_at_one():
    model = build(rule="prenorm", recompute_alpha=True)
    model.set_rounds(5)
    assert alphas(model) == {1.0}


def test_set_rounds_recomputes_the_flat_alpha():
    model = build(rule="flat:gain=0.5")
    assert alphas(model) == {1.5 * math.sqrt(2)}
    model.set_rounds(5)
    assert alphas(model) == {1.5 * math.sqrt(2)}
    model.set_rounds(5, recompute_alpha=True)
    assert alphas(model) == {2.5 * math.sqrt(2)}


def test_set_rounds_treats_epsilon_as_it_does_alpha():
    model = build(rule="averaged")
    assert epsilons(model) == {1 / 6}
    model.set_rounds(5)
    assert epsilons(model) == {1 / 6}
    model.set_rounds(5, recompute_alpha=True)
    assert epsilons(model) == {1 / 10}


def test_bad_rounds_and_lengths_are_refused(tokens):
    model = build()
    with pytest.raises(ValueError, match=r"model\.rounds=0: must be at least 1"):
        model.set_rounds(0)
    assert model.rounds == 3
    with pytest.raises(ValueError, match=r"tokens of length 13: must be at most model\.context=12"):
        model(torch.zeros(1, 13, dtype=torch.long))


def test_autocast_stays_near_fp32(tokens):
    model, targets = build(), tokens.roll(-1, 1)
    exact = model(tokens, targets).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(tokens, targets)
    output.loss.backward()
    assert output.states.dtype == output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, exact, rtol=0.02, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_state_dict_holds_the_parameters_and_no_tables(tokens):
    model = build()
    state = model.state_dict()
    assert set(state) == {name for name, _ in model.named_parameters()}
    other = LoopedGPT(model.config, seed=5)
    other.load_state_dict(state)
    assert torch.equal(other(tokens).states, model(tokens).states)


def test_layernorm_scaling_numbers_stored_blocks_and_not_visits():
    around = {"prelude": 1, "coda": 1}
    model = LoopedGPT(GPTConfig(rule="lnscale", blocks=2, rounds=3, width=16, heads=2, hidden=24, **around))
    blocks = (*model.prelude, *model.blocks, *model.coda)
    assert [block.mlp.input_scale for block in blocks] == [1.0, 2**-0.5, 3**-0.5, 0.5]
    assert [block.attention.input_scale for block in blocks] == [block.mlp.input_scale for block in blocks]
    assert obstacle(model.blocks[0], "blocks.0") == (
        "blocks.0.attention has rule=lnscale, which the Triton kernels do not know"
    )
