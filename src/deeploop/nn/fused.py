"""A block's two sublayers on the Triton kernels: the same equations, a third of the memory traffic.

Used for training on a GPU in bf16 (`install`); everything else runs the modules as they are written, which is
also what this file is tested against. The stream keeps its dtype, fp32 in a language model; the branches
are bf16 as under autocast.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary, SelfAttention, SwiGLU
from deeploop.nn.residual import ScaledResidual

HAS_TRITON = importlib.util.find_spec("triton") is not None
_plain = False


@contextmanager
def plainly() -> Iterator[None]:
    """Inside, blocks run as they are written: hooks are called, and gradients can be differentiated again."""
    global _plain
    before, _plain = _plain, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _plain = before


def fits(first: ScaledResidual, second: ScaledResidual) -> bool:
    """Whether the kernels know these sublayers: attention, then SwiGLU, and RMSNorm throughout."""
    norms = [norm for sublayer in (first, second) for norm in (sublayer.inner, sublayer.outer)]
    return (
        HAS_TRITON
        and isinstance(first.branch, SelfAttention)
        and isinstance(second.branch, SwiGLU)
        and all(isinstance(norm, RMSNorm | nn.Identity) for norm in norms)
        and all(norm.weight is not None for norm in (first.inner, second.inner) if isinstance(norm, RMSNorm))
        and first.branch.head_size >= 16
    )


def install(block: nn.Module) -> bool:
    """Lets the block run on the kernels wherever a call is one for them; whether it can."""
    sublayers = _sublayers(block)
    if len(sublayers) != 2 or not fits(*sublayers):
        return False
    # A method, not a closure: a copy of the block must not run on the weights of this one.
    block.forward = MethodType(_forward, block)
    return True


def _forward(block: nn.Module, x: Tensor, rotary: Rotary, *rest: Any) -> Any:
    # What follows are a mask, a cache and its slot: none of them in training.
    if _wanted(x) and all(item is None for item in rest):
        first, second = _sublayers(block)
        return run(first, second, x, rotary, torch.get_autocast_dtype("cuda"))
    return type(block).forward(block, x, rotary, *rest)


def _sublayers(block: nn.Module) -> list[ScaledResidual]:
    return [child for child in block.children() if isinstance(child, ScaledResidual)]


def _wanted(x: Tensor) -> bool:
    """Whether this call is one for the kernels: in bf16 on a GPU, and nobody is looking inside."""
    return x.is_cuda and not _plain and torch.is_autocast_enabled("cuda")


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
    from deeploop.nn import kernels

    if isinstance(inner, RMSNorm):
        assert inner.weight is not None
        return kernels.prenorm(x, inner.weight, inner.eps, narrow)
    return x, x.to(narrow)


def _join(
    sublayer: ScaledResidual, x: Tensor, f: Tensor, following: nn.Module | None
) -> tuple[Tensor, Tensor | None]:
    """x ← outer(α·x + ε·f), and the inner norm of the sublayer that follows."""
    from deeploop.nn import kernels

    outer, after = (norm if isinstance(norm, RMSNorm) else None for norm in (sublayer.outer, following))
    eps = (outer or after or RMSNorm(1)).eps
    return kernels.residual(
        x,
        f.view_as(x),
        alpha=sublayer.alpha,
        epsilon=sublayer.epsilon,
        outer=outer is not None,
        gain=None if outer is None else outer.weight,
        after=None if after is None else after.weight,
        eps=eps,
    )


def _attend(attention: Any, h: Tensor, rotary: Rotary) -> Tensor:
    from deeploop.nn import kernels

    B, T, width = h.shape
    weights = attention.q.weight, attention.k.weight, attention.v.weight
    packed = kernels.packed_linear(h.view(-1, width), *weights).view(B, T, -1)
    causal = isinstance(attention, CausalSelfAttention)
    gains = (attention.q_norm.weight, attention.k_norm.weight) if causal else None
    eps = attention.q_norm.eps if causal else 0.0
    q, k, v = kernels.rotary(packed, *rotary, width // attention.head_size, gains, eps)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return kernels.packed_linear(y.transpose(1, 2).reshape(-1, width), attention.o.weight)


def _feed(swiglu: Any, h: Tensor) -> Tensor:
    from deeploop.nn import kernels

    packed = kernels.packed_linear(h.view(-1, h.shape[-1]), swiglu.gate.weight, swiglu.up.weight)
    return kernels.swiglu_down(packed, swiglu.down.weight)
