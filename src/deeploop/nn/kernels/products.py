# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Products of one input with several matrices at once, and a cache of casts for several calls."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deeploop.nn.residual import ScaledResidual

P = ParamSpec("P")
T = TypeVar("T")
_cache: ContextVar[dict[Any, Any] | None] = ContextVar("cast_cache", default=None)  # a thread has its own


@contextmanager
def cast_cache() -> Iterator[None]:
    """Cast weights once for all calls in this context, as autocast does; they must not change in it."""
    before = _cache.get()
    token = _cache.set({} if before is None else before)
    try:
        yield
    finally:
        _cache.reset(token)


def cached_cast(make: Callable[P, T]) -> Callable[P, T]:
    """Cache a function of weights alone by its arguments, within a `cast_cache`."""

    @wraps(make)
    def cached(*args: P.args, **options: P.kwargs) -> T:
        cache = _cache.get()
        if cache is None:
            return make(*args, **options)
        given = *args, *options.items()
        key = cached, *(tuple(part) if isinstance(part, list) else part for part in given)
        if key not in cache:
            cache[key] = make(*args, **options)
        found: T = cache[key]
        return found

    return cached


def product_groups(pair: tuple[ScaledResidual, ScaledResidual]) -> tuple[tuple[nn.Linear, ...], ...]:
    """A block's products, each with the layers that share its input: q k v, o, gate up, down.

    An MLP across positions has none of these: `mixer.py` takes its matrices as they are.
    """
    a: Any = pair[0].branch
    m: Any = pair[1].branch
    attention = ((a.q, a.k, a.v), (a.o,)) if hasattr(a, "q") else ()
    return *attention, (m.gate, m.up), (m.down,)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dy.T @ x, in fp32 straight from the product if the gradient is wanted in fp32."""
    if dy.is_cuda and dy.dtype != dtype and dtype == torch.float32:
        return torch.mm(dy.T, x, out_dtype=torch.float32)
    return (dy.T @ x).to(dtype)


def pack(*groups: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Stack the matrices of each group in another dtype, outside any graph."""
    packed = [torch.empty(sum(map(len, g)), g[0].shape[1], dtype=dtype, device=g[0].device) for g in groups]
    places = [place for to, g in zip(packed, groups, strict=True) for place in to.split([len(w) for w in g])]
    with torch.no_grad():
        torch._foreach_copy_(places, [w for g in groups for w in g])  # one call: the device waits for it
    return packed


class _PackedLinear(torch.autograd.Function):
    """x @ packed.T, whose gradient goes to the matrices that were packed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, packed)
        ctx.dtype, ctx.rows = weights[0].dtype, [len(w) for w in weights]
        return x @ packed.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, packed = ctx.saved_tensors
        return dy @ packed, None, *weight_gradient(dy, x, ctx.dtype).split(ctx.rows)


def packed_linear(x: Tensor, packed: Tensor, *weights: Tensor) -> Tensor:
    """Multiply x (n, width) by matrices side by side, as one product with the result of `pack`."""
    return _PackedLinear.apply(x, packed, *weights)
