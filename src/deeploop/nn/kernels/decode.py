# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Blocks on one new token per sequence, whose keys and values are added to a cache in the same pass.

A step reads every matrix once per visit and does little arithmetic. So there should be few kernels between
two matrices, and each should begin to read its matrix before the previous kernel has ended. For a few
sequences a visit is five kernels:

    residual, norms, q k v      attention over the cache      o      residual, norms, SwiGLU      down

For more sequences the products are cuBLAS's, and residual and SwiGLU are the kernels of training. Positions
are read from the device's memory: no launch depends on the lengths, so a step can be a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.nn.kernels.products import product_groups
from deeploop.nn.kernels.stack import Packed, Sublayers, enter, join, norm_eps
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
KEY_TILE = 4096  # numbers of half a head's keys that a program reads at once
SPLITS = 8  # programs among which the keys of a head are divided, where sequences and heads are few
PROGRAMS = 128  # as many as fill an H200's 132 multiprocessors


class Biases(NamedTuple):
    """Biases of a block's packed matrices, if it has any."""

    qkv: Tensor | None
    o: Tensor | None
    gate_up: Tensor | None
    down: Tensor | None


class Visit(NamedTuple):
    """A block, its packed matrices, and the cache slot of this visit, (B, H, capacity, D)."""

    sublayers: Sublayers
    packed: Packed
    biases: Biases
    keys: Tensor
    values: Tensor


class Pending(NamedTuple):
    """A branch's output that is not yet added to the stream; the next product adds it."""

    sublayer: ScaledResidual
    f: Tensor


@triton.jit
def _decode_product(
    A, M, L, X, FX, G, G2, Y, W, BIAS, OUT, alpha, epsilon, eps, N,
    B: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    HEAD: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, OUTER: tl.constexpr, GAIN: tl.constexpr,
    NEXT: tl.constexpr, SWIGLU: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUT = h·Wᵀ + bias for B rows h: A itself, the attention of A's splits, or the normalised stream."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    live = i < K
    tile = (n < N)[:, None] & live[None, :]
    at = n[:, None].to(tl.int64) * K + i[None, :]
    # Matrices and gains first, while the kernel in front is still at work: nobody writes to them.
    if PDL:
        gdc_launch_dependents()
    w = tl.load(W + at, mask=tile, other=0.0)
    if SWIGLU:
        w2 = tl.load(W + N.to(tl.int64) * K + at, mask=tile, other=0.0)
    if GAIN:
        g = tl.load(G + i, mask=live, other=0.0).to(tl.float32)
    if NEXT:
        g2 = tl.load(G2 + i, mask=live, other=0.0).to(tl.float32)
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
                    h *= g
                if tl.program_id(0) == 0:
                    tl.store(Y + b * K + i, h, mask=live)
            if NEXT:
                h *= tl.rsqrt(tl.sum(h * h, 0) / K + eps) * g2
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
        if HAS_BIAS:
            out += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)
        if SWIGLU:
            up = tl.sum(w2.to(tl.float32) * h[None, :], 1)
            if HAS_BIAS:
                up += tl.load(BIAS + N + n, mask=n < N, other=0.0).to(tl.float32)
            out = out.to(W.dtype.element_ty).to(tl.float32)
            out *= tl.sigmoid(out) * up.to(W.dtype.element_ty).to(tl.float32)
        tl.store(OUT + b * N + n, out.to(OUT.dtype.element_ty), mask=n < N)


@triton.jit
def _halves(P, at, live, D: tl.constexpr):
    """The two halves of heads or of a gain, which rotary mixes."""
    return tl.load(P + at, mask=live, other=0.0), tl.load(P + at + D // 2, mask=live, other=0.0)


@triton.jit
def _apply_rotary(P, at, gu, gv, cos, sin, live, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Rotate and normalise the halves of a head's query or key, rounding where modules in bf16 round."""
    dtype = P.dtype.element_ty
    a, b = _halves(P, at, live, D)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if NORM == "before-rotary":
        r = tl.rsqrt(tl.sum(a * a + b * b, 0) / D + eps)
        a = (a * r * gu).to(dtype).to(tl.float32)
        b = (b * r * gv).to(dtype).to(tl.float32)
    u = (a * cos - b * sin).to(dtype)
    v = (b * cos + a * sin).to(dtype)
    if NORM == "after-rotary":
        a = u.to(tl.float32)
        b = v.to(tl.float32)
        r = tl.rsqrt(tl.sum(a * a + b * b, 0) / D + eps)
        u = (a * r * gu).to(dtype)
        v = (b * r * gv).to(dtype)
    return u, v


@triton.jit
def _attention(
    P, COS, SIN, GQ, GK, POSITION, KEYS, VALUES, OUT, M, L, capacity, scale, eps,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For a head of one sequence, write the new key and value, and attend to them and to those before."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = head // H
    i = tl.arange(0, HALF)
    live = i < D // 2
    # Before the kernel in front has ended: what earlier steps wrote, which is all but the new token's.
    if PDL:
        gdc_launch_dependents()
    position = tl.load(POSITION + row).to(tl.int32)
    cos = tl.load(COS + position * (D // 2) + i, mask=live, other=0.0).to(tl.float32)
    sin = tl.load(SIN + position * (D // 2) + i, mask=live, other=0.0).to(tl.float32)
    if NORM == "none":
        gqu, gqv, gku, gkv = 1.0, 1.0, 1.0, 1.0
    else:
        gqu, gqv = _halves(GQ, i, live, D)
        gku, gkv = _halves(GK, i, live, D)
    keys = KEYS + head // GROUP * capacity * D
    values = VALUES + head // GROUP * capacity * D
    j = split * BLOCK + tl.arange(0, BLOCK)
    seen = (j < position)[:, None] & live[None, :]
    ku, kv = _halves(keys, j[:, None] * D + i[None, :], seen, D)
    vu, vv = _halves(values, j[:, None] * D + i[None, :], seen, D)
    if PDL:
        gdc_wait()
    at = row * (H + 2 * (H // GROUP)) * D + i
    own = at + (H + head % H // GROUP) * D
    qu, qv = _apply_rotary(P, at + head % H * D, gqu, gqv, cos, sin, live, eps, D, NORM)
    qu = qu.to(tl.float32) * scale
    qv = qv.to(tl.float32) * scale
    top = -1e30  # no score is as low, and unlike -inf it can be subtracted from itself
    total = 0.0
    yu = tl.zeros((HALF,), tl.float32)
    yv = tl.zeros((HALF,), tl.float32)
    if split == 0:
        nku, nkv = _apply_rotary(P, own, gku, gkv, cos, sin, live, eps, D, NORM)
        nvu, nvv = _halves(P, own + H // GROUP * D, live, D)
        new = position * D + i
        writes = live & (head % GROUP == 0)  # one of the heads that share them
        tl.store(keys + new, nku, mask=writes)
        tl.store(keys + new + D // 2, nkv, mask=writes)
        tl.store(values + new, nvu, mask=writes)
        tl.store(values + new + D // 2, nvv, mask=writes)
        top = tl.sum(qu * nku.to(tl.float32) + qv * nkv.to(tl.float32), 0)
        total = 1.0
        yu = nvu.to(tl.float32)
        yv = nvv.to(tl.float32)
    for start in range(split * BLOCK, position, SPLITS * BLOCK):
        s = tl.sum(ku.to(tl.float32) * qu[None, :] + kv.to(tl.float32) * qv[None, :], 1)
        s = tl.where(j < position, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        shrink = tl.exp(top - higher)
        p = tl.exp(s - higher)
        total = total * shrink + tl.sum(p, 0)
        yu = yu * shrink + tl.sum(p[:, None] * vu.to(tl.float32), 0)
        yv = yv * shrink + tl.sum(p[:, None] * vv.to(tl.float32), 0)
        top = higher
        j = start + SPLITS * BLOCK + tl.arange(0, BLOCK)
        seen = (j < position)[:, None] & live[None, :]
        ku, kv = _halves(keys, j[:, None] * D + i[None, :], seen, D)
        vu, vv = _halves(values, j[:, None] * D + i[None, :], seen, D)
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
    """Output of attention: the heads (B, width), or the partial sums of every split with their scales."""

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
    """Return the stream x (B, width) after the visits, and its norm by `after`, in the matrices' dtype.

    Sequence b is at positions[b]; `rotary` is the whole table.
    """
    pending: Pending | None = None
    for (first, second), packed, biases, keys, values in visits:
        attention: Any = first.branch
        own: Any = packed.first
        x, qkv = _normed_product(x, pending, first.inner, own.qkv, biases.qkv)
        attended = _attend(attention, qkv, positions, rotary, keys, values)
        pending = Pending(first, _product_of(attended, own.o, biases.o, attention.head_size))
        x, hidden = _normed_product(x, pending, second.inner, packed.gate_up, biases.gate_up, is_swiglu=True)
        pending = Pending(second, _product_of(Attended(hidden), packed.down, biases.down))
    assert pending is not None, "no visits"
    return join(pending.sublayer, x, pending.f, after)


def biases_of(pair: Sublayers, dtype: torch.dtype) -> Biases:
    """Pack the biases of a block as its matrices are packed."""
    return Biases(
        *(
            None if group[0].bias is None else torch.cat([layer.bias for layer in group]).to(dtype)
            for group in product_groups(pair)
        )
    )


def head_product(h: Tensor, weight: Tensor) -> Tensor:
    """Return h·Wᵀ in fp32, for the logits."""
    if len(h) > FEW:
        return torch.mm(h, weight.T, out_dtype=torch.float32) if h.is_cuda else (h @ weight.T).float()
    return _product_of(Attended(h), weight, dtype=torch.float32)


def _normed_product(
    x: Tensor,
    pending: Pending | None,
    inner: nn.Module,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_swiglu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the stream plus the pending output, and the product of its norm, or SwiGLU of gate and up."""
    if len(x) > FEW:
        x, h = (
            enter(inner, x, weight.dtype) if pending is None else join(pending.sublayer, x, pending.f, inner)
        )
        sides = F.linear(h, weight, bias)
        return x, swiglu(sides) if is_swiglu else sides
    outer = None if pending is None else pending.sublayer.outer
    gain = outer.weight if isinstance(outer, RMSNorm) else None
    gain2 = inner.weight if isinstance(inner, RMSNorm) else None
    y = x if pending is None else torch.empty_like(x)
    rows = len(weight) // 2 if is_swiglu else len(weight)
    out = torch.empty(len(x), rows, dtype=weight.dtype, device=x.device)
    alpha, epsilon = (1.0, 1.0) if pending is None else (pending.sublayer.alpha, pending.sublayer.epsilon)
    eps = norm_eps(outer, inner)
    f = None if pending is None else pending.f
    _launch_product(
        (None, None, None, x, f, gain, gain2, y),
        *(weight, bias, out),
        scales=(alpha, epsilon, eps),
        NORM=True,
        ADD=pending is not None,
        OUTER=isinstance(outer, RMSNorm),
        GAIN=gain is not None,
        NEXT=isinstance(inner, RMSNorm),
        SWIGLU=is_swiglu,
    )
    return y, out


def _product_of(
    attended: Attended,
    weight: Tensor,
    bias: Tensor | None = None,
    head: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of rows (B, K) with a matrix (N, K), after joining the splits of an attention."""
    y, tops, totals = attended
    B = len(y)
    if B > FEW:
        return F.linear(y, weight, bias)
    out = torch.empty(B, len(weight), dtype=dtype or weight.dtype, device=y.device)
    splits = 1 if tops is None else tops.shape[-1]
    stream = (None,) * 5
    _launch_product((y, tops, totals, *stream), weight, bias, out, SPLITS=splits, HEAD=head)
    return out


def _launch_product(
    given: Sequence[Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scales: tuple[float, float, float] = (1.0, 1.0, 0.0),
    **flags: Any,
) -> None:
    """`given`: A to Y of the kernel; `scales`: α, ε and the norms' eps."""
    n, k = out.shape[1], weight.shape[1]
    block = triton.next_power_of_2(k)
    rows = max(1, TILE // block // (2 if flags.get("SWIGLU") else 1))
    while rows > 4 and triton.cdiv(n, rows) < PROGRAMS // 2:
        rows //= 2
    defaults = {"SPLITS": 1, "HEAD": 1} | dict.fromkeys(
        ("NORM", "ADD", "OUTER", "GAIN", "NEXT", "SWIGLU"), False
    )
    _decode_product[(triton.cdiv(n, rows),)](
        *(*given, weight, bias, out, *scales, n),
        **defaults | flags,
        **_overlap(out),
        HAS_BIAS=bias is not None,
        B=len(out),
        K=k,
        BLOCK=block,
        ROWS=rows,
        num_warps=8 if rows * block >= 8192 else 4,
    )


def _attend(
    attention: Any, qkv: Tensor, positions: Tensor, rotary: Rotary, keys: Tensor, values: Tensor
) -> Attended:
    B, kv_heads, capacity, D = keys.shape
    H = qkv.shape[1] // D - 2 * kv_heads
    half = triton.next_power_of_2(D // 2)
    block, splits = max(16, KEY_TILE // half), 1
    while B <= FEW and splits < min(SPLITS, capacity // block) and B * H * splits < PROGRAMS // 2:
        splits *= 2
    if splits == 1:  # many programs: smaller ones, so that more of them fit a multiprocessor
        block = max(16, block // 2)
    tops = totals = None
    if splits == 1:
        y = torch.empty(B, H * D, dtype=qkv.dtype, device=qkv.device)
    else:
        y = torch.empty(B, H * splits * D, dtype=torch.float32, device=qkv.device)
        tops, totals = torch.empty(2, B, H, splits, dtype=torch.float32, device=qkv.device)
    norms = attention.q_norm, attention.k_norm
    gains = [getattr(norm, "weight", None) for norm in norms]
    _attention[(B * H, splits)](
        *(qkv, *rotary, *gains, positions, keys, values, y, tops, totals),
        *(capacity, D**-0.5, getattr(norms[0], "eps", 0.0)),
        H=H,
        GROUP=H // kv_heads,
        D=D,
        HALF=half,
        BLOCK=block,
        SPLITS=splits,
        NORM=attention.qk_norm,
        num_warps=4,
        **_overlap(qkv),
    )
    return Attended(y, tops, totals)


def _overlap(tensor: Tensor) -> dict[str, bool]:
    """Use programmatic dependent launch on Hopper and later: a kernel starts as the previous one ends."""
    able = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
