"""Adaptive depth: never stopping is the plain model, and stopping is the same cached or not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from deeploop.models import AdaptiveDepth, ExitRule, GPTConfig, LoopedGPT
from deeploop.nn.documents import document_bounds

CONFIG = GPTConfig(blocks=2, rounds=6, width=16, heads=2, hidden=24, vocabulary=50, context=24)
RULES = [ExitRule("change", 0.25), ExitRule("kl", 0.05), ExitRule("gate", 0.7)]
PARTS = {"prelude": 1, "coda": 2, "injection": "linear", "first_state": "noise", "exit_gate": True}


@pytest.fixture(
    scope="module",
    params=[{}, {"rule": "flat", "exit_gate": True}, PARTS],
    ids=["deeploop", "flat", "parts"],
)
def model(request):
    model = LoopedGPT(replace(CONFIG, **request.param)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.3, generator=generator)
        model.embedding.weight.mul_(20)
        if model.injection is not None:
            model.injection.weight.add_(torch.randn(16, 32, generator=generator))
        if model.exit_gate is not None:
            model.exit_gate.weight.normal_(0, 0.3, generator=generator)
            model.exit_gate.bias.fill_(-0.5)
    return model


@pytest.fixture
def tokens():
    return torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(2))


def test_documents_that_are_kept_apart_are_those_of_the_plain_model(model, tokens):
    starts = torch.zeros(tokens.shape, dtype=torch.bool)
    starts[0, 7] = starts[2, 3] = starts[2, 11] = True
    bounds = document_bounds(starts)
    adaptive = AdaptiveDepth(model, ExitRule("change", 0.0))
    output, expected = adaptive(tokens, documents=bounds), model(tokens, documents=bounds)
    torch.testing.assert_close(output.states, expected.states, rtol=0, atol=1e-5)


@pytest.mark.parametrize("criterion", ["change", "kl"])
def test_threshold_zero_is_the_plain_model(model, tokens, criterion):
    adaptive = AdaptiveDepth(model, ExitRule(criterion, 0.0))
    expected = model(tokens, tokens)
    output = adaptive(tokens, tokens)
    torch.testing.assert_close(output.states, expected.states, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.loss, expected.loss)
    assert adaptive.mean_rounds == 6


def test_a_huge_threshold_is_one_round(model, tokens):
    adaptive = AdaptiveDepth(model, ExitRule("change", 1e9))
    states = adaptive(tokens).states
    model.set_rounds(1)
    expected = model(tokens).states
    model.set_rounds(6)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
    assert adaptive.mean_rounds == 1


@pytest.mark.parametrize("criterion", ["change", "kl"])
def test_the_smallest_distance_is_the_threshold_at_which_tokens_begin_to_exit(model, tokens, criterion):
    def run(threshold):
        adaptive = AdaptiveDepth(model, ExitRule(criterion, threshold))
        adaptive(tokens)
        return adaptive

    smallest = run(0.0).smallest
    assert run(smallest * 0.99).mean_rounds == 6
    assert run(smallest * 1.01).mean_rounds < 6


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.criterion)
@pytest.mark.parametrize("pieces", [20 * [1], [7, 1, 12]], ids=["one by one", "chunks"])
def test_a_continued_sequence_equals_one_read_at_once(model, tokens, rule, pieces):
    if rule.criterion == "gate" and model.exit_gate is None:
        pytest.skip("has no gate")
    whole, parts = AdaptiveDepth(model, rule), AdaptiveDepth(model, rule)
    expected = whole(tokens).states
    cache = parts.new_cache()
    states = torch.cat([parts(piece, cache=cache).states for piece in tokens.split(pieces, 1)], 1)
    assert 1 < whole.mean_rounds < 6  # some stop early, some don't
    assert parts.rounds_used == whole.rounds_used
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)


def test_a_stopped_token_repeats_its_last_keys_and_values(model, tokens):
    """Against a loop that keeps every token's keys and values by hand, for one sequence."""
    rule, (B, T) = RULES[0], tokens.shape
    context, _ = model.begin(tokens)
    x, entered = model.enter_loop(tokens, context)
    active = torch.ones(B, T, dtype=torch.bool)
    kept = {}

    class ByHand:
        def update(self, k, v, block):
            for b in range(B):
                for t in range(T):
                    if active[b, t]:
                        kept[block, b, t] = k[b, :, t], v[b, :, t]
            pairs = [[kept[block, b, t] for t in range(T)] for b in range(B)]
            return tuple(
                torch.stack([torch.stack([pair[i] for pair in row], 1) for row in pairs]) for i in (0, 1)
            )

    for _ in range(6):
        before = x
        if model.injection is not None:
            x = torch.where(active[..., None], model.injection(x, entered), x)
        for block, layer in enumerate(model.blocks):
            x = torch.where(
                active[..., None], layer(x, context._replace(mask=None, cache=ByHand(), slot=block)), x
            )
        active = active & ((x - before).norm(dim=-1) / before.norm(dim=-1) >= rule.threshold)
    expected = model.final_norm(model.once("coda", x, context))
    torch.testing.assert_close(AdaptiveDepth(model, rule)(tokens).states, expected, rtol=0, atol=1e-5)


def test_kl_compares_what_successive_rounds_would_predict(model, tokens):
    """With a threshold between the first round's divergences, exactly those below stop there."""
    readout = {}
    for R in (1, 2):
        model.set_rounds(R)
        readout[R] = model.logits(model(tokens[:, :1]).states).log_softmax(-1)
    context, _ = model.begin(tokens[:, :1])
    start = model.once("coda", model.enter_loop(tokens[:, :1], context)[0], context)
    readout[0] = model.logits(model.final_norm(start)).log_softmax(-1)
    model.set_rounds(6)
    first = nn.functional.kl_div(readout[0], readout[1], log_target=True, reduction="none").sum(-1).flatten()
    low, middle, _ = first.sort().values.tolist()
    model.set_rounds(2)
    adaptive = AdaptiveDepth(model, ExitRule("kl", (low + middle) / 2))
    adaptive(tokens[:, :1])
    model.set_rounds(6)
    assert adaptive.rounds_used == 1 + 2 + 2


def test_a_gate_stops_a_token_once_the_sum_of_its_exits_reaches_the_threshold(tokens):
    """Against q(t) by its formula, from the states that the plain model has after every round."""
    model = LoopedGPT(replace(CONFIG, coda=2, exit_gate=True)).eval()
    with torch.no_grad():
        model.exit_gate.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(4))
    context, _ = model.begin(tokens[:, :1])
    x, _ = model.enter_loop(tokens[:, :1], context)
    left, exits = torch.ones(3), []
    for index in range(6):
        x = model.round(x, index, context)
        chance = torch.sigmoid(model.exit_logits(x))[:, 0]
        exits.append(left * chance)
        left = left * (1 - chance)
    reached = torch.stack(exits).cumsum(0).detach()  # (rounds, tokens)
    for threshold in (0.0, 0.4, 0.8, 1.0):
        adaptive = AdaptiveDepth(model, ExitRule("gate", threshold))
        adaptive(tokens[:, :1])
        expected = [1 + int((column[:-1] < threshold).sum()) for column in reached.T]
        assert adaptive.rounds_used == sum(expected)
    for threshold, rounds in ((0.0, 1), (1.0, 6)):  # all at once: the plain model of as many rounds
        states = AdaptiveDepth(model, ExitRule("gate", threshold))(tokens).states
        model.set_rounds(rounds)
        torch.testing.assert_close(states, model(tokens).states, rtol=0, atol=1e-5)
        model.set_rounds(6)


@pytest.mark.parametrize("logit", [20.0, 200.0])  # what is left is below 6e-8, or 0 in fp32
def test_a_gate_that_is_sure_does_not_stop_at_threshold_one(tokens, logit):
    model = LoopedGPT(replace(CONFIG, exit_gate=True)).eval()
    with torch.no_grad():
        model.exit_gate.bias.fill_(logit)
    adaptive = AdaptiveDepth(model, ExitRule("gate", 1.0))
    adaptive(tokens)
    assert adaptive.mean_rounds == 6


def test_what_a_model_has_not_is_an_error_of_one_line():
    plain = LoopedGPT(CONFIG)
    with pytest.raises(
        ValueError, match=r"^adaptive=gate: this model has no exit gate; train one with --mod"
    ):
        AdaptiveDepth(plain, ExitRule("gate", 0.5))
    coda = AdaptiveDepth(LoopedGPT(replace(CONFIG, coda=1)), ExitRule("kl"))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^adaptive=kl: can't keep documents apart with a coda; use change"):
        coda(tokens, documents=document_bounds(tokens > 0))
    with pytest.raises(ValueError, match=r"^threshold=1.5: must be 0 .one round. to 1 .all. of a gate"):
        ExitRule("gate", 1.5)


def test_a_bad_threshold_is_refused():
    with pytest.raises(ValueError, match="threshold=-1"):
        ExitRule("change", -1)
