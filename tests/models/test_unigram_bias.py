"""The output bias: where it starts, and that every way to a probability adds it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from deeploop.models import GPTConfig, LoopedGPT
from deeploop.rules import NAMED

TINY = GPTConfig(blocks=2, rounds=2, width=16, heads=2, hidden=24, vocabulary=50, context=12)
COUNTS = torch.arange(50) * 3  # word 0 was never seen


def build(**fields):
    model = LoopedGPT(replace(TINY, unigram_bias=True, **fields)).double()
    model.set_unigram_bias(COUNTS)
    return model


@pytest.fixture
def tokens():
    return torch.randint(50, (3, 10), generator=torch.Generator().manual_seed(2))


def test_it_starts_at_the_smoothed_log_frequencies():
    model = build()
    seen = torch.cat([COUNTS + 1.0, torch.ones(14)]).double()
    torch.testing.assert_close(model.output_bias.detach().exp(), seen / (COUNTS.sum() + 64))
    assert (model.output_bias[50:] == model.output_bias.min()).all()


def test_without_states_the_model_predicts_the_frequencies(tokens):
    model = build().eval()
    with torch.no_grad():
        probabilities = model.logits(torch.zeros(16).double()).softmax(-1)
        model.final_norm.weight.zero_()
        loss = model(tokens, tokens).loss
    torch.testing.assert_close(probabilities, (COUNTS + 1.0).double() / (COUNTS.sum() + 50))
    torch.testing.assert_close(loss, -probabilities[tokens].log().sum())


@pytest.mark.parametrize("rule", NAMED)
@pytest.mark.parametrize("training", [True, False])
def test_loss_logits_and_gradient_carry_it(training, rule, tokens):
    model, targets = build(mup_base_width=40, rule=rule).train(training), tokens.roll(-1, 1)
    output = model(tokens, targets)
    words = 64 if training else 50
    logits = output.states * 2.5 @ model.embedding.weight[:words].T + model.output_bias[:words]
    if not training:
        torch.testing.assert_close(model.logits(output.states), logits)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(output.loss, expected)
    grads = (torch.autograd.grad(loss, model.output_bias)[0] for loss in (output.loss, expected))
    torch.testing.assert_close(*grads)


def test_bf16_logits_keep_the_bias_exact():
    model = LoopedGPT(replace(TINY, unigram_bias=True))
    model.set_unigram_bias(COUNTS)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(model.logits(torch.zeros(2, 16))[1], model.output_bias[:50])


def test_the_other_weights_are_those_of_a_model_without():
    state, plain = build().float().state_dict(), LoopedGPT(TINY).state_dict()
    assert state.keys() - plain.keys() == {"output_bias"}
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())


def test_a_model_without_it_refuses_counts():
    with pytest.raises(ValueError, match=r"model\.unigram_bias=False"):
        LoopedGPT(TINY).set_unigram_bias(COUNTS)
