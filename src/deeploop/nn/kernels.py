# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Triton kernels for what stands between the matrix products of a block, each with its own backward.

A block's time outside its products is memory traffic. Written out, it takes four passes over the data:

prenorm        x and N(x)·g, at the start of a block
residual       y = N(α·x + ε·f)·g, and N(y)·g′ of the sublayer that follows
rotary         q, k turned by their positions and normalised by head, out of one packed product
swiglu_down    silu(gate)·up, out of one packed product

and the loss a fifth, `cross_entropy_`, which turns logits into their gradient in place. Arithmetic is fp32
inside; values are read and written in the dtype they have. What they compute is said by the plain modules
(`layers.py`, `residual.py`, `loss.py`), and the tests hold them to it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error

PROGRAMS = 2112  # rows of partial sums of the gains' gradients: 16 for each of an H200's multiprocessors


# ── Norms around a residual ─────────────────────────────────────────────────────────────────────────────
@triton.jit
def _norm_forward(
    X, F, G, G2, Y, H, R, R2, alpha, epsilon, eps, D: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, OUTER: tl.constexpr, GAIN: tl.constexpr, NEXT: tl.constexpr,
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
        h = y * r2 * tl.load(G2 + i, mask=live, other=0.0).to(tl.float32)
        tl.store(H + row * D + i, h.to(H.dtype.element_ty), mask=live)


@triton.jit
def _norm_backward(
    X, F, G, G2, R, R2, DY, DH, DX, DF, PG, PG2, alpha, epsilon, n, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, OUTER: tl.constexpr, GAIN: tl.constexpr, NEXT: tl.constexpr,
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
            tl.store(DF + at, (epsilon * dy).to(DF.dtype.element_ty), mask=live)
            dy *= alpha
        tl.store(DX + at, dy.to(DX.dtype.element_ty), mask=live)
    if GAIN:
        tl.store(PG + program * D + i, pg, mask=inside)
    if NEXT:
        tl.store(PG2 + program * D + i, pg2, mask=inside)


def _launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"D": width, "BLOCK": block, "num_warps": min(8, max(1, block // 512))}


class _Norms(torch.autograd.Function):
    """(x, f, gain, next gain) → (y, h); without f, y is x itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, f: Tensor | None, gain: Tensor | None, after: Tensor | None, outer: bool,
        scales: tuple[float, float, float], narrow: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        width = x.shape[-1]
        n = x.numel() // width
        x = x.contiguous()
        y = torch.empty_like(x) if f is not None else x
        h = torch.empty_like(x, dtype=narrow) if after is not None else None
        r, r2 = (torch.empty(n, dtype=torch.float32, device=x.device) for _ in range(2))
        flags = {"ADD": f is not None, "OUTER": outer, "GAIN": gain is not None, "NEXT": after is not None}
        f = f if f is None else f.contiguous()
        _norm_forward[(n,)](x, f, gain, after, y, h, r, r2, *scales, **flags, **_launch(width))
        ctx.save_for_backward(x, f, gain, after, r, r2)
        ctx.scales, ctx.flags = scales, flags
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, f, gain, after, r, r2 = ctx.saved_tensors
        width = x.shape[-1]
        n = x.numel() // width
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        if dh is None and after is not None:
            dh = torch.zeros_like(x)
        dh = dh if dh is None else dh.contiguous()
        dx = torch.empty_like(x)
        df = torch.empty_like(f) if f is not None else None
        programs = min(n, PROGRAMS)
        partial = torch.empty(2, programs, width, dtype=torch.float32, device=x.device)
        _norm_backward[(programs,)](
            x, f, gain, after, r, r2, dy, dh, dx, df, partial[0], partial[1], *ctx.scales[:2], n,
            ROWS=triton.cdiv(n, programs), **ctx.flags, **_launch(width),
        )  # fmt: skip
        sums = partial.sum(1)
        dgain = sums[0].to(gain.dtype) if gain is not None else None
        dafter = sums[1].to(after.dtype) if after is not None else None
        return dx, df, dgain, dafter, None, None, None


def prenorm(x: Tensor, gain: Tensor, eps: float, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and N(x)·gain in `narrow`: both, so that the backward pass adds up their gradients in one pass."""
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
    """y = N(α·x + ε·f)·gain in x's dtype, without N unless `outer`; and N(y)·after in f's, if it is given."""
    scales = (alpha, epsilon, eps)
    return _Norms.apply(x, f, gain, after, outer, scales, f.dtype)


# ── Rotary embedding and QK-norm ────────────────────────────────────────────────────────────────────────
@triton.jit
def _turned(P, at, live, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """The two halves of some heads after rotation, and 1/RMS of each (1 without a norm)."""
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
    P, COS, SIN, GQ, GK, Q, K, T, eps, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)[:, None]
    i = tl.arange(0, HALF)[None, :]
    live = (h < H) & (i < D // 2)
    t = row % T
    cos = tl.load(COS + t * (D // 2) + i, mask=i < D // 2, other=0.0)
    sin = tl.load(SIN + t * (D // 2) + i, mask=i < D // 2, other=0.0)
    for part in tl.static_range(2):
        u, v, _ = _turned(P, row * 3 * H * D + part * H * D + h * D + i, live, cos, sin, eps, D, NORM)
        if NORM:
            G = GQ if part == 0 else GK
            u *= tl.load(G + i, mask=i < D // 2, other=0.0).to(tl.float32)
            v *= tl.load(G + D // 2 + i, mask=i < D // 2, other=0.0).to(tl.float32)
        O = Q if part == 0 else K
        to = O + row * H * D + h * D + i
        tl.store(to, u.to(O.dtype.element_ty), mask=live)
        tl.store(to + D // 2, v.to(O.dtype.element_ty), mask=live)


@triton.jit
def _rotary_backward(
    P, COS, SIN, GQ, GK, DQ, DK, DV, DP, PG, T, n, eps,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h = tl.arange(0, HP)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = (h < H) & (i < D // 2)
    for part in tl.static_range(2):
        G = GQ if part == 0 else GK
        DO = DQ if part == 0 else DK
        s_b = q_b if part == 0 else k_b
        s_h = q_h if part == 0 else k_h
        s_t = q_t if part == 0 else k_t
        pu = tl.zeros((HP, HALF), tl.float32)
        pv = tl.zeros((HP, HALF), tl.float32)
        if NORM:
            gu = tl.load(G + i, mask=i < D // 2, other=0.0).to(tl.float32)
            gv = tl.load(G + D // 2 + i, mask=i < D // 2, other=0.0).to(tl.float32)
        for j in range(ROWS):
            row = (program + j * tl.num_programs(0)).to(tl.int64)
            live = inside & (row < n)
            t = row % T
            angle = (i < D // 2) & (row < n)
            cos = tl.load(COS + t * (D // 2) + i, mask=angle, other=0.0)
            sin = tl.load(SIN + t * (D // 2) + i, mask=angle, other=0.0)
            at = DO + (row // T) * s_b + h * s_h + t * s_t + i
            du = tl.load(at, mask=live, other=0.0).to(tl.float32)
            dv = tl.load(at + D // 2, mask=live, other=0.0).to(tl.float32)
            to = row * 3 * H * D + part * H * D + h * D + i
            if NORM:
                u, v, r = _turned(P, to, live, cos, sin, eps, D, NORM)
                pu += du * u
                pv += dv * v
                du *= gu
                dv *= gv
                mean = tl.sum(du * u + dv * v, 1)[:, None] / D
                du = r * (du - u * mean)
                dv = r * (dv - v * mean)
            tl.store(DP + to, (du * cos + dv * sin).to(DP.dtype.element_ty), mask=live)
            tl.store(DP + to + D // 2, (dv * cos - du * sin).to(DP.dtype.element_ty), mask=live)
            # The values' gradient only moves into its place of the packed one: half with q, half with k.
            values = DV + (row // T) * v_b + h * v_h + t * v_t + i + part * (D // 2)
            packed = DP + row * 3 * H * D + 2 * H * D + h * D + i + part * (D // 2)
            tl.store(packed, tl.load(values, mask=live, other=0.0).to(DP.dtype.element_ty), mask=live)
        if NORM:
            half = tl.arange(0, HALF)
            sums = PG + program * 2 * D + part * D + half
            tl.store(sums, tl.sum(pu, 0), mask=half < D // 2)
            tl.store(sums + D // 2, tl.sum(pv, 0), mask=half < D // 2)


class _Rotary(torch.autograd.Function):
    """(B, T, 3·width) → q, k, v (B, H, T, D): views of memory in the order B, T, H, D."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
        heads: int, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        B, T, _ = packed.shape
        D = packed.shape[-1] // (3 * heads)
        packed = packed.contiguous()
        q, k = (torch.empty(B, T, heads, D, dtype=packed.dtype, device=packed.device) for _ in range(2))
        sizes = {
            "H": heads,
            "D": D,
            "HP": triton.next_power_of_2(heads),
            "HALF": triton.next_power_of_2(D // 2),
            "NORM": q_gain is not None,
        }
        _rotary_forward[(B * T,)](packed, cos, sin, q_gain, k_gain, q, k, T, eps, **sizes)
        v = packed.view(B, T, 3, heads, D)[:, :, 2]
        ctx.save_for_backward(packed, cos, sin, q_gain, k_gain)
        ctx.sizes, ctx.eps = sizes, eps
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        packed, cos, sin, q_gain, k_gain = ctx.saved_tensors
        B, T, _ = packed.shape
        dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv))
        strides = [s for d in (dq, dk, dv) for s in d.stride()[:3]]
        n, D = B * T, ctx.sizes["D"]
        programs = min(n, PROGRAMS)
        out = torch.empty_like(packed)
        partial = torch.empty(programs, 2, D, dtype=torch.float32, device=packed.device)
        _rotary_backward[(programs,)](
            packed, cos, sin, q_gain, k_gain, dq, dk, dv, out, partial, T, n, ctx.eps, *strides,
            ROWS=triton.cdiv(n, programs), **ctx.sizes,
        )  # fmt: skip
        if q_gain is None:
            return out, None, None, None, None, None, None
        dq_gain, dk_gain = partial.sum(0).to(q_gain.dtype)
        return out, None, None, dq_gain, dk_gain, None, None


def rotary(
    packed: Tensor, cos: Tensor, sin: Tensor, heads: int, gains: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, D) of a packed product (B, T, 3·width); q, k turned, and normalised with `gains`."""
    q_gain, k_gain = gains or (None, None)
    return _Rotary.apply(packed, cos, sin, q_gain, k_gain, heads, eps)


# ── SwiGLU ──────────────────────────────────────────────────────────────────────────────────────────────
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


class _SwiGLUDown(torch.autograd.Function):
    """(packed, down) → (silu(gate)·up) @ down.T; the backward pass computes the hidden values again."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, down: Tensor) -> Tensor:
        n, width = packed.shape[0], packed.shape[1] // 2
        block, blocks = _swiglu_grid(width)
        hidden = torch.empty(n, width, dtype=packed.dtype, device=packed.device)
        _swiglu_forward[(n, blocks)](packed, hidden, W=width, BLOCK=block)
        ctx.save_for_backward(packed, down)
        return hidden @ down.to(packed.dtype).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        packed, down = ctx.saved_tensors
        n, width = packed.shape[0], packed.shape[1] // 2
        block, blocks = _swiglu_grid(width)
        dhidden = dy @ down.to(packed.dtype)
        hidden, dpacked = torch.empty_like(dhidden), torch.empty_like(packed)
        _swiglu_backward[(n, blocks)](packed, dhidden, dpacked, hidden, W=width, BLOCK=block)
        return dpacked, weight_gradient(dy, hidden, down.dtype)


def swiglu_down(packed: Tensor, down: Tensor) -> Tensor:
    """The down projection of silu(gate)·up, of gate and up side by side (n, 2·hidden)."""
    return _SwiGLUDown.apply(packed, down)


# ── Products with several matrices at once ──────────────────────────────────────────────────────────────
def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy.T @ x: in fp32 straight out of the product, if the gradient is wanted in it."""
    if dy.is_cuda and dy.dtype != dtype and dtype == torch.float32:
        return torch.mm(dy.T, x, out_dtype=torch.float32)
    return (dy.T @ x).to(dtype)


class _PackedLinear(torch.autograd.Function):
    """x @ [W; W′; …].T in x's dtype. The matrices are packed at each use: a pass over them, not over x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return x @ _pack(weights, x.dtype).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        whole = weight_gradient(dy, x, weights[0].dtype)
        return dy @ _pack(weights, x.dtype), *whole.split([len(w) for w in weights])


def _pack(weights: Any, dtype: torch.dtype) -> Tensor:
    if len(weights) == 1:
        return weights[0].to(dtype)
    packed = torch.empty(sum(map(len, weights)), weights[0].shape[1], dtype=dtype, device=weights[0].device)
    torch._foreach_copy_(list(packed.split([len(w) for w in weights])), list(weights))
    return packed


def packed_linear(x: Tensor, *weights: Tensor) -> Tensor:
    """The products of x (n, width) with several matrices, side by side, as one product."""
    return _PackedLinear.apply(x, *weights)


# ── Cross-entropy ───────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def _cross_entropy(
    X, BIAS, TARGET, LOSS, V: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, GRAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row)
    kept = target >= 0
    # Before the sums, whose barriers part it from the stores below: they overwrite it, from another warp.
    chosen = tl.load(X + row * V + target, mask=kept, other=0.0).to(tl.float32)
    top = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(BIAS + i, mask=i < V, other=0.0).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    if HAS_BIAS:
        chosen += tl.load(BIAS + target, mask=kept, other=0.0).to(tl.float32)
    tl.store(LOSS + row, tl.where(kept, lse - chosen, 0.0))
    if GRAD:
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(X + row * V + i, mask=i < V, other=0.0).to(tl.float32)
            if HAS_BIAS:
                x += tl.load(BIAS + i, mask=i < V, other=0.0).to(tl.float32)
            d = tl.exp(x - lse) - tl.where(i == target, 1.0, 0.0)
            tl.store(X + row * V + i, tl.where(kept, d, 0.0).to(X.dtype.element_ty), mask=i < V)


def cross_entropy_(logits: Tensor, targets: Tensor, bias: Tensor | None, *, grad: bool) -> Tensor:
    """−log softmax(logits + bias)[target] of each row, 0 where the target is below 0; in fp32.

    With `grad` the logits (n, V) are overwritten by the gradient of the sum.
    """
    n, words = logits.shape
    loss = torch.empty(n, dtype=torch.float32, device=logits.device)
    _cross_entropy[(n,)](
        logits,
        bias,
        targets,
        loss,
        V=words,
        BLOCK=4096,
        HAS_BIAS=bias is not None,
        GRAD=grad,
        num_warps=8,
    )
    return loss
