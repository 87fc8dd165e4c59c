"""LoopedGPT on a GPU: the same model, close to the CPU's numbers, within the memory the loss promises."""

import pytest
import torch

from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn import linear_cross_entropy

pytestmark = pytest.mark.gpu

CONFIG = GPTConfig(blocks=2, rounds=3, width=128, heads=2, hidden=256, vocabulary=1000, context=64)


def batch():
    tokens = torch.randint(1000, (4, 64), generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, 1)


def test_a_seed_gives_the_same_model_on_the_gpu():
    with torch.device("cuda"):
        model = LoopedGPT(CONFIG, seed=3)
    expected = LoopedGPT(CONFIG, seed=3)
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a.cpu(), b), name
    assert torch.equal(model.cos.cpu(), expected.cos)


def test_fp32_agrees_with_the_cpu():
    model = LoopedGPT(CONFIG)
    expected = model(*batch()).loss
    loss = model.cuda()(*(t.cuda() for t in batch())).loss
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=0)


def test_compiled_bf16_blocks_agree_with_fp32():
    exact, model = LoopedGPT(CONFIG).cuda(), LoopedGPT(CONFIG).cuda()
    for block in model.blocks:
        block.compile()
    tokens, targets = (t.cuda() for t in batch())
    expected = exact(tokens, targets).loss
    expected.backward()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(tokens, targets).loss
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert (p.grad - q.grad).norm() < 0.1 * q.grad.norm(), name


def test_the_loss_needs_a_chunk_of_logits_and_no_more():
    """64 Ki positions × 32 Ki words are 8 GiB of fp32 logits; chunks of 1024 need 128 MiB a copy."""
    x = torch.randn(2**16, 64, device="cuda", requires_grad=True)
    weight = torch.randn(2**15, 64, device="cuda", requires_grad=True)
    targets = torch.randint(2**15, (2**16,), device="cuda")
    linear_cross_entropy(x[:8], weight, targets[:8]).backward()  # the libraries' own workspace
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, targets, chunk=1024).backward()
    assert torch.cuda.max_memory_allocated() - held < 2**30
