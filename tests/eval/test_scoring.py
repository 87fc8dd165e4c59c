"""Scores against the plain way: one request at a time, the whole logits, a log-softmax."""

import random
from functools import partial

import numpy as np
import pytest
import torch

from deeploop.eval.requests import TOO_LONG, Request, Requests
from deeploop.eval.scoring import STEP, batches, score
from deeploop.models import GPTConfig, LoopedGPT

CONTEXT, VOCABULARY = 80, 100


@pytest.fixture(scope="module")
def model():
    config = GPTConfig(
        blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=VOCABULARY, context=CONTEXT
    )
    model = LoopedGPT(config, seed=3).eval()
    with torch.no_grad():
        model.embedding.weight[:VOCABULARY] *= 20  # predictions that differ
        model.embedding.weight[VOCABULARY:] = 1e3  # the padding: whoever lets it in sees it at once
    return model


def random_requests(count, longest, seed=0):
    draw = random.Random(seed)

    def tokens(most):
        return [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, most))]

    return [Request(tokens(longest), tokens(12), "task", 0, n) for n in range(count)]


def build(requests):
    return Requests.build(requests, tokenizer="words", vocabulary=VOCABULARY)


@torch.no_grad()
def plain(model, request):
    """The harness' own words: the last context + 1 tokens, the last of which is not read."""
    whole = [*request.context, *request.continuation][-(CONTEXT + 1) :]
    logprobs = model.logits(model(torch.tensor([whole[:-1]])).states[0]).double().log_softmax(-1)
    own = logprobs[-len(request.continuation) :]
    targets = torch.tensor(request.continuation)
    return own.gather(1, targets[:, None]).sum().item(), bool((own.argmax(-1) == targets).all())


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_scores_are_those_of_each_request_alone(model, rounds, batch_tokens):
    """Also of those that are longer than the context."""
    requests = random_requests(60, longest=100)
    model.set_rounds(rounds)
    scores = score(model, build(requests), batch_tokens=batch_tokens)
    expected = [plain(model, request) for request in requests]
    model.set_rounds(3)
    assert any(len(r.context) + len(r.continuation) > CONTEXT + 1 for r in requests)
    np.testing.assert_allclose(scores.logprob, [logprob for logprob, _ in expected], atol=2e-4)
    assert scores.greedy.tolist() == [greedy for _, greedy in expected]


def test_greedy_is_told_from_nearly_greedy(model):
    """The continuation that the model would choose itself, and that with one token changed."""
    tokens = [5, 17, 3]
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model.logits(model(torch.tensor([tokens])).states[0, -1]).argmax()))
    own = tokens[3:]
    changed = [[*own[:i], (own[i] + 1) % VOCABULARY, *own[i + 1 :]] for i in (0, 5)]
    requests = [Request(tokens[:3], continuation) for continuation in (own, *changed)]
    assert score(model, build(requests)).greedy.tolist() == [True, False, False]


def test_probabilities_of_all_single_tokens_add_up_to_one(model):
    """Over the real vocabulary: the padded rows take no part."""
    requests = build([Request([1, 2, 3], [token]) for token in range(VOCABULARY)])
    assert np.exp(score(model, requests).logprob).sum() == pytest.approx(1, abs=1e-5)


def test_what_is_cut_off_does_not_count(model):
    last = random_requests(1, longest=20)[0]
    tail = [7] * (CONTEXT + 1 - len(last.continuation))
    requests = [last._replace(context=[head] * 5 + tail) for head in (1, 2)]
    first, second = score(model, build(requests)).logprob
    assert first == second


def test_the_head_goes_through_in_chunks(model, monkeypatch):
    requests = build(random_requests(20, longest=30))
    whole = score(model, requests)
    monkeypatch.setattr("deeploop.eval.scoring.MAX_LOGITS", 7 * VOCABULARY)
    chunked = score(model, requests)
    np.testing.assert_allclose(chunked.logprob, whole.logprob, atol=1e-4)
    assert (chunked.greedy == whole.greedy).all()


def test_bf16_is_near(model):
    requests = build(random_requests(20, longest=30))
    exact = score(model, requests).logprob
    arithmetic = partial(torch.autocast, "cpu", torch.bfloat16)
    rounded = score(model, requests, arithmetic=arithmetic).logprob
    assert not np.array_equal(rounded, exact)
    np.testing.assert_allclose(rounded, exact, rtol=0.1, atol=0.5)


def test_batches_have_few_shapes_and_lose_nobody():
    lengths = np.random.default_rng(0).integers(1, 1025, size=3000)
    made = list(batches(lengths, batch_tokens=4096, context=1000))
    assert sorted(np.concatenate([rows for rows, _ in made])) == list(range(3000))
    assert all(lengths[rows].clip(max=1000).max() <= padded for rows, padded in made)
    assert all(padded * len(rows) <= 4096 for rows, padded in made)
    shapes = {(len(rows), padded) for rows, padded in made[:-1]}
    assert len(shapes) == len({padded for _, padded in shapes})
    assert all(padded % STEP == 0 or padded == 1000 for _, padded in shapes)
    assert [padded for _, padded in made] == sorted((padded for _, padded in made), reverse=True)


def test_requests_that_are_not_for_this_model(model):
    with pytest.raises(ValueError, match="vocabulary is 100"):
        score(model, Requests.build([Request([1], [2])], tokenizer="gpt2", vocabulary=50257))


def test_a_continuation_longer_than_the_context_has_no_score(model):
    short, long = Request([1], [2]), Request([1], [2] * (CONTEXT + 1), "essay", 0, 4)
    fits = long._replace(continuation=[2] * CONTEXT)
    (alone,) = score(model, build([short])).logprob
    found = score(model, build([long, short, fits]))
    assert found.logprob[0] == TOO_LONG
    assert not found.greedy[0]
    assert found.logprob[1] == pytest.approx(alone)
    assert np.isfinite(found.logprob[2])
    assert score(model, build([long])).logprob.tolist() == [TOO_LONG]
