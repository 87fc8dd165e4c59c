# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""An MLP across the positions of a small board, with its residual and its norm, as one kernel each way.

y = N(α·x + down @ (silu(gate @ x)·(up @ x))) of x (B, T, C), along T for each channel; N has no gain.

A program holds all positions of some channels of a board, so the hidden values, ten times as large as the
state, never leave the chip. The backward pass recomputes them, and writes the operands of the products for
the matrices' gradients, which sum over all boards and channels.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deeploop.nn.kernels.epilogues import State, _scales
from deeploop.nn.kernels.products import cached_cast
from deeploop.nn.layers import SwiGLU
from deeploop.nn.residual import ScaledResidual

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error

GROUPS = 64  # of boards, whose shares of a matrix's gradient are added up afterwards


class MixerTiles(NamedTuple):
    """Channels and hidden values of a tile, tiles in flight, warps."""

    channels: int = 128
    hidden: int = 64
    stages: int = 3
    warps: int = 8


FORWARD, BACKWARD = MixerTiles(), MixerTiles(hidden=32, stages=2)


class Mixer(NamedTuple):
    """The matrices of an MLP across T positions, padded with zeros to a power of two of positions."""

    sides: Tensor
    """Gate, and below it up: (2·hidden, positions)."""
    down: Tensor
    """Transposed: (hidden, positions)."""


@triton.jit
def _mix_forward(
    X, S, SIDES, DOWN, Y, R, alpha, eps, T, C: tl.constexpr, H: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BH: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    board = tl.program_id(0) // (C // BC)
    channel = (tl.program_id(0) % (C // BC)) * BC + tl.arange(0, BC)
    t = tl.arange(0, BT)
    live = (t < T)[:, None]
    at = (board * T + t).to(tl.int64)[:, None] * C + channel[None, :]
    x = tl.load(X + at, mask=live, other=0.0)
    if PARTS > 0:
        x = (x.to(tl.float32) * _scales(S, board * T + t, t < T, PARTS, C, eps)[:, None]).to(x.dtype)
    columns = tl.trans(x)
    total = tl.zeros((BC, BT), tl.float32)
    for j in range(0, H, BH):
        g = tl.dot(columns, SIDES.load([j, 0]).T)
        u = tl.dot(columns, SIDES.load([H + j, 0]).T)
        hidden = (g * tl.sigmoid(g) * u).to(x.dtype)
        total = tl.dot(hidden, DOWN.load([j, 0]), total)
    y = alpha * columns.to(tl.float32) + total
    r = tl.rsqrt(tl.sum(y * y, 1) / T + eps)
    tl.store(Y + at, tl.trans(y * r[:, None]).to(Y.dtype.element_ty), mask=live)
    if KEEP:
        tl.store(R + board * C + channel, r)


@triton.jit
def _mix_backward(
    X, Y, R, DY, SIDES, DOWN, DX, XT, DST, DSIDES, HIDDEN, alpha, T, C: tl.constexpr, H: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Compute DX and, transposed with a row for each channel of a board: x, the gradients of the branch and
    of gate and up, and the hidden values.
    """
    board = tl.program_id(0) // (C // BC)
    channel = (tl.program_id(0) % (C // BC)) * BC + tl.arange(0, BC)
    t = tl.arange(0, BT)
    live = (t < T)[:, None]
    at = (board * T + t).to(tl.int64)[:, None] * C + channel[None, :]
    row = (board * C + channel).to(tl.int64)
    y = tl.load(Y + at, mask=live, other=0.0).to(tl.float32)
    dy = tl.load(DY + at, mask=live, other=0.0).to(tl.float32)
    ds = (dy - y * (tl.sum(dy * y, 0) / T)[None, :]) * tl.load(R + row)[None, :]
    x = tl.load(X + at, mask=live, other=0.0)
    columns, narrow = tl.trans(x), tl.trans(ds.to(x.dtype))
    whole = row[:, None] * BT + t[None, :]
    tl.store(XT + whole, columns)
    tl.store(DST + whole, narrow)
    total = alpha * narrow.to(tl.float32)
    for j in range(0, H, BH):
        gate, up = SIDES.load([j, 0]), SIDES.load([H + j, 0])
        g, u = tl.dot(columns, gate.T), tl.dot(columns, up.T)
        dh = tl.dot(narrow, DOWN.load([j, 0]).T)
        s = tl.sigmoid(g)
        dg = (dh * u * s * (1 + g * (1 - s))).to(x.dtype)
        du = (dh * g * s).to(x.dtype)
        i = j + tl.arange(0, BH)[None, :]
        tl.store(HIDDEN + row[:, None] * H + i, (g * s * u).to(x.dtype))
        tl.store(DSIDES + row[:, None] * 2 * H + i, dg)
        tl.store(DSIDES + row[:, None] * 2 * H + H + i, du)
        total = tl.dot(dg, gate, total)
        total = tl.dot(du, up, total)
    tl.store(DX + at, tl.trans(total).to(DX.dtype.element_ty), mask=live)


def mixes(sublayer: ScaledResidual) -> bool:
    """Return True if a block's first sublayer is an MLP across positions."""
    return isinstance(sublayer.branch, SwiGLU)


@cached_cast
@torch.no_grad()
def mixer(branch: nn.Module, narrow: torch.dtype) -> Mixer:
    """Pack the matrices for the kernels."""
    swiglu: Any = branch
    positions = swiglu.gate.in_features
    missing = max(16, triton.next_power_of_2(positions)) - positions
    sides = torch.cat((swiglu.gate.weight, swiglu.up.weight)).to(narrow)
    down = swiglu.down.weight.to(narrow).T
    return Mixer(*(F.pad(own, (0, missing)).contiguous() for own in (sides, down)))


def _cut(x: Tensor, mixer: Mixer, cut: MixerTiles) -> dict[str, Any]:
    H, BT = mixer.down.shape
    return {
        "T": x.shape[1], "C": x.shape[2], "H": H, "BT": BT, "BC": gcd(cut.channels, x.shape[2]),
        "BH": min(cut.hidden, H), "num_stages": cut.stages, "num_warps": cut.warps,
    }  # fmt: skip


def _matrices(mixer: Mixer, sizes: dict[str, Any]) -> list[Any]:
    return [TensorDescriptor.from_tensor(matrix, [sizes["BH"], sizes["BT"]]) for matrix in mixer]


def mix(
    x: Tensor, mixer: Mixer, alpha: float, eps: float, *, squares: Tensor | None = None,
    r: Tensor | None = None, cut: MixerTiles = FORWARD,
) -> Tensor:  # fmt: skip
    """Return y of x (B, T, C), or of N(x) along C if its `squares` are given; `r` (B, C) receives 1/RMS."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    sizes = _cut(x, mixer, cut)
    _mix_forward[(len(x) * sizes["C"] // sizes["BC"],)](
        x, squares, *_matrices(mixer, sizes), y, r, alpha, eps, **sizes,
        PARTS=0 if squares is None else squares.shape[1], KEEP=r is not None,
    )  # fmt: skip
    return y


def mix_state(state: State, boards: int, mixer: Mixer, alpha: float, eps: float) -> State:
    """Mix rows before their norm, without a gradient."""
    rows = state.rows
    y = mix(rows.view(boards, -1, rows.shape[1]), mixer, alpha, eps, squares=state.squares)
    return State(y.view_as(rows), None)


class _Mix(torch.autograd.Function):
    """(x, gate, up, down) → y."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, mixer: Mixer, alpha: float, eps: float
    ) -> Tensor:
        r = torch.empty(len(x), x.shape[2], dtype=torch.float32, device=x.device)
        y = mix(x, mixer, alpha, eps, r=r)
        ctx.save_for_backward(x, y, r, *mixer)
        ctx.alpha, ctx.dtype = alpha, gate.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, y, r, *matrices = ctx.saved_tensors
        dx, *gradients = mix_backward(x, y, r, dy, Mixer(*matrices), ctx.alpha, ctx.dtype)
        return dx, *gradients, None, None, None


def mix_backward(
    x: Tensor, y: Tensor, r: Tensor, dy: Tensor, mixer: Mixer, alpha: float, dtype: torch.dtype,
    cut: MixerTiles = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, gate, up and down."""
    B, T, C = x.shape
    sizes = _cut(x, mixer, cut)
    H, BT = mixer.down.shape
    dx = torch.empty_like(x)
    columns, ds, dsides, hidden = (
        torch.empty(B * C, width, dtype=x.dtype, device=x.device) for width in (BT, BT, 2 * H, H)
    )
    _mix_backward[(B * C // sizes["BC"],)](
        x, y, r, dy.contiguous(), *_matrices(mixer, sizes), dx, columns, ds, dsides, hidden, alpha, **sizes
    )
    gate, up = _sum_of_products(dsides, columns, B)[:, :T].to(dtype).chunk(2)
    return dx, gate, up, _sum_of_products(ds, hidden, B)[:T].to(dtype)


def _sum_of_products(a: Tensor, b: Tensor, boards: int) -> Tensor:
    """Return a.T @ b in fp32 for many rows and few columns, by groups of rows so that enough programs have
    work.
    """
    groups = gcd(boards, GROUPS)
    a, b = a.view(groups, -1, a.shape[1]), b.view(groups, -1, b.shape[1])
    if a.is_cuda:
        return torch.bmm(a.transpose(1, 2), b, out_dtype=torch.float32).sum(0)
    return (a.transpose(1, 2) @ b).float().sum(0)


def mix_with_gradient(sublayer: ScaledResidual, x: Tensor, mixer: Mixer, eps: float) -> Tensor:
    """Apply the whole sublayer to x (B, T, C)."""
    m: Any = sublayer.branch
    return _Mix.apply(x, m.gate.weight, m.up.weight, m.down.weight, mixer, sublayer.alpha, eps)
