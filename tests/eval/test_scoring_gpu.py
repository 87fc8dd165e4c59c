"""Scoring on a GPU: the CPU's log-likelihoods in fp32, and close to them in bf16."""

from functools import partial

import numpy as np
import pytest
import torch

from deeploop.eval.requests import Request, Requests
from deeploop.eval.scoring import score
from deeploop.models import GPTConfig, LoopedGPT

pytestmark = pytest.mark.gpu


def test_log_likelihoods_agree_with_the_cpu():
    draw = np.random.default_rng(0)
    asked = [
        Request(draw.integers(0, 300, draw.integers(1, 60)), draw.integers(0, 300, draw.integers(1, 9)))
        for _ in range(200)
    ]
    requests = Requests.build(asked, tokenizer="gpt2", vocabulary=300)
    model = LoopedGPT(
        GPTConfig(blocks=2, rounds=3, width=128, heads=2, hidden=256, vocabulary=300, context=64)
    ).eval()
    expected = score(model, requests)
    model.cuda()
    found = score(model, requests, device="cuda")
    np.testing.assert_allclose(found.logprob, expected.logprob, rtol=1e-4)
    rough = score(model, requests, device="cuda", arithmetic=partial(torch.autocast, "cuda", torch.bfloat16))
    np.testing.assert_allclose(rough.logprob, expected.logprob, rtol=2e-2)
    again = score(model, requests, device="cuda", batch_tokens=256)
    np.testing.assert_allclose(again.logprob, expected.logprob, rtol=1e-4)
