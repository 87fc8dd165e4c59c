# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""FP8 casts: a value times its scale, and the transposed copies that FP8 products need.

Hopper multiplies FP8 matrices only if both are contiguous along the dimension that is summed over, so the
backward pass also needs a transposed copy of each operand.

A kernel that writes both copies must cast twice. The ptxas of Triton 3.6 miscompiles a cast whose result is
both stored by rows and transposed through shared memory: it reads uninitialized registers, and the transposed
copy is garbage (triton-lang/triton#11111). The second cast reads the scale through a second pointer,
SCALE_AGAIN, so that the compiler can't merge the two casts.
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
    """Clamp x to ±LIMIT; NaN stays NaN."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scaled(x, SCALE, LIMIT: tl.constexpr):
    """Scale x and clamp it to ±LIMIT. If LIMIT is 0, return x unchanged."""
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
    """The largest finite value of an FP8 dtype; 0 for wider dtypes, which are cast without a scale."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def cast_into(x: Tensor, scale: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Write x·scale to `rows` (n, width) and its transpose to `columns` (width, n), which may be a view."""
    _launch(x, scale, rows, columns, limit(columns.dtype))


def transposed(x: Tensor) -> Tensor:
    """Copy an FP8 matrix (n, width) to a contiguous transpose (width, n)."""
    columns = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    # As int8, so that bytes are copied without a conversion.
    _launch(x.view(torch.int8), None, None, columns.view(torch.int8), 0.0)
    return columns


def _launch(x: Tensor, scale: Tensor | None, rows: Tensor | None, columns: Tensor, most: float) -> None:
    n, width = x.shape
    grid = triton.cdiv(width, TILE["TILE_W"]), triton.cdiv(n, TILE["TILE_N"])
    _cast[grid](
        x, scale, scale, rows, columns, n, width, columns.stride(0), LIMIT=most, ROWS=rows is not None, **TILE
    )
