# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Blocks on one new token per sequence, whose keys and values are added to a cache in the same pass.

A step reads every matrix once per visit and computes next to nothing, so what counts is how few kernels stand
between two matrices, and that each begins to read its own before the one in front of it has ended. For a few
sequences a visit is five kernels:

    residual, norms, q k v      attention over the cache      o      residual, norms, SwiGLU      down

For more of them the products are cuBLAS's, and residual and SwiGLU are the kernels of training. Positions
are read from the device's memory: nothing here depends on the lengths, so that a step can be a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.nn.kernels.norms import prenorm
from deeploop.nn.kernels.stack import Packed, Sublayers, join
from deeploop.nn.kernels.swiglu import swiglu
from deeploop.nn.layers import RMSNorm, Rotary
from deeploop.nn.residual import ScaledResidual

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error

FEW = 4  # sequences up to which our own products are used: each computes the norms of all of them again
TILE = 16384  # numbers of a matrix that a program holds in registers, all of them on their way at once
SPLITS = 8  # programs among which the keys of a head are divided, where sequences and heads are few
PROGRAMS = 128  # as many as fill an H200's 132 multiprocessors


class Visit(NamedTuple):
    """A block, its packed matrices, and the slot of the cache that this visit has, (B, H, capacity, D)."""

    sublayers: Sublayers
    packed: Packed
    keys: Tensor
    values: Tensor


class Pending(NamedTuple):
    """A branch's output that is still to be joined to the stream: the next product does it on the way."""

    sublayer: ScaledResidual
    f: Tensor


@triton.jit
def _product(
    A, M, L, X, FX, G, G2, Y, W, OUT, alpha, epsilon, eps, N,
    B: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    HEAD: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, OUTER: tl.constexpr, GAIN: tl.constexpr,
    NEXT: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUT = h·Wᵀ for B rows h: A itself, the attention of A's splits, or the normalised stream."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    live = i < K
    tile = (n < N)[:, None] & live[None, :]
    at = n[:, None].to(tl.int64) * K + i[None, :]
    # Matrices first, while the kernel in front is still at work: nobody writes to them.
    if PDL:
        gdc_launch_dependents()
    w = tl.load(W + at, mask=tile, other=0.0)
    if SWIGLU:
        w2 = tl.load(W + N.to(tl.int64) * K + at, mask=tile, other=0.0)
    if PDL:
        gdc_wait()
    for b in tl.static_range(B):
        if NORM:
            h = tl.load(X + b * K + i, mask=live, other=0.0).to(tl.float32)
            if ADD:
                h = alpha * h + epsilon * tl.load(FX + b * K + i, mask=live, other=0.0).to(tl.float32)
                if OUTER:
                    h *= tl.rsqrt(tl.sum(h * h, 0) / K + eps)
                if GAIN:
                    h *= tl.load(G + i, mask=live, other=0.0).to(tl.float32)
                if tl.program_id(0) == 0:
                    tl.store(Y + b * K + i, h, mask=live)
            if NEXT:
                h *= tl.rsqrt(tl.sum(h * h, 0) / K + eps)
                h *= tl.load(G2 + i, mask=live, other=0.0).to(tl.float32)
            h = h.to(W.dtype.element_ty).to(tl.float32)
        elif SPLITS > 1:
            s = tl.arange(0, SPLITS)[:, None]
            head = (b * (K // HEAD) + i // HEAD)[None, :] * SPLITS + s
            both = live[None, :] & (s < SPLITS)
            m = tl.load(M + head, mask=both, other=0.0)
            m = tl.exp(m - tl.max(m, 0)[None, :])
            part = tl.load(A + head * HEAD + (i % HEAD)[None, :], mask=both, other=0.0)
            h = tl.sum(m * part, 0) / tl.sum(m * tl.load(L + head, mask=both, other=1.0), 0)
            h = h.to(W.dtype.element_ty).to(tl.float32)
        else:
            h = tl.load(A + b * K + i, mask=live, other=0.0).to(tl.float32)
        out = tl.sum(w.to(tl.float32) * h[None, :], 1)
        if SWIGLU:
            up = tl.sum(w2.to(tl.float32) * h[None, :], 1)
            out = out.to(W.dtype.element_ty).to(tl.float32)
            out *= tl.sigmoid(out) * up.to(W.dtype.element_ty).to(tl.float32)
        tl.store(OUT + b * N + n, out.to(OUT.dtype.element_ty), mask=n < N)


@triton.jit
def _turned(P, at, G, cos, sin, live, eps, i, D: tl.constexpr, NORM: tl.constexpr):
    """The halves of a head's query or key: turned by position, normalised, rounded as the cache is."""
    a = tl.load(P + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(P + at + D // 2, mask=live, other=0.0).to(tl.float32)
    # Rounded where modules in bf16 round.
    u = (a * cos - b * sin).to(P.dtype.element_ty).to(tl.float32)
    v = (b * cos + a * sin).to(P.dtype.element_ty).to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(u * u + v * v, 0) / D + eps)
        u *= r * tl.load(G + i, mask=live, other=0.0).to(tl.float32)
        v *= r * tl.load(G + D // 2 + i, mask=live, other=0.0).to(tl.float32)
    return u.to(P.dtype.element_ty), v.to(P.dtype.element_ty)


@triton.jit
def _attention(
    P, COS, SIN, GQ, GK, POSITION, KEYS, VALUES, OUT, M, L, capacity, scale, eps,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: writes the new key and value, and attends to them and to those before."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = head // H
    i = tl.arange(0, HALF)
    live = i < D // 2
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(POSITION + row)
    cos = tl.load(COS + position * (D // 2) + i, mask=live, other=0.0).to(tl.float32)
    sin = tl.load(SIN + position * (D // 2) + i, mask=live, other=0.0).to(tl.float32)
    at = row * 3 * H * D + (head % H) * D + i
    qu, qv = _turned(P, at, GQ, cos, sin, live, eps, i, D, NORM)
    qu = qu.to(tl.float32) * scale
    qv = qv.to(tl.float32) * scale
    keys = KEYS + head * capacity * D
    values = VALUES + head * capacity * D
    top = -float("inf")
    total = 0.0
    yu = tl.zeros((HALF,), tl.float32)
    yv = tl.zeros((HALF,), tl.float32)
    if split == 0:
        ku, kv = _turned(P, at + H * D, GK, cos, sin, live, eps, i, D, NORM)
        vu = tl.load(P + at + 2 * H * D, mask=live, other=0.0)
        vv = tl.load(P + at + 2 * H * D + D // 2, mask=live, other=0.0)
        tl.store(keys + position * D + i, ku, mask=live)
        tl.store(keys + position * D + D // 2 + i, kv, mask=live)
        tl.store(values + position * D + i, vu, mask=live)
        tl.store(values + position * D + D // 2 + i, vv, mask=live)
        top = tl.sum(qu * ku.to(tl.float32) + qv * kv.to(tl.float32), 0)
        total = 1.0
        yu = vu.to(tl.float32)
        yv = vv.to(tl.float32)
    for start in range(split * BLOCK, position, SPLITS * BLOCK):
        j = start + tl.arange(0, BLOCK)
        to = j[:, None] * D + i[None, :]
        both = (j < position)[:, None] & live[None, :]
        ku = tl.load(keys + to, mask=both, other=0.0)
        kv = tl.load(keys + to + D // 2, mask=both, other=0.0)
        vu = tl.load(values + to, mask=both, other=0.0)
        vv = tl.load(values + to + D // 2, mask=both, other=0.0)
        s = tl.sum(ku.to(tl.float32) * qu[None, :] + kv.to(tl.float32) * qv[None, :], 1)
        s = tl.where(j < position, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        shrink = tl.exp(top - higher)
        p = tl.exp(s - higher)
        total = total * shrink + tl.sum(p, 0)
        yu = yu * shrink + tl.sum(p[:, None] * vu.to(tl.float32), 0)
        yv = yv * shrink + tl.sum(p[:, None] * vv.to(tl.float32), 0)
        top = higher
    if SPLITS == 1:
        to = OUT + head * D + i
        tl.store(to, (yu / total).to(OUT.dtype.element_ty), mask=live)
        tl.store(to + D // 2, (yv / total).to(OUT.dtype.element_ty), mask=live)
    else:
        part = head * SPLITS + split
        tl.store(M + part, top)
        tl.store(L + part, total)
        tl.store(OUT + part * D + i, yu, mask=live)
        tl.store(OUT + part * D + D // 2 + i, yv, mask=live)


class Attended(NamedTuple):
    """What attention leaves: the heads (B, width), or the unfinished sums of every split and their scales."""

    y: Tensor
    tops: Tensor | None = None
    totals: Tensor | None = None


def run(
    visits: Sequence[Visit],
    x: Tensor,
    positions: Tensor,
    rotary: Rotary,
    after: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """The stream x (B, width) behind the visits, and its norm by `after`, in the matrices' dtype.

    Sequence b stands at positions[b]; `rotary` is the whole table.
    """
    pending: Pending | None = None
    for (first, second), packed, keys, values in visits:
        attention: Any = first.branch
        x, qkv = _normed_product(x, pending, first.inner, packed.qkv)
        attended = _attend(attention, qkv, positions, rotary, keys, values)
        pending = Pending(first, _product_of(attended, packed.o, attention.head_size))
        x, hidden = _normed_product(x, pending, second.inner, packed.gate_up, is_swiglu=True)
        pending = Pending(second, _product_of(Attended(hidden), packed.down))
    assert pending is not None, "no visits"
    return join(pending.sublayer, x, pending.f, after)


def head_product(h: Tensor, weight: Tensor) -> Tensor:
    """h·Wᵀ in fp32, for the logits."""
    if len(h) > FEW:
        return torch.mm(h, weight.T, out_dtype=torch.float32) if h.is_cuda else (h @ weight.T).float()
    return _product_of(Attended(h), weight, dtype=torch.float32)


def _normed_product(
    x: Tensor, pending: Pending | None, inner: nn.Module, weight: Tensor, *, is_swiglu: bool = False
) -> tuple[Tensor, Tensor]:
    """The stream with what was pending, and the product of its norm; of gate and up their SwiGLU."""
    if len(x) > FEW:
        x, h = _normed(x, pending, inner, weight.dtype)
        sides = F.linear(h, weight)
        return x, swiglu(sides) if is_swiglu else sides
    outer = None if pending is None else pending.sublayer.outer
    gain = outer.weight if isinstance(outer, RMSNorm) else None
    gain2 = inner.weight if isinstance(inner, RMSNorm) else None
    y = x if pending is None else torch.empty_like(x)
    rows = len(weight) // 2 if is_swiglu else len(weight)
    out = torch.empty(len(x), rows, dtype=weight.dtype, device=x.device)
    scales = (1.0, 1.0) if pending is None else (pending.sublayer.alpha, pending.sublayer.epsilon)
    eps = next((norm.eps for norm in (outer, inner) if isinstance(norm, RMSNorm)), 0.0)
    f = None if pending is None else pending.f
    _launch_product(
        *(None, None, None, x, f, gain, gain2, y, weight, out, *scales, eps, rows),
        NORM=True,
        ADD=pending is not None,
        OUTER=isinstance(outer, RMSNorm),
        GAIN=gain is not None,
        NEXT=isinstance(inner, RMSNorm),
        SWIGLU=is_swiglu,
    )
    return y, out


def _normed(
    x: Tensor, pending: Pending | None, inner: nn.Module, narrow: torch.dtype
) -> tuple[Tensor, Tensor]:
    if pending is not None:
        return join(pending.sublayer, x, pending.f, inner)
    if isinstance(inner, RMSNorm):
        assert inner.weight is not None
        return prenorm(x, inner.weight, inner.eps, narrow)
    return x, x.to(narrow)


def _product_of(
    attended: Attended, weight: Tensor, head: int = 1, dtype: torch.dtype | None = None
) -> Tensor:
    """The product of rows (B, K) with a matrix (N, K), after the splits of an attention are joined."""
    y, tops, totals = attended
    B = len(y)
    if B > FEW:
        return F.linear(y, weight)
    out = torch.empty(B, len(weight), dtype=dtype or weight.dtype, device=y.device)
    splits = 1 if tops is None else tops.shape[-1]
    none = (None,) * 5
    _launch_product(
        *(y, tops, totals, *none, weight, out, 1.0, 1.0, 0.0, len(weight)),
        SPLITS=splits,
        HEAD=head,
    )
    return out


def _launch_product(*args: Any, **flags: Any) -> None:
    weight, out, n = args[8], args[9], args[13]
    k = weight.shape[1]
    block = triton.next_power_of_2(k)
    rows = max(1, TILE // block // (2 if flags.get("SWIGLU") else 1))
    while rows > 4 and triton.cdiv(n, rows) < PROGRAMS // 2:
        rows //= 2
    defaults = {"SPLITS": 1, "HEAD": 1} | dict.fromkeys(
        ("NORM", "ADD", "OUTER", "GAIN", "NEXT", "SWIGLU"), False
    )
    _product[(triton.cdiv(n, rows),)](
        *args,
        **defaults | flags,
        **_overlap(out),
        B=len(out),
        K=k,
        BLOCK=block,
        ROWS=rows,
        num_warps=8 if rows * block >= 8192 else 4,
    )


def _attend(
    attention: Any, qkv: Tensor, positions: Tensor, rotary: Rotary, keys: Tensor, values: Tensor
) -> Attended:
    B, H, capacity, D = keys.shape
    splits = 1
    while B <= FEW and splits < SPLITS and B * H * splits < PROGRAMS // 2:
        splits *= 2
    tops = totals = None
    if splits == 1:
        y = torch.empty(B, H * D, dtype=qkv.dtype, device=qkv.device)
    else:
        y = torch.empty(B, H * splits * D, dtype=torch.float32, device=qkv.device)
        tops, totals = torch.empty(2, B, H, splits, dtype=torch.float32, device=qkv.device)
    norms = attention.q_norm, attention.k_norm
    half = triton.next_power_of_2(D // 2)
    _attention[(B * H, splits)](
        *(qkv, *rotary, *(norm.weight for norm in norms), positions, keys, values, y, tops, totals),
        *(capacity, D**-0.5, norms[0].eps),
        H=H,
        D=D,
        HALF=half,
        BLOCK=max(16, 4096 // half),
        SPLITS=splits,
        NORM=norms[0].weight is not None,
        num_warps=4,
        **_overlap(qkv),
    )
    return Attended(y, tops, totals)


def _overlap(tensor: Tensor) -> dict[str, bool]:
    """Programmatic dependent launch, which Hopper and later have: a kernel starts as the last one ends."""
    able = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
