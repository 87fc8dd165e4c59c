"""Blocks of which nobody asks a gradient, as four products and an attention each.

For blocks x ← N(α·x + f(x)) whose norms have no gain, as the reasoners' are: everything between the products
is done at their ends (`epilogues.py`), and nothing is written that only a backward pass would read.
"""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.nn.kernels.attention import attend
from deeploop.nn.kernels.epilogues import State, added, fits_tiles, gate, interleaved, join, paired, rotate
from deeploop.nn.kernels.stack import Packed, Sublayers, packs_of
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary


def fits(block: Sublayers) -> bool:
    """Whether these kernels know a block: one norm a sublayer, outside and without a gain; whole tiles."""
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
    return bare and sees_all and fits_tiles(a.q.in_features, m.gate.out_features, a.head_size)


@torch.no_grad()
def run(
    blocks: Sequence[Sublayers], x: Tensor, rotary: Rotary, narrow: torch.dtype, positions: int | None = None
) -> Tensor:
    """All blocks on x (B, T, width), once, in `narrow`; of the last one the first `positions` alone."""
    B, width = len(x), x.shape[-1]
    state = State(x.to(narrow).reshape(-1, width).contiguous(), None)
    for block, packed in zip(blocks, packs_of(blocks, narrow), strict=True):
        state = _block(block, packed, state, rotary, B, positions if block is blocks[-1] else None)
    last_norm: Any = blocks[-1][1].outer
    return added(state, eps=last_norm.eps).view(B, -1, width)


def _block(
    block: Sublayers, packed: Packed, state: State, rotary: Rotary, B: int, positions: int | None
) -> State:
    first, second = block
    outer: Any = first.outer
    attention: Any = first.branch
    packed = _reordered(packed, attention.head_size)
    T, width = len(state.rows) // B, state.rows.shape[1]
    heads, eps = width // attention.head_size, outer.eps
    qkv = rotate(state, packed.qkv, rotary, attention.head_size, eps)
    if positions is None:
        y = attend(qkv, T, heads)
    else:
        q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q[:, :, :positions], k, v, scale=log(2))  # q is log₂e times larger
        y = y.transpose(1, 2).reshape(-1, width)
        squares = None if state.squares is None else _first(state.squares, B, positions)
        state = State(_first(state.rows, B, positions), squares)
    state = join(state, y, packed.o, first.alpha, eps)
    hidden = gate(state, packed.gate_up, eps)
    return join(state, hidden, packed.down, second.alpha, eps)


def _first(rows: Tensor, B: int, positions: int) -> Tensor:
    return rows.view(B, -1, rows.shape[-1])[:, :positions].flatten(0, 1).contiguous()


def _reordered(packed: Packed, head_size: int) -> Packed:
    """A block's matrices in the order in which these products take their rows."""
    queries_keys, values = packed.qkv.tensor_split([2 * packed.qkv.shape[1]])
    qkv = torch.cat((paired(queries_keys, head_size), values))
    return packed._replace(qkv=qkv, gate_up=interleaved(*packed.gate_up.chunk(2)))
