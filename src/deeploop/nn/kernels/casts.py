# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""FP8 casts: a value times its scale, and the transposed copies that FP8 products need.

Hopper multiplies FP8 matrices only if both run along the dimension that is summed over, so the backward pass
needs each operand transposed as well.

A kernel that writes both copies casts twice. The ptxas of Triton 3.6 miscompiles a cast whose result is both
stored along rows and taken byte by byte through shared memory: it reads registers before they are set, and
the transposed copy is garbage (triton-lang/triton#11111). The second cast has a pointer to the scale of its
own, or compilers would make one of the two.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error

TILE = {"TILE_N": 128, "TILE_W": 128, "num_warps": 8}  # the fastest of those tried on an H200


@triton.jit
def within(x, LIMIT: tl.constexpr):
    """x held within ±LIMIT; NaN stays NaN."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scaled(x, SCALE, LIMIT: tl.constexpr):
    """x times its scale, within ±LIMIT. Without a LIMIT, x as it is."""
    if LIMIT > 0:
        x = within(x * tl.load(SCALE), LIMIT)
    return x


@triton.jit
def _cast(
    X, SCALE, SCALE_AGAIN, Y, T, n, width, t_stride, LIMIT: tl.constexpr, ROWS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)[:, None]
    i = tl.program_id(0) * TILE_W + tl.arange(0, TILE_W)[None, :]
    live = (row < n) & (i < width)
    x = tl.load(X + row * width + i, mask=live, other=0.0)
    if ROWS:
        tl.store(
            Y + row * width + i, scaled(x.to(tl.float32), SCALE, LIMIT).to(Y.dtype.element_ty), mask=live
        )
        x = scaled(x.to(tl.float32), SCALE_AGAIN, LIMIT).to(T.dtype.element_ty)
    to = tl.trans(i).to(tl.int64) * t_stride + tl.trans(row)
    tl.store(T + to, tl.trans(x), mask=tl.trans(live))


def limit(dtype: torch.dtype) -> float:
    """The largest number of an FP8 format; 0 for wider ones, whose values are cast without a scale."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def cast_into(x: Tensor, scale: Tensor, rows: Tensor, columns: Tensor) -> None:
    """x·scale into `rows` (n, width) and, transposed, into `columns` (width, n), which may be a view."""
    _launch(x, scale, rows, columns, limit(columns.dtype))


def transposed(x: Tensor) -> Tensor:
    """An FP8 matrix (n, width) as (width, n)."""
    columns = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    _launch(x.view(torch.int8), None, None, columns.view(torch.int8), 0.0)
    return columns


def _launch(x: Tensor, scale: Tensor | None, rows: Tensor | None, columns: Tensor, most: float) -> None:
    n, width = x.shape
    grid = triton.cdiv(width, TILE["TILE_W"]), triton.cdiv(n, TILE["TILE_N"])
    _cast[grid](
        x, scale, scale, rows, columns, n, width, columns.stride(0), LIMIT=most, ROWS=rows is not None, **TILE
    )
