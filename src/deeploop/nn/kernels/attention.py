# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Attention in which every position sees all.

A length such as 901 costs what it has: 14 tiles of 64 keys and one of 16. cuDNN pads it to 1024. The backward
pass is cuDNN's all the same, which takes the log-sum-exp of any forward pass.

attend         of the packed q, k, v that `epilogues.rotate` gives, forward alone
attend_all     of q, k, v, with a gradient
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.fp8 import E4M3
from deeploop.nn.kernels import on_hopper
from deeploop.nn.kernels.casts import limit, scaled

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error

LOG2_E = 1.4426950408889634
HEAD_SIZES = (32, 64)  # those that a test runs on a GPU


class AttentionTiles(NamedTuple):
    """Queries and keys of a tile, tiles in flight, warps: the fastest of those tried on an H200."""

    queries: int = 64
    keys: int = 64
    stages: int = 3
    warps: int = 4


DEFAULT = AttentionTiles()


@triton.jit
def _online_softmax_step(q, k, v, acc, m, l, seen, scale, BN: tl.constexpr, MASK: tl.constexpr):
    """Takes a tile of keys into FlashAttention's acc, m, l; of a last tile only those that are `seen`.

    m: the largest score so far, l: the sum of exp2(s - m), acc: the values weighted by it; s is scaled.
    """
    s = tl.dot(q, k.T)
    if MASK:
        s = tl.where(tl.arange(0, BN)[None, :] < seen, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])
    correction = tl.exp2(m - m_new)
    l = l * correction + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None])
    return acc, m_new, l


@triton.jit
def _attend(
    Q, K, V, K_TAIL, V_TAIL, O, LSE, SCALE, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LAST: tl.constexpr, LIMIT: tl.constexpr, scale: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (T + BM - 1) // BM
    FULL: tl.constexpr = T // BN * BN
    head = tl.program_id(0) // TILES
    first = (tl.program_id(0) % TILES) * BM
    start = (head // H) * T
    column = (head % H) * D
    q = Q.load([start + first, column])
    acc = tl.zeros((BM, D), tl.float32)
    m = tl.full((BM,), -float("inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for at in range(0, FULL, BN):
        k = K.load([start + at, column])
        v = V.load([start + at, column])
        acc, m, l = _online_softmax_step(q, k, v, acc, m, l, 0, scale, BN, False)
    if LAST > 0:
        k = K_TAIL.load([start + FULL, column])
        v = V_TAIL.load([start + FULL, column])
        acc, m, l = _online_softmax_step(q, k, v, acc, m, l, T - FULL, scale, LAST, True)
    acc = scaled(acc / l[:, None], SCALE, LIMIT)
    row = first + tl.arange(0, BM)
    live = row < T  # what follows is another sequence's
    to = O + (start + row).to(tl.int64)[:, None] * (H * D) + column + tl.arange(0, D)[None, :]
    tl.store(to, acc.to(O.dtype.element_ty), mask=live[:, None])
    if LSE is not None:
        tl.store(LSE + head.to(tl.int64) * T + row, (m + tl.log2(l)) / 1.4426950408889634, mask=live)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, length: int, heads: int, cut: AttentionTiles,
    lse: Tensor | None, fp8_scale: Tensor | None, scale: float,
) -> None:  # fmt: skip
    """q, k, v and out are (n, width), rows of any stride."""
    n, width = out.shape
    size = width // heads
    last = max(16, triton.next_power_of_2(length % cut.keys)) if length % cut.keys else 0
    tiles = ((q, cut.queries), (k, cut.keys), (v, cut.keys), (k, last or 16), (v, last or 16))
    blocks = [TensorDescriptor.from_tensor(rows, [count, size]) for rows, count in tiles]
    programs = triton.cdiv(length, cut.queries) * (n // length) * heads
    _attend[(programs,)](
        *blocks, out, lse, fp8_scale, T=length, H=heads, D=size, BM=cut.queries, BN=cut.keys, LAST=last,
        LIMIT=limit(out.dtype), scale=scale, num_stages=cut.stages, num_warps=cut.warps,
    )  # fmt: skip


def attend(
    packed: Tensor, length: int, heads: int, cut: AttentionTiles = DEFAULT, *, scale: Tensor | None = None
) -> Tensor:
    """The heads' outputs (n, width) of packed q, k, v (n, 3·width), n a multiple of `length`.

    They are FP8 if a scale is given.
    """
    dtype = packed.dtype if scale is None else E4M3
    out = torch.empty(len(packed), packed.shape[1] // 3, dtype=dtype, device=packed.device)
    q, k, v = packed.chunk(3, 1)
    _launch(q, k, v, out, length, heads, cut, None, scale, 1.0)
    return out


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, cut: AttentionTiles = DEFAULT) -> tuple[Tensor, Tensor]:
    """The heads' outputs (B, H, T, D), in memory of the order B, T, H, D, and log-sum-exps (B, H, T, 1)."""
    B, H, T, D = q.shape
    out = torch.empty(B * T, H * D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T, 1, dtype=torch.float32, device=q.device)
    q, k, v = (x.transpose(1, 2).reshape(B * T, H * D) for x in (q, k, v))
    _launch(q, k, v, out, T, H, cut, lse, None, LOG2_E * D**-0.5)
    return out.view(B, T, H, D).transpose(1, 2), lse


class _AttendAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, lse = attend_with_lse(q, k, v)
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, y, lse = ctx.saved_tensors
        seed = torch.zeros(1, dtype=torch.int64, device=q.device)  # of a dropout that there is not
        length = q.shape[2]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, y, lse, seed, seed, None, None, None, length, length, 0.0, False
        )


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The heads' outputs (B, H, T, D) of q, k, v, such as `rotary_qkv` gives."""
    if on_hopper(q) and q.dtype == torch.bfloat16 and q.shape[-1] in HEAD_SIZES and q.shape == k.shape:
        return _AttendAll.apply(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)
