"""Decoding on a GPU: a CUDA graph says what single steps say, and the kernels what modules say."""

from functools import partial

import pytest
import torch
from torch import nn

from deeploop.eval import decoding
from deeploop.eval.decoding import Decoder, KernelStep, ModuleStep
from deeploop.eval.generation import Sampling, choose, generate, generate_batch
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn.cache import PositionedCache

pytestmark = pytest.mark.gpu
CONFIG = GPTConfig(blocks=2, rounds=3, width=256, heads=2, hidden=512, vocabulary=500, context=128)
PROMPTS = [[5, 100, 7, 250, 31], [3], list(range(40)), [9] * 20, [1, 2], [8, 8, 9]]


def build(**fields):
    with torch.device("cuda"):
        model = LoopedGPT(GPTConfig(**vars(CONFIG) | fields)).eval()
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():  # so large that the likeliest token is not the last one again
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.2, generator=generator)
    return model


def tokens_of(decoder, count):
    tokens = [decoder.start().tokens.tolist()]
    return tokens + [decoder.step().tokens.tolist() for _ in range(count - 1)]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("batch", [1, 6])
def test_a_graph_says_what_single_steps_say(batch, kernels):
    model, found = build(prelude=1, coda=1, injection="add", rule="flat"), []
    for graph in (True, False):
        decoder = Decoder(
            model,
            PROMPTS[:batch],
            capacity=100,
            choose=partial(choose, sampling=Sampling(temperature=0)),
            graph=graph,
            kernels=kernels,
        )
        assert decoder.uses_kernels == kernels
        found.append(tokens_of(decoder, 40))
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) > 3


RECURRENT = {"prelude": 1, "coda": 1, "injection": "add", "rule": "flat"}
QWEN2 = {"rule": "prenorm", "kv_heads": 1, "qk_norm": "none", "attention_bias": "qkv"}


@pytest.mark.parametrize("batch", [1, 4, 64])
@pytest.mark.parametrize("fields", [{}, RECURRENT, QWEN2], ids=["recipe", "recurrent", "qwen2"])
@torch.inference_mode()
def test_the_kernels_in_bf16_are_as_near_to_fp32_as_modules_are(fields, batch):
    model = build(**fields)
    tokens = torch.randint(500, (batch, 60), device="cuda")
    found = {}
    for name in ("fp32", "bf16", "kernels"):
        with torch.autocast("cuda", torch.bfloat16, enabled=name != "fp32"):
            cache = model.new_cache(100)
            model(tokens, cache=cache)
            at = PositionedCache(cache, torch.full((batch,), 60, device="cuda"))
            step = (KernelStep if name == "kernels" else ModuleStep)(model, at)
            found[name] = step(tokens[:, 0]).float()
    size = found["fp32"].norm()
    off = {name: (found[name] - found["fp32"]).norm() / size for name in ("bf16", "kernels")}
    assert off["kernels"] < max(2 * off["bf16"], 5e-3)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1, top_p=0.9, seed=3)])
def test_a_batch_on_the_card_says_what_each_says_alone(sampling, monkeypatch):
    monkeypatch.setattr(decoding, "fits_kernels", lambda _: False)  # in fp32, where rounding changes no token
    model = build()
    batch = [*generate_batch(model, PROMPTS, max_tokens=30, sampling=sampling)]
    for row, prompt in enumerate(PROMPTS):
        own = Sampling(**vars(sampling) | {"seed": sampling.seed + row})
        assert [tokens[row] for tokens in batch] == [*generate(model, prompt, max_tokens=30, sampling=own)]
