# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Causal attention within the documents of a row, forward and backward, at the cost of the documents alone.

A query sees the keys from the first token of its document to itself. A tile of queries skips the tiles of
keys before its first query's document, and a tile of keys the tiles of queries after its last key's document.
Fully visible tiles need no mask. The bounds of the documents are read from the device's memory: no launch
depends on them, so a CUDA graph can be replayed on other documents.

Gradients are sums in a fixed order, without atomics: dq in a kernel over tiles of queries, dk and dv in one
over tiles of keys, which computes the scores once more.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.documents import Documents, Spans, document_attention
from deeploop.nn.kernels import on_hopper

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error


class Tiles(NamedTuple):
    """Queries and keys of a tile, tiles in flight, warps."""

    queries: int
    keys: int
    stages: int
    warps: int


class Cut(NamedTuple):
    """The tiles of each kernel."""

    out: Tiles
    dq: Tiles
    dkv: Tiles


# By head size. Those of 128 are the fastest on an H200 (benchmarks/documents.py --only tiles). The others are
# not timed: those of PyTorch's FlexAttention on an H100, or near them. No register is spilled.
CUTS = {
    32: Cut(Tiles(64, 64, 3, 4), Tiles(64, 64, 3, 4), Tiles(64, 64, 3, 4)),
    64: Cut(Tiles(128, 64, 3, 8), Tiles(128, 64, 3, 8), Tiles(64, 128, 3, 8)),
    128: Cut(Tiles(64, 64, 3, 4), Tiles(64, 64, 2, 4), Tiles(64, 64, 2, 4)),
}
TIMED = (128,)  # head sizes at which these kernels are known to be faster than torch's, on an H200
# Where heads share keys the kernel has one more loop, and 64 queries of 128 numbers would spill.
GROUPED_DKV = {128: Tiles(32, 128, 3, 8)}
LOG2_E = tl.constexpr(1.4426950408889634)  # the kernels' powers are of 2
LOWEST = tl.constexpr(-1e30)  # below every score; finite, as a query may see nothing of a tile: -∞ + ∞ is NaN


@triton.jit
def _tile_of(X, b, h, at, ROWS: tl.constexpr, D: tl.constexpr):
    """Read rows of a head from `at` on; those past the row's end are zeros."""
    return X.load([b, at, h * D]).reshape(ROWS, D)


@triton.jit
def _put(X, b, h, at, x, ROWS: tl.constexpr, D: tl.constexpr):
    """Write rows of a head from `at` on, up to the row's end."""
    X.store([b, at, h * D], x.to(X.dtype).reshape(1, ROWS, D))


@triton.jit
def _key_tiles(FIRST, row, at, T, BM: tl.constexpr, BN: tl.constexpr):
    """Tiles of keys for the queries from `at`: begin, begin and end of those that all queries see, end."""
    end = tl.minimum(at + BM, T)
    begin = tl.load(FIRST + row + at) // BN
    stop = tl.cdiv(end, BN)
    whole = tl.minimum(tl.cdiv(tl.load(FIRST + row + end - 1), BN), stop)
    return begin, whole, tl.maximum(whole, (at + 1) // BN), stop


@triton.jit
def _query_tiles(END, row, at, T, BM: tl.constexpr, BN: tl.constexpr):
    """Tiles of queries for the keys from `at`: begin, begin and end of those that see all keys, end."""
    begin = at // BM
    stop = tl.cdiv(tl.load(END + row + tl.minimum(at + BN, T) - 1), BM)
    whole = tl.minimum(tl.cdiv(at + BN - 1, BM), stop)
    return begin, whole, tl.maximum(whole, tl.load(END + row + at) // BM), stop


@triton.jit
def _partial(j, begin, whole, part):
    """The j-th partly masked tile: first those before the fully visible tiles, then those after them."""
    tile = begin + j
    return tl.where(tile < whole, tile, tile + part - whole)


@triton.jit
def _add_values(
    q, K, V, b, h, at, total, most, weight, query, first, scale,
    BN: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys and values to the running softmax."""
    k = _tile_of(K, b, h, at, BN, D)
    v = _tile_of(V, b, h, at, BN, D)
    s = tl.dot(q, k.T)
    if MASK:
        key = at + tl.arange(0, BN)[None, :]
        s = tl.where((key <= query) & (key >= first), s, -float("inf"))
    above = tl.maximum(most, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - above[:, None])
    shrink = tl.exp2(most - above)
    weight = weight * shrink + tl.sum(p, 1)
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None])
    return total, above, weight


@triton.jit
def _attend(
    Q, K, V, FIRST, O, LSE, stride, T, H, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a tile of queries; late tiles, which see most, go first."""
    tiles = tl.cdiv(T, BM)
    head = tl.program_id(0) // tiles
    at = (tiles - 1 - tl.program_id(0) % tiles) * BM
    b, h = head // H, head % H
    row = b * T
    query = at + tl.arange(0, BM)
    first = tl.load(FIRST + row + query, mask=query < T, other=0)
    begin, whole, part, stop = _key_tiles(FIRST, row, at, T, BM, BN)
    q = _tile_of(Q, b, h, at, BM, D)
    total = tl.zeros((BM, D), tl.float32)
    most = tl.full((BM,), LOWEST, tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    for j in range(whole - begin + stop - part):
        tile = _partial(j, begin, whole, part)
        total, most, weight = _add_values(
            q, K, V, b, h // GROUP, tile * BN, total, most, weight, query[:, None], first[:, None],
            scale * LOG2_E, BN, D, True,
        )  # fmt: skip
    for tile in range(whole, part):
        total, most, weight = _add_values(
            q, K, V, b, h // GROUP, tile * BN, total, most, weight, query[:, None], first[:, None],
            scale * LOG2_E, BN, D, False,
        )  # fmt: skip
    _put(O, b, h, at, total / weight[:, None], BM, D)
    tl.store(LSE + head * stride + query, (most + tl.log2(weight)) / LOG2_E, mask=query < T)


@triton.jit
def _add_to_dq(
    q, do, K, V, b, h, at, dq, lse, delta, query, first, scale,
    BN: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    k = _tile_of(K, b, h, at, BN, D)
    v = _tile_of(V, b, h, at, BN, D)
    s = tl.dot(q, k.T)
    dp = tl.dot(do, v.T)
    p = tl.exp2(s * scale - lse)
    if MASK:
        key = at + tl.arange(0, BN)[None, :]
        p = tl.where((key <= query) & (key >= first), p, 0.0)
    return tl.dot((p * (dp - delta)).to(k.dtype), k, dq)


@triton.jit
def _attend_dq(
    Q, K, V, FIRST, O, LSE, DO, DQ, DELTA, stride, T, H, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of queries, and delta = Σ o·do of each, which the other kernel reads."""
    tiles = tl.cdiv(T, BM)
    head = tl.program_id(0) // tiles
    at = (tiles - 1 - tl.program_id(0) % tiles) * BM
    b, h = head // H, head % H
    row = b * T
    query = at + tl.arange(0, BM)
    live = query < T
    # Loads by pointer are all on their way while the tiles, one after the other, are waited for.
    first = tl.load(FIRST + row + query, mask=live, other=0)
    lse = tl.load(LSE + head * stride + query, mask=live, other=0.0) * LOG2_E
    begin, whole, part, stop = _key_tiles(FIRST, row, at, T, BM, BN)
    to = (((row + query).to(tl.int64) * H + h) * D)[:, None] + tl.arange(0, D)[None, :]
    o = tl.load(O + to, mask=live[:, None], other=0.0).to(tl.float32)
    do = _tile_of(DO, b, h, at, BM, D)
    q = _tile_of(Q, b, h, at, BM, D)
    delta = tl.sum(o * do.to(tl.float32), 1)
    tl.store(DELTA + head * stride + query, delta, mask=live)
    dq = tl.zeros((BM, D), tl.float32)
    for j in range(whole - begin + stop - part):
        tile = _partial(j, begin, whole, part)
        dq = _add_to_dq(
            q, do, K, V, b, h // GROUP, tile * BN, dq, lse[:, None], delta[:, None], query[:, None],
            first[:, None], scale * LOG2_E, BN, D, True,
        )  # fmt: skip
    for tile in range(whole, part):
        dq = _add_to_dq(
            q, do, K, V, b, h // GROUP, tile * BN, dq, lse[:, None], delta[:, None], query[:, None],
            first[:, None], scale * LOG2_E, BN, D, False,
        )  # fmt: skip
    _put(DQ, b, h, at, dq * scale, BM, D)


@triton.jit
def _add_to_dkv(
    k, v, Q, DO, LSE, DELTA, b, h, at, dk, dv, key, end, scale,
    BM: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries to the gradients of keys and values.

    Scores are transposed, keys by queries, so that the next products read them from registers. Registers are
    scarce: lse and delta are loaded only where they are needed, an order that the compiler keeps.
    """
    q = _tile_of(Q, b, h, at, BM, D)
    do = _tile_of(DO, b, h, at, BM, D)
    s = tl.dot(k, q.T)
    lse = LSE.load([b, h, at]).reshape(1, BM)
    p = tl.exp2(s * scale - lse * LOG2_E)
    if MASK:
        query = at + tl.arange(0, BM)[None, :]
        p = tl.where((query >= key) & (query < end), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    dp = tl.dot(v, do.T)
    delta = DELTA.load([b, h, at]).reshape(1, BM)
    dk = tl.dot((p * (dp - delta)).to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _attend_dkv(
    Q, K, V, END, LSE, DELTA, DO, DK, DV, T, H, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and of its values, from all queries of the heads that share
    them.
    """
    tiles = tl.cdiv(T, BN)
    head = tl.program_id(0) // tiles
    at = (tl.program_id(0) % tiles) * BN
    b, h = head // (H // GROUP), head % (H // GROUP)
    row = b * T
    key = at + tl.arange(0, BN)
    end = tl.load(END + row + key, mask=key < T, other=0)
    begin, whole, part, stop = _query_tiles(END, row, at, T, BM, BN)
    k = _tile_of(K, b, h, at, BN, D)
    v = _tile_of(V, b, h, at, BN, D)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for g in range(GROUP):
        for j in range(whole - begin + stop - part):
            tile = _partial(j, begin, whole, part)
            dk, dv = _add_to_dkv(
                k, v, Q, DO, LSE, DELTA, b, h * GROUP + g, tile * BM, dk, dv, key[:, None], end[:, None],
                scale * LOG2_E, BM, D, True,
            )  # fmt: skip
        for tile in range(whole, part):
            dk, dv = _add_to_dkv(
                k, v, Q, DO, LSE, DELTA, b, h * GROUP + g, tile * BM, dk, dv, key[:, None], end[:, None],
                scale * LOG2_E, BM, D, False,
            )  # fmt: skip
    _put(DK, b, h, at, dk * scale, BN, D)
    _put(DV, b, h, at, dv, BN, D)


def attend_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of the scores for the backward pass: fp32 (B, H, T)."""
    B, H, T, _ = q.shape
    tiles = cut.out
    out = _heads_like(q)
    lse = _empty_statistics(q)
    by_query, by_key = _descriptors(tiles.queries, q, out), _descriptors(tiles.keys, k, v)
    _attend[(triton.cdiv(T, tiles.queries) * B * H,)](
        by_query[0],
        *by_key,
        spans.first,
        by_query[1],
        lse,
        lse.stride(1),
        *_sizes(q, k),
        **_options(q, k, tiles),
    )
    return out, lse


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor, lse: Tensor, d_out: Tensor, cut: Cut
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    B, H, T, _ = q.shape
    dq, dk, dv = map(_heads_like, (q, k, v))
    d_out = _aligned(d_out)
    delta = _empty_statistics(q)
    sizes = _sizes(q, k)
    tiles = cut.dq
    q_, do_, dq_ = _descriptors(tiles.queries, q, d_out, dq)
    k_, v_ = _descriptors(tiles.keys, k, v)
    _attend_dq[(triton.cdiv(T, tiles.queries) * B * H,)](
        q_, k_, v_, spans.first, out, lse, do_, dq_, delta, delta.stride(1), *sizes, **_options(q, k, tiles)
    )
    tiles = cut.dkv
    q_, do_ = _descriptors(tiles.queries, q, d_out)
    statistics = [TensorDescriptor(x, x.shape, x.stride(), [1, 1, tiles.queries]) for x in (lse, delta)]
    k_, v_, dk_, dv_ = _descriptors(tiles.keys, k, v, dk, dv)
    _attend_dkv[(triton.cdiv(T, tiles.keys) * B * k.shape[1],)](
        q_, k_, v_, spans.end, *statistics, do_, dk_, dv_, *sizes, **_options(q, k, tiles)
    )
    return dq, dk, dv


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, float]:
    return q.shape[2], q.shape[1], q.shape[3] ** -0.5


def _options(q: Tensor, k: Tensor, tiles: Tiles) -> dict[str, int]:
    queries, keys, stages, warps = tiles
    sizes = {"GROUP": q.shape[1] // k.shape[1], "D": q.shape[3], "BM": queries, "BN": keys}
    return {**sizes, "num_stages": stages, "num_warps": warps}


def _descriptors(rows: int, *tensors: Tensor) -> list[Any]:
    """Make descriptors of (B, H, T, D) tensors, read as (B, T, H·D) in tiles of `rows` rows of a head."""
    flat = [x.transpose(1, 2).flatten(2) for x in tensors]
    return [
        TensorDescriptor(y, y.shape, y.stride(), [1, rows, x.shape[3]])
        for x, y in zip(tensors, flat, strict=True)
    ]


def _heads_like(x: Tensor) -> Tensor:
    """Return uninitialised (B, H, T, D) in the memory order B, T, H, D, as the products before and after have
    it.
    """
    B, H, T, D = x.shape
    return torch.empty(B, T, H, D, dtype=x.dtype, device=x.device).transpose(1, 2)


def _empty_statistics(q: Tensor) -> Tensor:
    """Return uninitialised fp32 (B, H, T), one number per query, in rows that a descriptor accepts."""
    B, H, T, _ = q.shape
    return torch.empty(B, H, triton.cdiv(T, 4) * 4, dtype=torch.float32, device=q.device)[..., :T]


def _aligned(x: Tensor) -> Tensor:
    """Return (B, H, T, D) in memory that a descriptor accepts: a token's heads in a row, the rest 16 bytes
    apart.

    A gradient may be broadcast.
    """
    steps = [x.stride(i) * x.element_size() for i in (0, 2)]
    packed = x.stride(3) == 1 and x.stride(1) == x.shape[3] and x.data_ptr() % 16 == 0
    fits = packed and all(step > 0 and step % 16 == 0 for step in steps)
    return x if fits else x.transpose(1, 2).contiguous().transpose(1, 2)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, cut: Cut
    ) -> Tensor:  # fmt: skip
        q, k, v = map(_aligned, (q, k, v))
        out, lse = attend_forward(q, k, v, Spans(first, end), cut)
        ctx.save_for_backward(q, k, v, first, end, out, lse)
        ctx.cut = cut
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, first, end, out, lse = ctx.saved_tensors
        return *attend_backward(q, k, v, Spans(first, end), out, lse, d_out, ctx.cut), None, None, None


def attend_documents(q: Tensor, k: Tensor, v: Tensor, spans: Spans, cut: Cut | None = None) -> Tensor:
    """Causal attention inside each document; q and the result (B, H, T, D), k and v with H heads or fewer.

    D is a key of CUTS.
    """
    out: Tensor = _DocumentAttention.apply(q, k, v, *spans, cut or _cut_for(q, k))
    return out


def attend_inside(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Attend within documents by these kernels or by torch's, whichever was measured to be faster."""
    if q.shape[3] in TIMED and on_hopper(q):
        return attend_documents(q, k, v, documents.spans)
    return document_attention(q, k, v, documents)


def _cut_for(q: Tensor, k: Tensor) -> Cut:
    size = q.shape[3]
    cut = CUTS[size]
    grouped = q.shape[1] != k.shape[1]
    return cut._replace(dkv=GROUPED_DKV.get(size, cut.dkv)) if grouped else cut
