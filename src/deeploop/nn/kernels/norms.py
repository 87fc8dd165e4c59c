# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""RMSNorm around a residual, in one pass.

prenorm     x and N(x)·g, at the start of a block
residual    y = N(α·x + ε·f)·g, and N(y)·g′ of the sublayer that follows
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.kernels.casts import limit, scaled

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error

PROGRAMS = 2112  # rows of partial sums of the gains' gradients: 16 for each of an H200's multiprocessors


@triton.jit
def _norm_forward(
    X, F, G, G2, Y, H, R, R2, SCALE, alpha, epsilon, eps, LIMIT: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, OUTER: tl.constexpr, GAIN: tl.constexpr, NEXT: tl.constexpr,
    COPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < D
    y = tl.load(X + row * D + i, mask=live, other=0.0).to(tl.float32)
    if ADD:
        y = alpha * y + epsilon * tl.load(F + row * D + i, mask=live, other=0.0).to(tl.float32)
        if OUTER:
            r = tl.rsqrt(tl.sum(y * y, 0) / D + eps)
            tl.store(R + row, r)
            y *= r
        if GAIN:
            y *= tl.load(G + i, mask=live, other=0.0).to(tl.float32)
        tl.store(Y + row * D + i, y.to(Y.dtype.element_ty), mask=live)
        y = y.to(Y.dtype.element_ty).to(tl.float32)
    if NEXT:
        r2 = tl.rsqrt(tl.sum(y * y, 0) / D + eps)
        tl.store(R2 + row, r2)
        y = y * r2 * tl.load(G2 + i, mask=live, other=0.0).to(tl.float32)
    if NEXT or COPY:
        tl.store(H + row * D + i, scaled(y, SCALE, LIMIT).to(H.dtype.element_ty), mask=live)


@triton.jit
def _norm_backward(
    X, F, G, G2, R, R2, DY, DH, DX, DF, PG, PG2, SCALE, alpha, epsilon, n, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OUTER: tl.constexpr,
    GAIN: tl.constexpr, NEXT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < D
    if GAIN:
        g = tl.load(G + i, mask=inside, other=0.0).to(tl.float32)
    if NEXT:
        g2 = tl.load(G2 + i, mask=inside, other=0.0).to(tl.float32)
    pg = tl.zeros((BLOCK,), tl.float32)
    pg2 = tl.zeros((BLOCK,), tl.float32)
    for j in range(ROWS):
        row = program + j * tl.num_programs(0)
        at = row.to(tl.int64) * D + i
        live = inside & (row < n)
        y = tl.load(X + at, mask=live, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=live, other=0.0).to(tl.float32)
        if AGAIN:  # h is y
            dy += tl.load(DH + at, mask=live, other=0.0).to(tl.float32)
        if ADD:
            y = alpha * y + epsilon * tl.load(F + at, mask=live, other=0.0).to(tl.float32)
        if OUTER:
            r = tl.load(R + row, mask=row < n, other=0.0)
            unit = y * r
            y = unit * g if GAIN else unit
        if NEXT:  # h = y·r2·g2: what its gradient adds to that of y
            r2 = tl.load(R2 + row, mask=row < n, other=0.0)
            dh = tl.load(DH + at, mask=live, other=0.0).to(tl.float32)
            unit2 = y * r2
            pg2 += dh * unit2
            d = dh * g2
            dy += r2 * (d - unit2 * (tl.sum(d * unit2, 0) / D))
        if OUTER:  # y = s·r·g
            if GAIN:
                pg += dy * unit
                dy *= g
            dy = r * (dy - unit * (tl.sum(dy * unit, 0) / D))
        if ADD:  # s = α·x + ε·f
            tl.store(DF + at, scaled(epsilon * dy, SCALE, LIMIT).to(DF.dtype.element_ty), mask=live)
            dy *= alpha
        tl.store(DX + at, dy.to(DX.dtype.element_ty), mask=live)
    if GAIN:
        tl.store(PG + program * D + i, pg, mask=inside)
    if NEXT:
        tl.store(PG2 + program * D + i, pg2, mask=inside)


def _launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"D": width, "BLOCK": block, "num_warps": min(8, max(1, block // 512))}


class SavedNorms(NamedTuple):
    """Tensors saved for backward: x, f, both gains, 1/RMS of both norms."""

    x: Tensor
    f: Tensor | None
    gain: Tensor | None
    after: Tensor | None
    r: Tensor
    r2: Tensor


def norms_forward(
    x: Tensor, f: Tensor | None, gain: Tensor | None, after: Tensor | None, outer: bool,
    scales: tuple[float, float, float], narrow: torch.dtype, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, SavedNorms]:  # fmt: skip
    """Return y and h of (x, f, gain, next gain), and the tensors saved for backward; h times `scale` if it is
    FP8.

    Without a next gain h is y itself, and is written only if `scale` asks for it in FP8.
    """
    width = x.shape[-1]
    n = x.numel() // width
    x = x.contiguous()
    y = torch.empty_like(x) if f is not None else x
    copy = after is None and scale is not None
    h = torch.empty_like(x, dtype=narrow) if after is not None or copy else None
    r, r2 = (torch.empty(n, dtype=torch.float32, device=x.device) for _ in range(2))
    f = f if f is None else f.contiguous()
    _norm_forward[(n,)](
        x, f, gain, after, y, h, r, r2, scale, *scales, LIMIT=limit(narrow), COPY=copy,
        **_flags(f, gain, after, outer), **_launch(width),
    )  # fmt: skip
    return y, h, SavedNorms(x, f, gain, after, r, r2)


def norms_backward(
    saved: Sequence[Tensor | None], dy: Tensor | None, dh: Tensor | None, outer: bool,
    scales: tuple[float, float, float], narrow: torch.dtype | None = None, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x, f, gain and next gain; f's in its own dtype, or in FP8 times `scale`."""
    x, f, gain, after, r, r2 = saved
    assert x is not None
    width = x.shape[-1]
    n = x.numel() // width
    if dy is None and after is None:  # h is y
        dy, dh = dh, None
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    if dh is None and after is not None:
        dh = torch.zeros_like(x)
    dh = dh if dh is None else dh.contiguous()
    dx = torch.empty_like(x)
    df = torch.empty_like(f, dtype=narrow or f.dtype) if f is not None else None
    programs = min(n, PROGRAMS)
    partial = torch.empty(2, programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        x, f, gain, after, r, r2, dy, dh, dx, df, partial[0], partial[1], scale, *scales[:2], n,
        LIMIT=limit(df.dtype) if df is not None else 0.0, ROWS=triton.cdiv(n, programs),
        AGAIN=after is None and dh is not None, **_flags(f, gain, after, outer), **_launch(width),
    )  # fmt: skip
    gains = (gain, after)
    if gain is None and after is None:
        return dx, df, None, None
    dgain, dafter = (
        None if g is None else own.to(g.dtype) for g, own in zip(gains, partial.sum(1), strict=True)
    )
    return dx, df, dgain, dafter


def _flags(f: Tensor | None, gain: Tensor | None, after: Tensor | None, outer: bool) -> dict[str, bool]:
    return {"ADD": f is not None, "OUTER": outer, "GAIN": gain is not None, "NEXT": after is not None}


class _Norms(torch.autograd.Function):
    """(x, f, gain, next gain) → (y, h); without f, y is x itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, f: Tensor | None, gain: Tensor | None, after: Tensor | None, outer: bool,
        scales: tuple[float, float, float], narrow: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        y, h, saved = norms_forward(x, f, gain, after, outer, scales, narrow)
        ctx.save_for_backward(*saved)
        ctx.outer, ctx.scales = outer, scales
        ctx.set_materialize_grads(False)
        if h is None and y.dtype == narrow:  # for two readers, whose gradients the backward pass adds up
            h = y.view_as(y)
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        return *norms_backward(ctx.saved_tensors, dy, dh, ctx.outer, ctx.scales), None, None, None


def prenorm(x: Tensor, gain: Tensor, eps: float, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x and N(x)·gain in `narrow`, so that the backward pass adds both gradients in one pass."""
    return _Norms.apply(x, None, None, gain, False, (1.0, 1.0, eps), narrow)


def residual(
    x: Tensor,
    f: Tensor,
    *,
    alpha: float = 1.0,
    epsilon: float = 1.0,
    outer: bool = True,
    gain: Tensor | None = None,
    after: Tensor | None = None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Return y = N(α·x + ε·f)·gain in x's dtype, without N unless `outer`; and h in f's dtype.

    h is N(y)·after. Without `after` it is y, or None if y has another dtype.
    """
    scales = (alpha, epsilon, eps)
    return _Norms.apply(x, f, gain, after, outer, scales, f.dtype)
