# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Products of one input with several matrices at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy.T @ x: in fp32 straight out of the product, if the gradient is wanted in it."""
    if dy.is_cuda and dy.dtype != dtype and dtype == torch.float32:
        return torch.mm(dy.T, x, out_dtype=torch.float32)
    return (dy.T @ x).to(dtype)


class _PackedLinear(torch.autograd.Function):
    """x @ [W; W′; …].T in x's dtype. The matrices are packed at each use: a pass over them, not over x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return x @ _pack(weights, x.dtype).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        whole = weight_gradient(dy, x, weights[0].dtype)
        return dy @ _pack(weights, x.dtype), *whole.split([len(w) for w in weights])


def _pack(weights: Any, dtype: torch.dtype) -> Tensor:
    if len(weights) == 1:
        return weights[0].to(dtype)
    packed = torch.empty(sum(map(len, weights)), weights[0].shape[1], dtype=dtype, device=weights[0].device)
    torch._foreach_copy_(list(packed.split([len(w) for w in weights])), list(weights))
    return packed


def packed_linear(x: Tensor, *weights: Tensor) -> Tensor:
    """The products of x (n, width) with several matrices, side by side, as one product."""
    return _PackedLinear.apply(x, *weights)
