# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Matrix products fused with the memory pass after them. Only `rotate` also serves calls with a gradient.

rotate      q, k, v: queries and keys rotated by position, queries scaled for an attention in powers of 2
gate        silu(x @ gate.T)·(x @ up.T)
join        α·x + y @ w.T, and the sum of squares of each part of a row, for its norm
added       N(x) + y, in one pass with its copy in FP8

A state is rows before their norm, with their sums of squares. N(s) = s / RMS(s) has no gain here, so it can
be applied after the product: N(s) @ w.T = (s @ w.T) / RMS(s). With FP8 products the rows have an unscaled FP8
copy: their size is α or a few times that, far from both ends of e4m3.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeploop.nn.fp8 import E4M3
from deeploop.nn.kernels.casts import limit, scaled, within
from deeploop.nn.layers import Rotary

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error


LOG2_E = 1.4426950408889634
HEAD_SIZES = (32, 64)  # those that a test runs on a GPU


class ProductTiles(NamedTuple):
    """The tiling of a product: rows, columns and depth of a tile, tiles in flight, warps, and the programs
    that share a multiprocessor, one of which multiplies while another is in its epilogue.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    stages: int = 4
    warps: int = 8
    programs: int = 1


# The fastest of those tried on an H200. Stages are what fits 227 KiB of shared memory: a rotated tile is
# stored whole, and a joined one is read as well.
GATE, ROTATE, JOIN = ProductTiles(), ProductTiles(stages=3), ProductTiles(stages=3)
# In FP8 a product takes half the time and its epilogue as long as before: two programs share a
# multiprocessor, except where the epilogue needs the room (rotate) or the sum is long (down).
GATE_FP8 = ProductTiles(columns=128, depth=128, stages=3, warps=4, programs=2)
JOIN_FP8 = ProductTiles(columns=128, warps=4, programs=2)
ROTATE_FP8 = LONG_JOIN_FP8 = ProductTiles(stages=6)
LONG = 1024  # numbers of a sum


class State(NamedTuple):
    """Rows (n, width) before their norm, and sums of squares (n, parts); None if the rows need no norm."""

    rows: Tensor
    squares: Tensor | None
    fp8: Tensor | None = None
    """A copy of the rows."""

    @property
    def operand(self) -> Tensor:
        """Return the operand of a product: the FP8 copy if there is one."""
        return self.rows if self.fp8 is None else self.fp8


class Matrix(NamedTuple):
    """A matrix as the operand of a product, with scales if it is FP8."""

    rows: Tensor
    scale: Tensor | None = None
    """Factor of the other operand before it is cast to FP8; unset: none."""
    inverse: Tensor | None = None
    """One over both scales, which the product is multiplied by."""

    @property
    def in_fp8(self) -> bool:
        return self.inverse is not None


@triton.jit
def _scales(S, row, live, PARTS: tl.constexpr, WIDTH: tl.constexpr, eps):
    """Compute 1/RMS of some rows from their parts' sums of squares."""
    total = tl.load(S + row * PARTS, mask=live, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(S + row * PARTS + part, mask=live, other=0.0)
    return tl.rsqrt(total / WIDTH + eps)


@triton.jit(do_not_specialize=["n", "tiles", "T"])  # one compilation for every number of boards
def _product_epilogue(
    A, W, O, X, COPY, S, SO, COS, SIN, INVERSE, SCALE, n, tiles, T, alpha, scale, eps, N: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = N // BN
    inverse = 1.0
    if FP8:
        inverse = tl.load(INVERSE)
    # One loop over tiles and depth: the next tile is loaded while this one is finished.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        # Columns first: the programs at work read the same rows, and the matrix lies in the L2 cache.
        m = (tile // COLUMNS) * BM
        c = tile % COLUMNS
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(K // BK):
            total = tl.dot(A.load([m, k * BK]), W.load([c * BN, k * BK]).T, total)
        row = m + tl.arange(0, BM)
        live = row < n
        r = tl.full((BM,), 1.0, tl.float32)
        if PARTS > 0:
            r = _scales(S, row, live, PARTS, WIDTH, eps)
        if KIND == "gate":  # gate and up are neighbours
            g, u = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
            r *= inverse
            g *= r[:, None]
            y = g * tl.sigmoid(g) * (u * r[:, None])
            O.store([m, c * (BN // 2)], scaled(y, SCALE, LIMIT).to(O.dtype))
        elif KIND == "rotate":  # the two numbers of a pair are neighbours
            a, b = tl.split(tl.reshape(total, (BM, BN // (2 * HALF), HALF, 2)))
            at = (row % T)[:, None] * HALF + tl.arange(0, HALF)[None, :]
            rotated = live[:, None] & (c * BN < 2 * WIDTH)  # not the values
            factor = r * inverse * tl.where(c * BN < WIDTH, scale, 1.0)
            cos = tl.load(COS + at, mask=rotated, other=1.0) * factor[:, None]
            sin = tl.load(SIN + at, mask=rotated, other=0.0) * factor[:, None]
            u = a * cos[:, None, :] - b * sin[:, None, :]
            v = b * cos[:, None, :] + a * sin[:, None, :]
            O.store([m, c * BN], tl.reshape(tl.join(u, v), (BM, BN)).to(O.dtype))
        else:
            halves = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
            squares = tl.zeros((BM,), tl.float32)
            for i in tl.static_range(2):
                at = c * BN + i * (BN // 2)
                y = X.load([m, at]).to(tl.float32) * (alpha * r)[:, None] + halves[i] * inverse
                if FP8:
                    COPY.store([m, at], within(y, LIMIT).to(COPY.dtype))
                y = y.to(O.dtype)
                O.store([m, at], y)
                squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), 1)
            tl.store(SO + row * COLUMNS + c, squares, mask=live)


@triton.jit
def _add(
    A, B, S, O, COPY, n, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, ADD: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + i
    live = (row < n)[:, None] & (i < WIDTH)
    y = tl.load(A + at, mask=live, other=0.0).to(tl.float32)
    if PARTS > 0:
        y *= _scales(S, row, row < n, PARTS, WIDTH, eps)[:, None]
    if ADD:
        y += tl.load(B + at, mask=live, other=0.0).to(tl.float32)
    y = y.to(O.dtype.element_ty)
    tl.store(O + at, y, mask=live)
    if LIMIT > 0:
        tl.store(COPY + at, within(y.to(tl.float32), LIMIT).to(COPY.dtype.element_ty), mask=live)


def _launch_epilogue(
    kind: str, a: Tensor, matrix: Matrix, out: Tensor, cut: ProductTiles, *, state: State,
    beside: Tensor | None = None, copy: Tensor | None = None, squares: Tensor | None = None,
    rotary: Rotary | None = None, half: int = 1, alpha: float = 1.0, scale: float = 1.0, eps: float = 0.0,
    out_scale: Tensor | None = None,
) -> None:  # fmt: skip
    n, depth = a.shape
    w = matrix.rows
    columns = min(cut.columns, len(w))
    wide = columns if kind == "rotate" else columns // 2  # of what is stored at a time
    cos, sin = rotary or (None, None)
    tiles = triton.cdiv(n, cut.rows) * (len(w) // columns)
    x, x_fp8 = (None if rows is None else _blocks(rows, cut.rows, wide) for rows in (beside, copy))
    width = state.rows.shape[1]
    _product_epilogue[(min(tiles, cut.programs * _multiprocessors(a)),)](
        _blocks(a, cut.rows, cut.depth), _blocks(w, columns, cut.depth), _blocks(out, cut.rows, wide), x,
        x_fp8, state.squares, squares, cos, sin, matrix.inverse, out_scale, n, tiles,
        1 if cos is None else len(cos), alpha, scale, eps,
        N=len(w), K=depth, BM=cut.rows, BN=columns, BK=cut.depth, HALF=half,
        PARTS=0 if state.squares is None else state.squares.shape[1], WIDTH=width, KIND=kind,
        LIMIT=limit((out if copy is None else copy).dtype), FP8=matrix.in_fp8,
        num_stages=cut.stages, num_warps=cut.warps,
    )  # fmt: skip


def _blocks(matrix: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _multiprocessors(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        return 3  # the interpreter's
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def fits_tiles(width: int, hidden: int, head_size: int) -> bool:
    """Return True if the products of such blocks split into whole tiles, queries and keys into heads."""
    whole = width % ROTATE.columns == 0 and 2 * hidden % GATE.columns == 0 and hidden % JOIN.depth == 0
    return whole and head_size in HEAD_SIZES


def rotate(
    state: State, w: Matrix, rotary: Rotary, head_size: int, eps: float, cut: ProductTiles | None = None
) -> Tensor:
    """Return q, k, v (n, 3·width) of N(state) by `paired` matrices: q and k rotated, q times log₂e/√D."""
    out = torch.empty(len(state.rows), len(w.rows), dtype=state.rows.dtype, device=state.rows.device)
    cut = cut or (ROTATE_FP8 if w.in_fp8 else ROTATE)
    _launch_epilogue(
        "rotate", state.operand, w, out, cut, state=state, rotary=rotary, half=head_size // 2,
        scale=query_factor(head_size), eps=eps,
    )  # fmt: skip
    return out


def query_factor(head_size: int) -> float:
    """Return the factor by which `rotate` multiplies queries, for an attention in powers of 2."""
    return LOG2_E * head_size**-0.5


def gate(
    state: State, w: Matrix, eps: float, cut: ProductTiles | None = None, *, scale: Tensor | None = None
) -> Tensor:
    """Return silu(gate)·up (n, hidden) of N(state) by an `interleaved` matrix, in FP8 if it is scaled."""
    dtype = state.rows.dtype if scale is None else E4M3
    out = torch.empty(len(state.rows), len(w.rows) // 2, dtype=dtype, device=state.rows.device)
    cut = cut or (GATE_FP8 if w.in_fp8 else GATE)
    _launch_epilogue("gate", state.operand, w, out, cut, state=state, eps=eps, out_scale=scale)
    return out


def join(
    state: State, y: Tensor, w: Matrix, alpha: float, eps: float, cut: ProductTiles | None = None
) -> State:
    """Return α·N(state) + y @ w.T, before its norm."""
    if cut is None:
        fp8 = LONG_JOIN_FP8 if y.shape[1] >= LONG else JOIN_FP8
        cut = fp8 if w.in_fp8 else JOIN
    out = torch.empty_like(state.rows)
    copy = torch.empty_like(out, dtype=E4M3) if w.in_fp8 else None
    parts = len(w.rows) // min(cut.columns, len(w.rows))
    squares = torch.empty(len(y), parts, dtype=torch.float32, device=y.device)
    _launch_epilogue(
        "join", y, w, out, cut, state=state, beside=state.rows, copy=copy, squares=squares, alpha=alpha,
        eps=eps,
    )  # fmt: skip
    return State(out, squares, copy)


def added(state: State, other: Tensor | None = None, *, eps: float = 0.0, fp8: bool = False) -> State:
    """Return N(state) + other, with a copy in FP8 if asked for."""
    n, width = state.rows.shape
    out = torch.empty_like(state.rows)
    copy = torch.empty_like(out, dtype=E4M3) if fp8 else None
    block = triton.next_power_of_2(width)
    rows = max(1, 2048 // block)
    _add[(triton.cdiv(n, rows),)](
        state.rows, other, state.squares, out, copy, n, eps, WIDTH=width, BLOCK=block, ROWS=rows,
        PARTS=0 if state.squares is None else state.squares.shape[1], ADD=other is not None,
        LIMIT=limit(E4M3) if fp8 else 0.0,
    )  # fmt: skip
    return State(out, None, copy)


def paired(w: Tensor, head_size: int) -> Tensor:
    """Reorder a matrix of heads so that the numbers that rotary rotates together are side by side.

    Queries and keys in this order have the same products.
    """
    return w.view(-1, 2, head_size // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)


def unpaired(w: Tensor, head_size: int) -> Tensor:
    """Undo `paired`."""
    return w.view(-1, head_size // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave the rows of two matrices."""
    return torch.stack((gate, up), 1).flatten(0, 1)
