"""A block's two sublayers on the kernels: the same equations, a third of the memory traffic.

The stream keeps its dtype, fp32 in a language model; the branches are bf16 as under autocast.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.nn.kernels.norms import prenorm, residual
from deeploop.nn.kernels.products import packed_linear
from deeploop.nn.kernels.rotary import turned
from deeploop.nn.kernels.swiglu import swiglu_down
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary
from deeploop.nn.residual import ScaledResidual


def run(
    first: ScaledResidual, second: ScaledResidual, x: Tensor, rotary: Rotary, narrow: torch.dtype
) -> Tensor:
    """Both residual equations on x (B, T, width), branches in `narrow`; causal if the attention is."""
    with torch.autocast(x.device.type, enabled=False):
        x, h = _enter(first.inner, x, narrow)
        x, following = _join(first, x, _attend(first.branch, h, rotary), second.inner)
        h = x.to(narrow) if following is None else following
        x, _ = _join(second, x, _feed(second.branch, h), None)
    return x


def _enter(inner: nn.Module, x: Tensor, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    if isinstance(inner, RMSNorm):
        assert inner.weight is not None
        return prenorm(x, inner.weight, inner.eps, narrow)
    return x, x.to(narrow)


def _join(
    sublayer: ScaledResidual, x: Tensor, f: Tensor, following: nn.Module | None
) -> tuple[Tensor, Tensor | None]:
    """x ← outer(α·x + ε·f), and the inner norm of the sublayer that follows."""
    outer, after = (norm if isinstance(norm, RMSNorm) else None for norm in (sublayer.outer, following))
    return residual(
        x,
        f.view_as(x),
        alpha=sublayer.alpha,
        epsilon=sublayer.epsilon,
        outer=outer is not None,
        gain=None if outer is None else outer.weight,
        after=None if after is None else after.weight,
        eps=next((norm.eps for norm in (outer, after) if norm is not None), 0.0),
    )


def _attend(attention: Any, h: Tensor, rotary: Rotary) -> Tensor:
    B, T, width = h.shape
    weights = attention.q.weight, attention.k.weight, attention.v.weight
    packed = packed_linear(h.view(-1, width), *weights).view(B, T, -1)
    causal = isinstance(attention, CausalSelfAttention)
    gains = (attention.q_norm.weight, attention.k_norm.weight) if causal else None
    eps = attention.q_norm.eps if causal else 0.0
    q, k, v = turned(packed, *rotary, width // attention.head_size, gains, eps)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return packed_linear(y.transpose(1, 2).reshape(-1, width), attention.o.weight)


def _feed(swiglu: Any, h: Tensor) -> Tensor:
    packed = packed_linear(h.view(-1, h.shape[-1]), swiglu.gate.weight, swiglu.up.weight)
    return swiglu_down(packed, swiglu.down.weight)
