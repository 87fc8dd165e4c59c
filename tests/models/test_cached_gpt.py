"""The key-value cache: continuing a sequence gives what one pass over the whole of it gives."""

from dataclasses import replace

import pytest
import torch

from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn import KeyValueCache, causal_mask
from deeploop.nn.context import Context
from shaken import shaken

CONFIG = GPTConfig(blocks=2, rounds=3, width=16, heads=2, hidden=24, vocabulary=50, context=24)


def build(**fields):
    """Random gains and larger weights, so that every visit's keys and values differ."""
    return shaken(LoopedGPT(replace(CONFIG, **fields)).eval())


@pytest.fixture
def tokens():
    return torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def cached_logits(model, tokens, pieces, capacity=None):
    """Logits of all positions, the tokens given piece by piece."""
    cache = model.new_cache(capacity)
    parts = [model.logits(model(part, cache=cache).states) for part in tokens.split(pieces, dim=1)]
    assert cache.length == tokens.shape[1]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("rounds", [1, 3, 7])
@pytest.mark.parametrize("pieces", [20 * [1], [20], [7, 5, 8], [9, *(11 * [1])]], ids=str)
def test_cached_logits_equal_uncached(rounds, pieces, tokens):
    model = build(rounds=rounds)
    expected = model.logits(model(tokens).states).detach()
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(cached_logits(model, tokens, pieces), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", ["prenorm", "postnorm", "flat"])
def test_every_residual_takes_a_cache(block, tokens):
    model = build(rule=block)
    expected = model.logits(model(tokens).states).detach()
    torch.testing.assert_close(cached_logits(model, tokens, [6, 1, 13]), expected, rtol=0, atol=1e-5)


def test_the_cache_follows_the_rounds_set_at_test_time(tokens):
    model = build()
    model.set_rounds(5)
    expected = model.logits(model(tokens).states).detach()
    torch.testing.assert_close(cached_logits(model, tokens, [6, 1, 13], 20), expected, rtol=0, atol=1e-5)


def test_the_loss_of_a_continuation_is_the_whole_less_its_beginning(tokens):
    model, targets = build().double(), tokens.roll(-1, 1)
    cache = model.new_cache()
    with torch.no_grad():
        first = model(tokens[:, :8], targets[:, :8], cache).loss
        second = model(tokens[:, 8:], targets[:, 8:], cache).loss
        torch.testing.assert_close(first + second, model(tokens, targets).loss, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:.*CPU Autocast:UserWarning")
def test_the_cache_takes_the_dtype_of_autocast(tokens):
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        cache = model.new_cache()
        states = torch.cat([model(part, cache=cache).states for part in tokens.split([9, 1, 10], 1)], 1)
        assert cache.newest(0, 1)[0].dtype == torch.bfloat16
        torch.testing.assert_close(states, model(tokens).states, rtol=0, atol=0.1)


PARTS = {"prelude": 1, "coda": 1, "injection": "add", "rule": "flat"}


@torch.no_grad()
def decoded_by_hand(model, tokens, budget):
    """Token after token; every block of the loop keeps one list of keys and values per class of rounds."""
    kept = {}

    class ByHand:
        def update(self, k, v, slot):
            old = kept.get(slot, [])
            kept[slot] = [*old[: self.at], (k, v)]  # what this token left there in an earlier round goes
            return tuple(torch.cat([pair[i] for pair in kept[slot]], dim=2) for i in (0, 1))

    cache, states = ByHand(), []
    for cache.at in range(tokens.shape[1]):
        place = slice(cache.at, cache.at + 1)
        rotary = model.cos[place], model.sin[place]
        e = model.input_norm(model.embedding(tokens[:, place]))
        for k, block in enumerate(model.prelude):
            e = block(e, Context(rotary, None, cache, ("prelude", k)))
        x = e
        for index in range(model.rounds):
            x = x if model.injection is None else x + e
            for k, block in enumerate(model.blocks):
                x = block(x, Context(rotary, None, cache, (index % budget, k)))
        for k, block in enumerate(model.coda):
            x = block(x, Context(rotary, None, cache, ("coda", k)))
        states.append(model.final_norm(x))
    return model.logits(torch.cat(states, dim=1)), len(kept)


@pytest.mark.parametrize("parts", [{}, PARTS], ids=["loop", "parts"])
@pytest.mark.parametrize("budget", [1, 2])
def test_a_budget_keeps_the_last_round_of_each_class_in_whatever_pieces_a_text_comes(parts, budget, tokens):
    model = build(rounds=5, **parts)
    expected, slots = decoded_by_hand(model, tokens, budget)
    uncached = model.logits(model(tokens).states).detach()
    model.set_cache_rounds(budget)
    assert model.new_cache().slots == slots == 2 * budget + 2 * len(model.coda)
    for pieces in (20 * [1], [20], [7, 5, 8]):
        torch.testing.assert_close(cached_logits(model, tokens, pieces), expected, rtol=0, atol=1e-5)
    assert (expected - uncached)[:, 1:].abs().max() > 1e-3
    torch.testing.assert_close(expected[:, 0], uncached[:, 0], rtol=0, atol=1e-5)  # it has itself alone


@pytest.mark.parametrize(("rounds", "budget"), [(3, 3), (3, 9), (1, 1), (1, None)])
def test_a_budget_of_all_rounds_is_the_uncached_model(rounds, budget, tokens):
    model = build(rounds=rounds, **PARTS)
    model.set_cache_rounds(budget)
    expected = model.logits(model(tokens).states).detach()
    torch.testing.assert_close(cached_logits(model, tokens, [6, 1, 13]), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(decoded_by_hand(model, tokens, rounds)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("parts", "budget", "warned"),
    [
        *[({}, 1, True), ({}, 2, True), ({}, 3, False), ({}, None, False)],
        *[({"prelude": 1, "coda": 1}, 1, True), (PARTS, 1, False)],
    ],
)
def test_a_budget_is_warned_of_unless_the_loop_has_an_injection(parts, budget, warned):
    model = build(**parts)
    model.set_cache_rounds(budget)
    expected = (
        f"cache_rounds={budget}: a loop without injection may write much worse text without all 3 rounds; "
        f"deeploop validate RUN --cache-rounds {budget} all measures it"
    )
    assert model.budget_warning == (expected if warned else None)


def test_the_memory_of_a_budget_is_that_of_its_slots(tokens):
    model, taken = build(rounds=4), {}
    for budget in (1, 2, None):
        model.set_cache_rounds(budget)
        cache = model.new_cache(20)
        with torch.no_grad():
            model(tokens, cache=cache)
        taken[budget] = cache.nbytes
    assert taken[None] == 4 * taken[1] == 2 * taken[2] == 2 * 4 * 2 * tokens.numel() * 16 * 4


def test_slots_are_visits_and_hold_rotated_normalised_keys(tokens):
    model = build()
    seen = []

    class Recorder:
        def update(self, k, v, slot):
            seen.append((slot, k, v))
            return k, v

    rotary, mask = model.positions(tokens, None)
    x = model.input_norm(model.embedding(tokens))
    model.blocks[1](x, Context(rotary, mask, Recorder(), 5))
    ((slot, k, v),) = seen
    gain = model.blocks[1].attention.branch.k_norm.weight
    assert (slot, k.shape, v.shape) == (5, (3, 2, 20, 8), (3, 2, 20, 8))
    torch.testing.assert_close((k / gain).square().mean(-1), torch.ones(3, 2, 20), rtol=0, atol=1e-2)


def test_mask_is_the_lower_right_triangle():
    assert causal_mask(0, 5) is None
    assert causal_mask(5, 1) is None
    expected = torch.tensor([[key <= 2 + query for key in range(5)] for query in range(3)])
    assert torch.equal(causal_mask(2, 3), expected)


def test_mistakes_are_refused(tokens):
    model = build()
    cache = model.new_cache(10)
    with pytest.raises(ValueError, match="cache of capacity 10: is too small for 20 positions"):
        model(tokens, cache=cache)
    model.set_rounds(5)
    with pytest.raises(ValueError, match="cache of 6 slots: the model needs 10 now"):
        model(tokens, cache=cache)
    with torch.no_grad():
        cache = model.new_cache()
        model(tokens, cache=cache)
        with pytest.raises(ValueError, match=r"tokens of length 25: must be at most model\.context=24"):
            model(tokens[:, :5], cache=cache)
    with pytest.raises(
        ValueError, match=r"^cache_rounds=0: must be at least 1, or unset to keep all rounds$"
    ):
        model.set_cache_rounds(0)
    with pytest.raises(ValueError, match="capacity=-1: must be at least 1"):
        KeyValueCache(6, -1)
