"""Generation: the cached loop against plain argmax, the draws against their definition, whole characters."""

import pytest
import torch
from torch import nn

import deeploop
from deeploop.data.tokenizers import get_tokenizer
from deeploop.eval.generation import (
    GREEDY,
    Sampling,
    choose,
    generate,
    generate_text,
    require_finite,
    stream_text,
)
from deeploop.models import AdaptiveDepth, ExitRule, GPTConfig, LoopedGPT
from deeploop.tasks.language.options import GenerateArgs

CONFIG = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=257, context=40)
PROMPT = [5, 100, 7, 250, 31]
LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, -3.0])


@pytest.fixture(scope="module")
def model():
    """Weights so large that the likeliest token is not the last one again."""
    model = LoopedGPT(CONFIG).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.5, generator=generator)
        model.embedding.weight.mul_(20)
    return model


@torch.no_grad()
def argmax_without_cache(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits(model(torch.tensor([tokens])).states)[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_greedy_equals_argmax_without_a_cache(model, rounds):
    model.set_rounds(rounds)
    produced = list(generate(model, PROMPT, max_tokens=30))
    expected = argmax_without_cache(model, PROMPT, 30)
    model.set_rounds(3)
    assert produced == expected
    assert len(set(produced)) > 3


def test_the_context_is_used_to_its_end_and_no_further(model):
    assert len(list(generate(model, PROMPT, max_tokens=100))) == 36  # positions 5 … 39, and one unread
    assert len(list(generate(model, 8 * PROMPT, max_tokens=100))) == 1
    with pytest.raises(ValueError, match="prompt of 45 tokens: must be 1 to 40"):
        next(generate(model, 9 * PROMPT, max_tokens=1))


def test_no_token_may_be_asked_for_and_no_fewer(model):
    for one in (model, AdaptiveDepth(model, ExitRule("change", 0.1))):
        assert list(generate(one, [1], max_tokens=0)) == []
        with pytest.raises(ValueError, match="max_tokens=-1: must be 0 or more"):
            next(generate(one, [1], max_tokens=-1))


def test_the_stop_token_ends_it(model):
    tokens = list(generate(model, PROMPT, max_tokens=30))
    stop = tokens[4]
    assert list(generate(model, PROMPT, max_tokens=30, stop=stop)) == tokens[: tokens.index(stop) + 1]


def test_a_seed_repeats_and_another_differs(model):
    def draws(seed):
        return list(generate(model, PROMPT, max_tokens=20, sampling=Sampling(temperature=1, seed=seed)))

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


def draw(logits, sampling, generator):
    """One token of `choose`."""
    token, top = choose(logits[None], sampling, torch.rand(1, generator=generator))
    require_finite(float(top))
    return int(token)


def test_a_seed_means_the_same_whatever_was_drawn_before():
    sampling, found = Sampling(temperature=1), []
    for other in (1, 2):
        torch.manual_seed(other)
        generator = torch.Generator().manual_seed(0)
        found.append([draw(LOGITS, sampling, generator) for _ in range(50)])
    assert found[0] == found[1]


def test_one_token_is_the_least():
    assert GenerateArgs(max_tokens=1).max_tokens == 1
    with pytest.raises(ValueError, match="max_tokens=0: must be at least 1"):
        GenerateArgs(max_tokens=0)


def frequencies(sampling, count=4000):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([draw(LOGITS, sampling, generator) for _ in range(count)])
    return torch.bincount(drawn, minlength=6) / count


def test_draws_follow_the_softmax_at_the_temperature():
    expected = (LOGITS / 0.7).softmax(-1)
    torch.testing.assert_close(frequencies(Sampling(temperature=0.7)), expected, rtol=0, atol=0.03)


def test_top_k_keeps_the_k_likeliest():
    expected = LOGITS.softmax(-1)
    expected[[0, 2, 4, 5]] = 0
    sampling = Sampling(temperature=1, top_k=2)
    torch.testing.assert_close(frequencies(sampling), expected / expected.sum(), rtol=0, atol=0.03)
    assert draw(LOGITS, Sampling(top_k=1), torch.Generator()) == 1


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, [1]), (0.5, [1]), (0.6, [1, 3]), (0.81, [0, 1, 3])])
def test_top_p_keeps_the_fewest_that_hold_p(top_p, kept):
    shares = LOGITS.softmax(-1)  # .126 .565 .028 .208 .077 .004
    expected = torch.zeros(6)
    expected[kept] = shares[kept] / shares[kept].sum()
    sampling = Sampling(temperature=1, top_p=top_p)
    torch.testing.assert_close(frequencies(sampling), expected, rtol=0, atol=0.03)


def test_temperature_zero_is_greedy():
    assert draw(LOGITS, GREEDY, torch.Generator()) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


class Scripted(LoopedGPT):
    """Says one text whatever it is given: token n + 1 has the largest logit at position n."""

    def say(self, ids, start):
        self.script = [0] * start + ids
        return self

    def forward(self, tokens, cache, **places):
        self.at = int(cache.positions) if places else tokens.shape[1] - 1
        return super().forward(tokens, cache=cache, **places)

    def logits(self, states):
        return nn.functional.one_hot(torch.tensor([self.script[self.at]]), 257).float()


def test_text_comes_in_whole_characters():
    tokenizer = get_tokenizer("bytes")
    text = "αβ→😀!"
    model = Scripted(CONFIG).say([*text.encode(), 256, 65], start=len("né".encode()) - 1)
    pieces = []
    ended = stream_text(model, tokenizer, "né", write=pieces.append, max_tokens=36)
    assert ended == "document"
    assert "".join(pieces) == "né" + text
    assert all("\ufffd" not in piece for piece in pieces)
    assert sum(map(bool, pieces)) == 1 + len(text)


def test_a_character_that_is_cut_short_is_marked_and_endings_are_told():
    tokenizer = get_tokenizer("bytes")
    model = Scripted(CONFIG).say([65] * 60, start=0)
    pieces = []
    assert stream_text(model, tokenizer, "", write=pieces.append, max_tokens=3) == "max_tokens"
    assert "".join(pieces) == "AAA"
    assert stream_text(model, tokenizer, "", write=pieces.append, max_tokens=99) == "context"
    model.say([0xF0, 0x9F], start=0)
    pieces = []
    stream_text(model, tokenizer, "", write=pieces.append, max_tokens=2)
    assert "".join(pieces) == "\ufffd"


def test_a_prompt_too_long_is_refused_before_anything_is_written():
    pieces = []
    with pytest.raises(ValueError, match="prompt of 41 tokens"):
        stream_text(LoopedGPT(CONFIG), get_tokenizer("bytes"), "a" * 41, write=pieces.append, max_tokens=1)
    assert not pieces


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_token_bytes_join_to_the_text(name):
    tokenizer = get_tokenizer(name)
    text = "Hello wörld → 😀"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(tokenizer.end_of_text) == b""


def test_a_temperature_near_zero_is_greedy():
    generator = torch.Generator().manual_seed(0)
    for temperature in (1e-5, 1e-7, 1e-45, 5e-324):
        assert draw(LOGITS * 1000, Sampling(temperature=temperature), generator) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = LOGITS.clone()
    logits[2] = bad
    with pytest.raises(ValueError, match="logits are not finite"):
        draw(logits, Sampling(temperature=temperature), torch.Generator())


def test_the_text_from_python_is_what_the_command_prints(model):
    bytes_, pieces = get_tokenizer("bytes"), []
    stream_text(model, bytes_, "loop", write=pieces.append, max_tokens=9, sampling=Sampling(top_k=5, seed=3))
    text = deeploop.generate(model, bytes_, "loop", max_tokens=9, top_k=5, seed=3)
    assert text == "".join(pieces)
    assert text.startswith("loop")
    greedy = deeploop.generate(model, bytes_, "loop", max_tokens=9, temperature=0)
    expected = bytes_.decode(argmax_without_cache(model, b"loop", 9))
    assert greedy == "loop" + expected.split("<|endoftext|>")[0]
    assert generate_text(model, bytes_, "loop", max_tokens=9, temperature=0) == greedy
