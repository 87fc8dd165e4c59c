# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Queries, keys and values of one packed product: q, k rotated by position and normalised by head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.kernels.casts import limit, scaled

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error

PROGRAMS = 660  # rows of partial sums of the gains' gradients: 5 for each of an H200's multiprocessors
TILE = 1024  # numbers of a backward program's tile: 8 a thread, one load of 16 bytes


@triton.jit
def _turn(P, at, live, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Return the two halves of some heads after rotation, and 1/RMS of each (1 without a norm)."""
    a = tl.load(P + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(P + at + D // 2, mask=live, other=0.0).to(tl.float32)
    u = a * cos - b * sin
    v = b * cos + a * sin
    r = tl.zeros((u.shape[0], 1), tl.float32) + 1.0
    if NORM:
        r = tl.rsqrt(tl.sum(u * u + v * v, 1)[:, None] / D + eps)
    return u * r, v * r, r


@triton.jit
def _rotary_forward(
    P, COS, SIN, GQ, GK, Q, K, angles, eps, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)[:, None]
    i = tl.arange(0, HALF)[None, :]
    live = (h < H) & (i < D // 2)
    angle = row % angles
    cos = tl.load(COS + angle * (D // 2) + i, mask=i < D // 2, other=0.0)
    sin = tl.load(SIN + angle * (D // 2) + i, mask=i < D // 2, other=0.0)
    for part in tl.static_range(2):
        u, v, _ = _turn(P, row * 3 * H * D + part * H * D + h * D + i, live, cos, sin, eps, D, NORM)
        if NORM:
            G = GQ if part == 0 else GK
            u *= tl.load(G + i, mask=i < D // 2, other=0.0).to(tl.float32)
            v *= tl.load(G + D // 2 + i, mask=i < D // 2, other=0.0).to(tl.float32)
        O = Q if part == 0 else K
        to = O + row * H * D + h * D + i
        tl.store(to, u.to(O.dtype.element_ty), mask=live)
        tl.store(to + D // 2, v.to(O.dtype.element_ty), mask=live)


@triton.jit
def _part_backward(
    P, COS, SIN, G, DO, DV, DP, PG, SCALE, T, n, angles, eps, s_b, s_h, s_t, v_b, v_h, v_t,
    part: tl.constexpr, LIMIT: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Queries (part 0) or keys (1), with one half of the values."""
    program = tl.program_id(0)
    i = tl.arange(0, HALF)[None, :]
    pu = tl.zeros((TILE, HALF), tl.float32)
    pv = tl.zeros((TILE, HALF), tl.float32)
    if NORM:
        gu = tl.load(G + i, mask=i < D // 2, other=0.0).to(tl.float32)
        gv = tl.load(G + D // 2 + i, mask=i < D // 2, other=0.0).to(tl.float32)
    for j in range(TILES):
        # A tile is TILE heads, of one row after another: no lane is idle, whatever their number.
        head = (program + j * tl.num_programs(0)) * TILE + tl.arange(0, TILE)[:, None]
        row = (head // H).to(tl.int64)
        h = head % H
        t = row % T
        live = (row < n) & (i < D // 2)
        angle = row % angles
        cos = tl.load(COS + angle * (D // 2) + i, mask=live, other=0.0)
        sin = tl.load(SIN + angle * (D // 2) + i, mask=live, other=0.0)
        at = DO + (row // T) * s_b + h * s_h + t * s_t + i
        du = tl.load(at, mask=live, other=0.0).to(tl.float32)
        dv = tl.load(at + D // 2, mask=live, other=0.0).to(tl.float32)
        # The values' gradient only moves into its place of the packed one.
        half = (row // T) * v_b + h * v_h + t * v_t + i + part * (D // 2)
        values = tl.load(DV + half, mask=live, other=0.0).to(tl.float32)
        to = row * 3 * H * D + h * D + i
        if NORM:
            u, v, r = _turn(P, to + part * H * D, live, cos, sin, eps, D, NORM)
            pu += du * u
            pv += dv * v
            du *= gu
            dv *= gv
            mean = tl.sum(du * u + dv * v, 1)[:, None] / D
            du = r * (du - u * mean)
            dv = r * (dv - v * mean)
        out = DP + to + part * H * D
        first, second = du * cos + dv * sin, dv * cos - du * sin
        tl.store(out, scaled(first, SCALE, LIMIT).to(DP.dtype.element_ty), mask=live)
        tl.store(out + D // 2, scaled(second, SCALE, LIMIT).to(DP.dtype.element_ty), mask=live)
        packed = DP + to + 2 * H * D + part * (D // 2)
        tl.store(packed, scaled(values, SCALE, LIMIT).to(DP.dtype.element_ty), mask=live)
    if NORM:
        half_head = tl.arange(0, HALF)
        sums = PG + program * 2 * D + part * D + half_head
        tl.store(sums, tl.sum(pu, 0), mask=half_head < D // 2)
        tl.store(sums + D // 2, tl.sum(pv, 0), mask=half_head < D // 2)


@triton.jit
def _rotary_backward(
    P, COS, SIN, GQ, GK, DQ, DK, DV, DP, PG, SCALE, T, n, angles, eps,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, LIMIT: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _part_backward(
            P, COS, SIN, GQ, DQ, DV, DP, PG, SCALE, T, n, angles, eps, q_b, q_h, q_t, v_b, v_h, v_t,
            0, LIMIT, TILES, TILE, H, D, HALF, NORM,
        )  # fmt: skip
    else:
        _part_backward(
            P, COS, SIN, GK, DK, DV, DP, PG, SCALE, T, n, angles, eps, k_b, k_h, k_t, v_b, v_h, v_t,
            1, LIMIT, TILES, TILE, H, D, HALF, NORM,
        )  # fmt: skip


def rotary_forward(
    packed: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
    heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, k, v (B, H, T, D): views of memory in the order B, T, H, D."""
    B, T, _ = packed.shape
    sizes = _sizes(packed, heads, q_gain)
    D = sizes["D"]
    angles = len(cos)  # rows of the table: T, or one per token of the batch
    q, k = (torch.empty(B, T, heads, D, dtype=packed.dtype, device=packed.device) for _ in range(2))
    padded = triton.next_power_of_2(heads)
    _rotary_forward[(B * T,)](packed, cos, sin, q_gain, k_gain, q, k, angles, eps, HP=padded, **sizes)
    v = packed.view(B, T, 3, heads, D)[:, :, 2]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def rotary_backward(
    saved: Sequence[Tensor], dq: Tensor, dk: Tensor, dv: Tensor, heads: int, eps: float,
    narrow: torch.dtype | None = None, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of the packed product, in its dtype or in FP8 times `scale`, and of the gains."""
    packed, cos, sin, q_gain, k_gain = saved
    B, T, _ = packed.shape
    sizes = _sizes(packed, heads, q_gain)
    dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv))
    strides = [s for d in (dq, dk, dv) for s in d.stride()[:3]]
    n, D = B * T, sizes["D"]
    tile = max(1, TILE // sizes["HALF"])
    tiles = triton.cdiv(n * heads, tile)
    programs = min(tiles, PROGRAMS)
    out = torch.empty_like(packed, dtype=narrow or packed.dtype)
    partial = torch.empty(programs, 2, D, dtype=torch.float32, device=packed.device)
    _rotary_backward[(programs, 2)](
        packed, cos, sin, q_gain, k_gain, dq, dk, dv, out, partial, scale, T, n, len(cos), eps, *strides,
        LIMIT=limit(out.dtype), TILES=triton.cdiv(tiles, programs), TILE=tile, **sizes,
    )  # fmt: skip
    if q_gain is None:
        return out, None, None
    dq_gain, dk_gain = partial.sum(0).to(q_gain.dtype)
    return out, dq_gain, dk_gain


@triton.jit
def _paired_backward(
    DQ, DK, DV, COS, SIN, DP, SCALE, n, angles, factor, H: tl.constexpr, HALF: tl.constexpr,
    LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some heads of q, k or v. A pair of bf16 is read as one number of 32 bits: one thread has both."""
    part = tl.program_id(1)
    head = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    row = (head // H).to(tl.int64)
    i = tl.arange(0, HALF)[None, :]
    live = row < n
    at = head.to(tl.int64) * HALF + i
    if part == 0:
        x = tl.load(DQ + at, mask=live, other=0)
    elif part == 1:
        x = tl.load(DK + at, mask=live, other=0)
    else:
        x = tl.load(DV + at, mask=live, other=0)
    rotated = live & (part < 2)  # not the values
    angle = (head // H % angles) * HALF + i
    size = tl.where(part == 0, factor, 1.0)
    cos = tl.load(COS + angle, mask=rotated, other=1.0) * size
    sin = tl.load(SIN + angle, mask=rotated, other=0.0) * size
    du = (x << 16).to(tl.float32, bitcast=True)
    dv = (x & -65536).to(tl.float32, bitcast=True)
    y = tl.reshape(tl.join(du * cos + dv * sin, dv * cos - du * sin), (TILE, 2 * HALF))
    to = DP + (row * 3 * H + part * H + head % H) * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(to, scaled(y, SCALE, LIMIT).to(DP.dtype.element_ty), mask=live)


def paired_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, factor: float, narrow: torch.dtype,
    scale: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient (n, 3·width) of the product of `epilogues.rotate`, in FP8.

    dq, dk, dv are (B, H, T, D), their numbers in the order of `rotate`; its queries were multiplied by
    `factor`.
    """
    B, H, T, D = dq.shape
    n, width = B * T, H * D
    wide = (d.transpose(1, 2).reshape(n, width).bfloat16().contiguous() for d in (dq, dk, dv))
    pairs = [d.view(torch.int32) for d in wide]
    out = torch.empty(n, 3 * width, dtype=narrow, device=dq.device)
    tile = TILE // (D // 2)
    _paired_backward[(triton.cdiv(n * H, tile), 3)](
        *pairs, cos, sin, out, scale, n, len(cos), factor, H=H, HALF=D // 2, LIMIT=limit(narrow), TILE=tile,
        num_warps=8,  # 4 pairs a thread: one load of 16 bytes, and nothing changes threads
    )  # fmt: skip
    return out


def _sizes(packed: Tensor, heads: int, q_gain: Tensor | None) -> dict[str, int]:
    D = packed.shape[-1] // (3 * heads)
    return {"H": heads, "D": D, "HALF": triton.next_power_of_2(D // 2), "NORM": q_gain is not None}


class _Rotary(torch.autograd.Function):
    """(B, T, 3·width) → q, k, v (B, H, T, D)."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
        heads: int, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        packed = packed.contiguous()
        ctx.save_for_backward(packed, cos, sin, q_gain, k_gain)
        ctx.heads, ctx.eps = heads, eps
        return rotary_forward(packed, cos, sin, q_gain, k_gain, heads, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        out, *gains = rotary_backward(ctx.saved_tensors, dq, dk, dv, ctx.heads, ctx.eps)
        return out, None, None, *gains, None, None


def rotary_qkv(
    packed: Tensor, cos: Tensor, sin: Tensor, heads: int, gains: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, T, D) of a packed product (B, T, 3·width); q, k rotated, and normalised with
    `gains`.

    cos and sin are (T, D/2), or (B, 1, T, D/2) if sequences differ.
    """
    q_gain, k_gain = gains or (None, None)
    cos, sin = (table.flatten(0, -2) for table in (cos, sin))
    return _Rotary.apply(packed, cos, sin, q_gain, k_gain, heads, eps)
