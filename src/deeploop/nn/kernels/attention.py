# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Attention without a mask, for q, k, v as `epilogues.rotate` writes them.

A length such as 901 is hardly padded: 14 tiles of 64 keys and one of 16. The backward pass is cuDNN's, which
accepts the log-sum-exp of any forward pass.
"""

from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.fp8 import E4M3
from deeploop.nn.kernels.casts import limit, scaled

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error


class AttentionTiles(NamedTuple):
    """Queries and keys of a tile, tiles in flight, warps: the fastest of those tried on an H200."""

    queries: int = 64
    keys: int = 64
    stages: int = 3
    warps: int = 4


DEFAULT = AttentionTiles()
BACKWARD = (  # arguments of its operator, in torch 2.11 to 2.13
    "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q "
    "max_k dropout_p is_causal scale"
)


@triton.jit
def _online_softmax_step(q, k, v, acc, m, l, seen, BN: tl.constexpr, MASK: tl.constexpr):
    """Add a tile of keys to FlashAttention's acc, m, l; in the last tile only those that are `seen`.

    m: the largest score so far, l: the sum of exp2(s - m), acc: the values weighted by it.
    """
    s = tl.dot(q, k.T)
    if MASK:
        s = tl.where(tl.arange(0, BN)[None, :] < seen, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    correction = tl.exp2(m - m_new)
    l = l * correction + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None])
    return acc, m_new, l


@triton.jit
def _attend(
    Q, KV, TAIL, O, LSE, SCALE, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LAST: tl.constexpr, LIMIT: tl.constexpr, KEEP: tl.constexpr,
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
        k = KV.load([start + at, H * D + column])
        v = KV.load([start + at, 2 * H * D + column])
        acc, m, l = _online_softmax_step(q, k, v, acc, m, l, 0, BN, False)
    if LAST > 0:
        k = TAIL.load([start + FULL, H * D + column])
        v = TAIL.load([start + FULL, 2 * H * D + column])
        acc, m, l = _online_softmax_step(q, k, v, acc, m, l, T - FULL, LAST, True)
    acc = scaled(acc / l[:, None], SCALE, LIMIT)
    row = first + tl.arange(0, BM)
    if KEEP:  # of natural logarithms; the scores are in powers of 2
        tl.store(LSE + head * T + row, (m + tl.log2(l)) * 0.6931471805599453, mask=row < T)
    to = O + (start + row).to(tl.int64)[:, None] * (H * D) + column + tl.arange(0, D)[None, :]
    tl.store(to, acc.to(O.dtype.element_ty), mask=(row < T)[:, None])  # what follows is another sequence's


def attend(
    packed: Tensor, length: int, heads: int, cut: AttentionTiles = DEFAULT, *, scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the heads' outputs (n, width) for packed q, k, v (n, 3·width), with n a multiple of `length`.

    They are FP8 if a scale is given. `lse` (B, heads, length) is filled with the log-sum-exp of the scores.
    """
    n, width = packed.shape[0], packed.shape[1] // 3
    size = width // heads
    out = torch.empty(n, width, dtype=packed.dtype if scale is None else E4M3, device=packed.device)
    last = max(16, triton.next_power_of_2(length % cut.keys)) if length % cut.keys else 0
    q, keys, tail = (
        TensorDescriptor.from_tensor(packed, [rows, size]) for rows in (cut.queries, cut.keys, last or 16)
    )
    programs = triton.cdiv(length, cut.queries) * (n // length) * heads
    _attend[(programs,)](
        q, keys, tail, out, lse, scale, T=length, H=heads, D=size, BM=cut.queries, BN=cut.keys, LAST=last,
        LIMIT=limit(out.dtype), KEEP=lse is not None, num_stages=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    return out


class _Attend(torch.autograd.Function):
    """q, k, v → y, all (B, H, T, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        packed = q.as_strided((B * T, 3 * H * D), (3 * H * D, 1))
        lse = torch.empty(B, H, T, 1, dtype=torch.float32, device=q.device)
        y = attend(packed, T, H, lse=lse).view(B, T, H, D).transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return attend_backward(dy, *ctx.saved_tensors)


def attend_with_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return y (B, H, T, D) for q, k, v in one tensor (B, T, 3, H, D), as `rotate` writes them."""
    return _Attend.apply(q, k, v)


def has_backward() -> bool:
    """Return True if cuDNN's backward pass may be called: its operator is private and not deterministic."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    names = " ".join(argument.name for argument in operator._schema.arguments)
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return names == BACKWARD and allowed


def attend_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> Any:
    """Return the gradients of q, k, v, computed by cuDNN."""
    T = q.shape[2]
    none = torch.empty(0, dtype=torch.long, device=q.device)  # nothing is dropped at random
    where = none, none, None, None, None, T, T, 0.0, False
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, y, lse, *where, scale=log(2)
    )
