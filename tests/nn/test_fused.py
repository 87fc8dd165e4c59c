"""A block on the kernels against the block as it is written: values and gradients, every residual kind."""

import copy
import importlib.util
import os
from functools import partial

import pytest
import torch
from torch import nn

from deeploop.models import GPTConfig
from deeploop.models.gpt import Block
from deeploop.models.hrm import HRMConfig
from deeploop.models.reasoner import ReasonerBlock
from deeploop.nn import fused
from deeploop.nn.layers import RMSNorm, SwiGLU, rotary_table
from deeploop.nn.residual import ScaledResidual

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None
        or not (os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()),
        reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
    ),
]


def gpt(**model):
    return Block(GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, **model))


def hrm(**model):
    config = HRMConfig(width=32, heads=2, hidden=48, **model)
    block = ReasonerBlock(config, "L", 9)
    return block


BLOCKS = {
    "sandwich": gpt,
    "prenorm": partial(gpt, block="prenorm"),
    "averaged": partial(gpt, block="averaged"),
    "postnorm": partial(gpt, block="postnorm"),
    "sandwich without inner norm": partial(gpt, inner_norm=False),
    "hrm": hrm,
    "hrm at p = 1/2": partial(hrm, p=0.5),
}


def sublayers(block):
    return (block.mixer if isinstance(block, ReasonerBlock) else block.attention), block.mlp


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_a_fused_block_is_the_block(kind, narrow):
    torch.manual_seed(0)
    block = BLOCKS[kind]().to(DEVICE)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim == 2 else nn.init.uniform_(parameter, 0.5, 1.5)
    assert fused.fits(*sublayers(block))
    x = torch.randn(3, 9, 32, device=DEVICE, requires_grad=True)
    weights = torch.randn(3, 9, 32, device=DEVICE)
    rotary = tuple(table.to(DEVICE) for table in rotary_table(9, 16))
    inputs = [x, *block.parameters()]
    exact = torch.autograd.grad((block(x, rotary) * weights).sum(), inputs)
    y = fused.run(*sublayers(block), x, rotary, narrow)
    ours = torch.autograd.grad((y * weights).sum(), inputs)
    tolerance = 2e-5 if narrow == torch.float32 else 0.05
    for a, b in zip((y, *ours), (block(x, rotary), *exact), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() < tolerance * b.norm()


test_a_fused_block_is_the_block.pytestmark += needs_triton


def test_what_the_kernels_do_not_know_is_left_alone(monkeypatch):
    monkeypatch.setattr(fused, "HAS_TRITON", True)
    attention, mlp = sublayers(gpt())
    assert fused.fits(attention, mlp)
    assert not fused.fits(ScaledResidual(SwiGLU(32, 48), 32), mlp)
    assert not fused.fits(attention, ScaledResidual(nn.Linear(32, 32), 32))
    assert not fused.fits(attention, ScaledResidual(SwiGLU(32, 48), 32, norm=nn.LayerNorm))
    assert not fused.fits(attention, ScaledResidual(SwiGLU(32, 48), 32, norm=partial(RMSNorm, gain=False)))
    monkeypatch.setattr(fused, "HAS_TRITON", False)
    assert not fused.fits(attention, mlp)


def test_a_block_takes_the_kernels_where_a_call_is_one_for_them(monkeypatch):
    monkeypatch.setattr(fused, "HAS_TRITON", True)
    monkeypatch.setattr(fused, "run", lambda first, second, *_: (first, second))
    block, x, rotary = gpt(), torch.randn(2, 9, 32), rotary_table(9, 16)
    plain = block(x, rotary)
    assert fused.install(block)
    assert torch.equal(block(x, rotary), plain)
    monkeypatch.setattr(fused, "_wanted", lambda x: True)
    assert block(x, rotary, None) == sublayers(block)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(block(x, rotary, mask), plain)


def test_a_copied_block_runs_on_its_own_weights(monkeypatch):
    monkeypatch.setattr(fused, "HAS_TRITON", True)
    block, x, rotary = gpt(), torch.randn(2, 9, 32), rotary_table(9, 16)
    assert fused.install(block)
    other = copy.deepcopy(block)
    nn.init.zeros_(other.mlp.outer.weight)
    assert not other(x, rotary).any()
    assert block(x, rotary).any()
    monkeypatch.setattr(fused, "_wanted", lambda x: True)
    monkeypatch.setattr(fused, "run", lambda first, second, *_: (first, second))
    assert other(x, rotary) == sublayers(other)
