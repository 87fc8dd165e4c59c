"""Decoding over a static cache: one token per step is what one pass over the whole text gives."""

from dataclasses import replace

import pytest
import torch

import deeploop
from deeploop.data.tokenizers import get_tokenizer
from deeploop.eval.decoding import KernelStep, ModuleStep
from deeploop.eval.generation import Sampling, generate, generate_batch
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn.cache import PositionedCache
from shaken import shaken

CONFIG = GPTConfig(blocks=2, rounds=3, width=48, heads=2, hidden=40, vocabulary=50, context=40)
PROMPTS = [[5, 10, 7, 25, 31], [3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 1, 2]]
HUGINN = {"prelude": 1, "coda": 1, "injection": "add", "first_state": "noise", "rule": "flat"}
CASES = {
    "once": {"rounds": 1},
    "loop": {},
    "add": HUGINN,
    "gated": HUGINN | {"injection": "gated", "first_state": "zeros", "unigram_bias": True},
    "linear": HUGINN | {"injection": "linear", "first_state": "embedding", "rule": "prenorm"},
    "postnorm": {"rule": "postnorm", "mup_base_width": 24, "tied_head": False},
    "llama": {"rule": "prenorm", "kv_heads": 1, "qk_norm": "none", "head_width": 12, "heads": 4},
    "qwen2": {"rule": "prenorm", "kv_heads": 1, "qk_norm": "none", "attention_bias": "qkv"},
    "qwen3": {"rule": "prenorm", "kv_heads": 2, "heads": 4, "qk_norm": "before-rotary", "mlp_bias": True},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL_STEPS = 5 if DEVICE == "cuda" else 1  # a step takes seconds in the interpreter


def build(**fields):
    """Random gains and larger weights, so that every visit and position counts."""
    model = shaken(LoopedGPT(replace(CONFIG, **fields)).eval())
    with torch.no_grad():
        if model.output_bias is not None:
            model.output_bias.normal_(0, 1, generator=torch.Generator().manual_seed(2))
        model.embedding.weight.mul_(20)
    return model.to(DEVICE)


def filled(model, texts, read):
    """A cache that holds the first `read` tokens of each text, at which they stand."""
    cache = model.new_cache(40)
    longest = max(read)
    model(torch.stack([text[:longest] for text in texts]), cache=cache)
    return PositionedCache(cache, torch.tensor(read, device=DEVICE))


def texts_of(batch):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(50, (batch, 38), generator=generator).to(DEVICE)


@torch.inference_mode()
def assert_steps_are_one_pass(model, make_step, batch, tolerance, start=3, steps=5):
    """Each sequence stands at a place of its own, the first at `start`; what lies behind it there is not what
    follows.
    """
    texts = texts_of(batch)
    expected = model.logits(model(texts).states)
    rows, read = torch.arange(batch, device=DEVICE), [start + 5 * row % 13 for row in range(batch)]
    cache = filled(model, texts, read)
    step = make_step(model, cache)
    for _ in range(steps):
        logits = step(texts[rows, cache.positions])
        assert (logits - expected[rows, cache.positions]).abs().max() < tolerance * expected.abs().max()
        cache.positions.add_(1)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_a_step_is_the_next_position_of_one_pass(fields):
    assert_steps_are_one_pass(build(**fields).double(), ModuleStep, 3, 1e-10)


def in_fp32(model, cache):
    return KernelStep(model, cache, torch.float32)


@pytest.mark.kernels
@pytest.mark.parametrize("batch", [3, 6])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_the_kernels_step_alike(fields, batch):
    assert_steps_are_one_pass(build(**fields), in_fp32, batch, 1e-4, steps=KERNEL_STEPS)


@pytest.mark.kernels
def test_keys_that_are_split_among_programs_count_alike(monkeypatch):
    from deeploop.nn.kernels import decode

    # Tiles of 16 keys: two programs for a cache of 40, and beyond 32 keys the first has a second tile.
    monkeypatch.setattr(decode, "KEY_TILE", 16)
    model = build(**CASES["qwen3"] | {"rounds": 1})
    assert_steps_are_one_pass(model, in_fp32, 3, 1e-4, start=23, steps=KERNEL_STEPS)


SETTINGS = [Sampling(temperature=0), Sampling(temperature=1, top_k=30, top_p=0.9, seed=7)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("budget", [None, 1])
def test_a_batch_of_any_lengths_says_what_each_says_alone(sampling, budget):
    model = build(**HUGINN)
    model.set_cache_rounds(budget)
    alone = [
        [*generate(model, prompt, max_tokens=34, sampling=replace(sampling, seed=sampling.seed + row))]
        for row, prompt in enumerate(PROMPTS)
    ]
    together = [*generate_batch(model, PROMPTS, max_tokens=34, sampling=sampling)]
    assert [*map(len, alone)] == [34, 34, 29]  # the context holds no more of the longest
    for row, tokens in enumerate(alone):
        padded = tokens + [None] * (34 - len(tokens))
        assert [step[row] for step in together] == padded
    assert all(len(set(tokens)) > 3 for tokens in alone)


def test_one_that_stops_leaves_the_others_going():
    model = build()
    every = [*generate_batch(model, PROMPTS, max_tokens=20)]
    stop = every[3][1]
    stopped = [*generate_batch(model, PROMPTS, max_tokens=20, stop=stop)]
    for row in range(len(PROMPTS)):
        tokens = [step[row] for step in every]
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert [step[row] for step in stopped] == (tokens[:end] + [None] * 20)[: len(stopped)]
    assert stopped[4][1] is None
    assert any(token is not None for token in stopped[4])


def test_texts_of_several_prompts_are_those_of_each():
    model, tokenizer = build(vocabulary=257), get_tokenizer("bytes")
    texts = deeploop.generate_batch(model, tokenizer, ["loop", "", "é"], max_tokens=9, top_k=9, seed=3)
    for row, prompt in enumerate(("loop", "", "é")):
        assert texts[row] == deeploop.generate(model, tokenizer, prompt, max_tokens=9, top_k=9, seed=3 + row)


def test_logits_that_are_not_finite_are_refused_in_a_step_too():
    model = build(tied_head=False)
    first = next(generate(model, PROMPTS[1], max_tokens=1))
    with torch.no_grad():
        model.embedding.weight[first] = float("nan")
    tokens = generate(model, PROMPTS[1], max_tokens=3)
    assert next(tokens) == first
    with pytest.raises(ValueError, match="logits are not finite"):
        next(tokens)
