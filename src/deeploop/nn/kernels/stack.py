"""Blocks on the kernels, for any number of rounds: the same equations, a third of the memory traffic.

The stream keeps its dtype, fp32 in a language model; the branches are bf16 as under autocast. Each residual
also returns the normalised input of the next sublayer, in the next block or round too, and a matrix is cast
once for all its visits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.nn.documents import Documents
from deeploop.nn.kernels.document_attention import attend_inside
from deeploop.nn.kernels.mixer import Mixer, mix_with_gradient, mixer, mixes
from deeploop.nn.kernels.norms import prenorm, residual
from deeploop.nn.kernels.products import cached_cast, pack, packed_linear, product_groups
from deeploop.nn.kernels.rotary import rotary_qkv
from deeploop.nn.kernels.swiglu import swiglu_down
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary
from deeploop.nn.recompute import maybe_checkpoint
from deeploop.nn.residual import ScaledResidual

Sublayers = tuple[ScaledResidual, ScaledResidual]  # attention or an MLP across positions, then SwiGLU
Inject = Callable[[Tensor], Tensor]


class Attention(NamedTuple):
    """The matrices of attention."""

    qkv: Tensor
    o: Tensor


class Packed(NamedTuple):
    """A block's packed matrices."""

    first: "Attention | Mixer"
    gate_up: Tensor
    down: Tensor


def run(
    blocks: Sequence[Sublayers],
    x: Tensor,
    rotary: Rotary,
    narrow: torch.dtype,
    *,
    documents: Documents | None = None,
    rounds: int = 1,
    recompute: bool = False,
    ends: bool = True,
    inject: Inject | None = None,
    positions: int | None = None,
) -> Tensor:
    """Run all blocks on x (B, T, width), `rounds` times, branches in `narrow`; causal if the attention is.

    With `documents`, attention stays within each, and `rotary` has a row per token, (B, 1, T, D/2).
    `recompute`: the activations of every round are recomputed in the backward pass, except the last one's if
    the model's rounds end here.
    `inject` changes the stream before every round, in its own precision.
    `positions`: the number of the last block's outputs that are read; no more are computed.
    """
    with torch.autocast(x.device.type, enabled=False):
        packs = packs_of(blocks, narrow)
        h = None
        if inject is None:
            x, h = enter(blocks[0][0].inner, x, narrow)
        for index in range(rounds):
            last = index == rounds - 1
            x, h = maybe_checkpoint(
                *(_round, blocks, packs, x, h, rotary, documents, last, inject, positions),
                recompute=recompute and not (last and ends),
            )
    return x


def _round(
    blocks: Sequence[Sublayers],
    packs: Sequence[Packed],
    x: Tensor,
    h: Tensor | None,
    rotary: Rotary,
    documents: Documents | None,
    last: bool,
    inject: Inject | None,
    positions: int | None,
) -> tuple[Tensor, Tensor]:
    """Run every block once; `h` is the first attention's input, and the `h` returned is that of the next
    round.

    With `inject` it is computed here: the round before does not know what the first attention will read.
    """
    if inject is not None:
        x, h = enter(blocks[0][0].inner, inject(x), packs[0].gate_up.dtype)
        last = True
    assert h is not None
    following = [first.inner for first, _ in (*blocks[1:], blocks[0])]
    for k, ((first, second), packed) in enumerate(zip(blocks, packs, strict=True)):
        ending = last and k == len(blocks) - 1
        after = None if ending else following[k]
        read = positions if ending else None
        if isinstance(packed.first, Mixer):
            x = h = mix_with_gradient(first, h, packed.first, norm_eps(first.outer))[:, :read]
        else:
            y = _attend(first.branch, packed.first, h, rotary, documents, read)
            x, h = join(first, x[:, :read], y, second.inner)
        x, h = join(second, x, _feed(second.branch, packed, h), after)
    return x, h


@cached_cast
def packs_of(blocks: Sequence[Sublayers], narrow: torch.dtype) -> list[Packed]:
    """Pack the matrices of every block in `narrow`, joining those that share an input."""
    groups = [[layer.weight for layer in group] for pair in blocks for group in product_groups(pair)]
    packed = iter(pack(*groups, dtype=narrow))

    def first(sublayer: ScaledResidual) -> Attention | Mixer:
        return mixer(sublayer.branch, narrow) if mixes(sublayer) else Attention(next(packed), next(packed))

    return [Packed(first(sublayer), next(packed), next(packed)) for sublayer, _ in blocks]


def norm_eps(*norms: nn.Module | None) -> float:
    """Return the eps of the first RMSNorm, which all norms of a model share; 0 if there is none."""
    return next((norm.eps for norm in norms if isinstance(norm, RMSNorm)), 0.0)


def enter(inner: nn.Module, x: Tensor, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the stream, and the first sublayer's input in `narrow`, normalised by its inner norm if it has
    one.
    """
    if isinstance(inner, RMSNorm):
        assert inner.weight is not None
        return prenorm(x, inner.weight, inner.eps, narrow)
    return x, x.to(narrow)


def join(
    sublayer: ScaledResidual, x: Tensor, f: Tensor, following: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """x ← outer(α·x + ε·f); also return the next sublayer's input, normalised by its inner norm if it has
    one.
    """
    outer, after = (norm if isinstance(norm, RMSNorm) else None for norm in (sublayer.outer, following))
    y, h = residual(
        x,
        f.view_as(x),
        alpha=sublayer.alpha,
        epsilon=sublayer.epsilon,
        outer=outer is not None,
        gain=None if outer is None else outer.weight,
        after=None if after is None else after.weight,
        eps=norm_eps(outer, after),
    )
    if following is None:  # nothing reads it
        return y, y
    return y, y.to(f.dtype) if h is None else h


def _attend(
    attention: Any,
    packed: Attention,
    h: Tensor,
    rotary: Rotary,
    documents: Documents | None,
    positions: int | None,
) -> Tensor:
    B, T, width = h.shape
    weights = attention.q.weight, attention.k.weight, attention.v.weight
    qkv = packed_linear(h.view(-1, width), packed.qkv, *weights).view(B, T, -1)
    causal = isinstance(attention, CausalSelfAttention)
    gains = (attention.q_norm.weight, attention.k_norm.weight) if causal else None
    eps = attention.q_norm.eps if causal else 0.0
    q, k, v = rotary_qkv(qkv, *rotary, width // attention.head_size, gains, eps)
    y = attend_heads(q[:, :, :positions], k, v, causal, documents)
    return packed_linear(y.transpose(1, 2).reshape(-1, width), packed.o, attention.o.weight)


def attend_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None) -> Tensor:
    """Compute causal attention, within documents if there are any, or attention to all positions."""
    if documents is not None:
        return attend_inside(q, k, v, documents)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _feed(swiglu: Any, packed: Packed, h: Tensor) -> Tensor:
    sides = packed_linear(h.view(-1, h.shape[-1]), packed.gate_up, swiglu.gate.weight, swiglu.up.weight)
    return swiglu_down(sides, packed.down, swiglu.down.weight)
