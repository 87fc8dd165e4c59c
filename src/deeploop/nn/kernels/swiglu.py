# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""SwiGLU's product of gate and up, and the down projection of it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.kernels.products import weight_gradient

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error


@triton.jit
def _swiglu_forward(P, A, W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < W
    g = tl.load(P + row * 2 * W + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(P + row * 2 * W + W + i, mask=live, other=0.0).to(tl.float32)
    tl.store(A + row * W + i, (g * tl.sigmoid(g) * u).to(A.dtype.element_ty), mask=live)


@triton.jit
def _swiglu_backward(P, DA, DP, A, W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < W
    g = tl.load(P + row * 2 * W + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(P + row * 2 * W + W + i, mask=live, other=0.0).to(tl.float32)
    da = tl.load(DA + row * W + i, mask=live, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(A + row * W + i, (g * s * u).to(A.dtype.element_ty), mask=live)
    dg = da * u * s * (1 + g * (1 - s))
    tl.store(DP + row * 2 * W + i, dg.to(DP.dtype.element_ty), mask=live)
    tl.store(DP + row * 2 * W + W + i, (da * g * s).to(DP.dtype.element_ty), mask=live)


def _swiglu_grid(width: int) -> tuple[int, int]:
    block = min(1024, triton.next_power_of_2(width))
    return block, triton.cdiv(width, block)


def swiglu(sides: Tensor) -> Tensor:
    """silu(gate)·up, of gate and up side by side (n, 2·hidden); no part of any graph."""
    n, width = sides.shape[0], sides.shape[1] // 2
    block, blocks = _swiglu_grid(width)
    hidden = torch.empty(n, width, dtype=sides.dtype, device=sides.device)
    _swiglu_forward[(n, blocks)](sides, hidden, W=width, BLOCK=block)
    return hidden


class _SwiGLUDown(torch.autograd.Function):
    """(gate and up, down) → (silu(gate)·up) @ down.T; the backward pass computes the hidden values again."""

    @staticmethod
    def forward(ctx: Any, sides: Tensor, packed: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(sides, packed)
        ctx.dtype = down.dtype
        return swiglu(sides) @ packed.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor]:
        sides, packed = ctx.saved_tensors
        n, width = sides.shape[0], sides.shape[1] // 2
        block, blocks = _swiglu_grid(width)
        dhidden = dy @ packed
        hidden, dsides = torch.empty_like(dhidden), torch.empty_like(sides)
        _swiglu_backward[(n, blocks)](sides, dhidden, dsides, hidden, W=width, BLOCK=block)
        return dsides, None, weight_gradient(dy, hidden, ctx.dtype)


def swiglu_down(sides: Tensor, packed: Tensor, down: Tensor) -> Tensor:
    """The down projection of silu(gate)·up, of gate and up side by side (n, 2·hidden)."""
    return _SwiGLUDown.apply(sides, packed, down)
