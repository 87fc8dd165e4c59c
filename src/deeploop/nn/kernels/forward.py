"""Blocks without gradients, each as four matrix products and one attention.

For blocks x ← N(α·x + f(x)) whose norms have no gain, such as the reasoners': everything between the products
is done in their epilogues (`epilogues.py`), and nothing is written that only a backward pass would read. The
products are bf16 or FP8; the stream and attention are bf16.
"""

from collections.abc import Sequence
from math import log
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.nn.fp8 import E4M3, block_scales, in_e4m3
from deeploop.nn.kernels.attention import attend
from deeploop.nn.kernels.epilogues import (
    HEAD_SIZES,
    Matrix,
    State,
    added,
    fits_tiles,
    gate,
    interleaved,
    join,
    paired,
    rotate,
)
from deeploop.nn.kernels.fp8_matrices import fp8_operands
from deeploop.nn.kernels.mixer import Mixer, mix_state, mixes
from deeploop.nn.kernels.products import cached_cast
from deeploop.nn.kernels.stack import Attention, Sublayers, packs_of
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary
from deeploop.nn.residual import ScaledResidual


class Matrices(NamedTuple):
    """A block's matrices."""

    first: tuple[Matrix, Matrix] | Mixer
    """Those of q, k, v and of o; or of an MLP across positions."""
    gate_up: Matrix
    down: Matrix


def fits(block: Sublayers) -> bool:
    """Return True if these kernels support a block: per sublayer one outer norm without a gain."""
    bare = all(
        isinstance(sublayer.inner, nn.Identity)
        and isinstance(sublayer.outer, RMSNorm)
        and sublayer.outer.weight is None
        and sublayer.epsilon == 1
        for sublayer in block
    )
    a: Any = block[0].branch
    m: Any = block[1].branch
    sees_all = not isinstance(a, CausalSelfAttention)
    size = HEAD_SIZES[0] if mixes(block[0]) else a.head_size
    return bare and sees_all and fits_tiles(m.gate.in_features, m.gate.out_features, size)


@torch.no_grad()
def run(
    blocks: Sequence[Sublayers],
    z: Tensor,
    other: Tensor,
    rotary: Rotary,
    narrow: torch.dtype,
    positions: int | None = None,
    *,
    fp8: bool = False,
) -> Tensor:
    """Run all blocks once on z + other (B, T, width), in `narrow`; the last one on its first `positions`
    only.
    """
    B, _, width = z.shape
    z, other = (part.to(narrow).reshape(-1, width).contiguous() for part in (z, other))
    state = added(State(z, None), other, fp8=fp8)
    matrices = _matrices_fp8(blocks) if fp8 else _matrices(blocks, narrow)
    for block, own in zip(blocks, matrices, strict=True):
        state = _block(block, own, state, rotary, B, positions if block is blocks[-1] else None)
    last_norm: Any = blocks[-1][1].outer
    return added(state, eps=last_norm.eps).rows.view(B, -1, width)


def _block(
    block: Sublayers, matrices: Matrices, state: State, rotary: Rotary, B: int, positions: int | None
) -> State:
    first, second = block
    outer: Any = first.outer
    eps = outer.eps
    if isinstance(matrices.first, Mixer):
        state = mix_state(state, B, matrices.first, first.alpha, eps)
        if positions is not None:
            state = State(_first(state.rows, B, positions), None)
    else:
        state = _attend(first, matrices.first, state, rotary, B, positions, eps)
    hidden = gate(state, matrices.gate_up, eps, scale=matrices.down.scale)
    return join(state, hidden, matrices.down, second.alpha, eps)


def _attend(
    sublayer: ScaledResidual,
    matrices: tuple[Matrix, Matrix],
    state: State,
    rotary: Rotary,
    B: int,
    positions: int | None,
    eps: float,
) -> State:
    attention: Any = sublayer.branch
    T, width = len(state.rows) // B, state.rows.shape[1]
    heads = width // attention.head_size
    qkv = rotate(state, matrices[0], rotary, attention.head_size, eps)
    scale = matrices[1].scale
    if positions is None:
        y = attend(qkv, T, heads, scale=scale)
    else:
        q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q[:, :, :positions], k, v, scale=log(2))  # q is log₂e times larger
        y = y.transpose(1, 2).reshape(-1, width)
        y = y if scale is None else in_e4m3(y * scale)
        squares = None if state.squares is None else _first(state.squares, B, positions)
        state = State(_first(state.rows, B, positions), squares)
    return join(state, y, matrices[1], sublayer.alpha, eps)


def _first(rows: Tensor, B: int, positions: int) -> Tensor:
    return rows.view(B, -1, rows.shape[-1])[:, :positions].flatten(0, 1).contiguous()


@cached_cast
def _matrices(blocks: Sequence[Sublayers], dtype: torch.dtype) -> list[Matrices]:
    """Return every block's matrices, with their rows in the order that these products use."""
    found = []
    for (first, _), packed in zip(blocks, packs_of(blocks, dtype), strict=True):
        own = packed.first if isinstance(packed.first, Mixer) else _paired(first.branch, packed.first)
        both = interleaved(*packed.gate_up.chunk(2))
        found.append(Matrices(own, Matrix(both), Matrix(packed.down)))
    return found


def _paired(attention: Any, packed: Attention) -> tuple[Matrix, Matrix]:
    queries_keys, values = packed.qkv.tensor_split([2 * packed.qkv.shape[1]])
    qkv = torch.cat((paired(queries_keys, attention.head_size), values))
    return Matrix(qkv), Matrix(packed.o)


@cached_cast
def _matrices_fp8(blocks: Sequence[Sublayers]) -> list[Matrices]:
    """Return the matrices in FP8. Products of a state read it unscaled, the others scaled operands."""
    found = []
    for qkv, o, gate_up, down in fp8_operands(blocks, block_scales(blocks), in_pairs=True):
        both = interleaved(*gate_up.rows.view(torch.uint8).chunk(2)).view(E4M3)
        found.append(
            Matrices(
                (
                    Matrix(qkv.rows, inverse=qkv.weight_inverse),
                    Matrix(o.rows, o.scale, o.both_inverse),
                ),
                Matrix(both, inverse=gate_up.weight_inverse),
                Matrix(down.rows, down.scale, down.both_inverse),
            )
        )
    return found
