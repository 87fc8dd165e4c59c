# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""SwiGLU's product of gate and up, and its down projection."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.kernels.casts import limit, scaled
from deeploop.nn.kernels.products import weight_gradient

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error


# The fastest of those tried on an H200.
BACKWARD_FP8 = {"TILE_N": 32, "TILE_W": 128, "num_warps": 4}


@triton.jit
def _swiglu_forward(P, A, SCALE, W: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < W
    g = tl.load(P + row * 2 * W + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(P + row * 2 * W + W + i, mask=live, other=0.0).to(tl.float32)
    a = scaled(g * tl.sigmoid(g) * u, SCALE, LIMIT)
    tl.store(A + row * W + i, a.to(A.dtype.element_ty), mask=live)


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


@triton.jit
def _swiglu_backward_fp8(
    P, DA, DP, DPT, AT, D_SCALE, D_SCALE_AGAIN, A_SCALE, n, W, D_LIMIT: tl.constexpr, A_LIMIT: tl.constexpr,
    TILE_N: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of SwiGLU in FP8 tiles, row-wise and transposed, for the products of the backward
    pass.

    Values are cast twice, for the reason given in `casts`.
    """
    row = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)[:, None]
    i = tl.program_id(0) * TILE_W + tl.arange(0, TILE_W)[None, :]
    live = (row < n) & (i < W)
    g = tl.load(P + row * 2 * W + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(P + row * 2 * W + W + i, mask=live, other=0.0).to(tl.float32)
    da = tl.load(DA + row * W + i, mask=live, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    dg = da * u * s * (1 + g * (1 - s))
    du = da * g * s
    a = scaled(g * s * u, A_SCALE, A_LIMIT).to(AT.dtype.element_ty)
    tl.store(DP + row * 2 * W + i, scaled(dg, D_SCALE, D_LIMIT).to(DP.dtype.element_ty), mask=live)
    tl.store(DP + row * 2 * W + W + i, scaled(du, D_SCALE, D_LIMIT).to(DP.dtype.element_ty), mask=live)
    dg = scaled(dg, D_SCALE_AGAIN, D_LIMIT).to(DP.dtype.element_ty)
    du = scaled(du, D_SCALE_AGAIN, D_LIMIT).to(DP.dtype.element_ty)
    to = tl.trans(i).to(tl.int64) * n + tl.trans(row)
    live_transposed = tl.trans(live)
    tl.store(DPT + to, tl.trans(dg), mask=live_transposed)
    tl.store(DPT + W.to(tl.int64) * n + to, tl.trans(du), mask=live_transposed)
    tl.store(AT + to, tl.trans(a), mask=live_transposed)


def swiglu_backward_fp8(
    sides: Tensor, dhidden: Tensor, narrow: tuple[torch.dtype, torch.dtype], scales: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of both sides along rows and transposed, and the hidden values transposed, in FP8.

    `narrow` and `scales` have two entries: for the gradients, and for the hidden values.
    """
    n, width = dhidden.shape
    dsides = torch.empty_like(sides, dtype=narrow[0])
    dsides_t = torch.empty(2 * width, n, dtype=narrow[0], device=sides.device)
    hidden_t = torch.empty(width, n, dtype=narrow[1], device=sides.device)
    cut = BACKWARD_FP8
    grid = triton.cdiv(width, cut["TILE_W"]), triton.cdiv(n, cut["TILE_N"])
    limits = {"D_LIMIT": limit(narrow[0]), "A_LIMIT": limit(narrow[1])}
    _swiglu_backward_fp8[grid](
        sides, dhidden, dsides, dsides_t, hidden_t, scales[0], *scales, n, width, **limits, **cut
    )
    return dsides, dsides_t, hidden_t


def _swiglu_grid(width: int) -> tuple[int, int]:
    block = min(1024, triton.next_power_of_2(width))
    return block, triton.cdiv(width, block)


def swiglu(sides: Tensor, narrow: torch.dtype | None = None, scale: Tensor | None = None) -> Tensor:
    """Return silu(gate)·up, of gate and up side by side (n, 2·hidden), in FP8 times `scale`; outside any
    graph.
    """
    n, width = sides.shape[0], sides.shape[1] // 2
    block, blocks = _swiglu_grid(width)
    hidden = torch.empty(n, width, dtype=narrow or sides.dtype, device=sides.device)
    _swiglu_forward[(n, blocks)](sides, hidden, scale, W=width, LIMIT=limit(hidden.dtype), BLOCK=block)
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
    """Return the down projection of silu(gate)·up, of gate and up side by side (n, 2·hidden)."""
    return _SwiGLUDown.apply(sides, packed, down)
