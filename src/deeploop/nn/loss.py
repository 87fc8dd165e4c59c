"""Cross-entropy: of a linear head, without ever holding the whole logits tensor, and by stablemax.

For P positions and V words the logits are P×V numbers, more than everything else in a small model. Here the
positions are processed in chunks. Each chunk's gradients are computed in the forward pass, while its logits
are in memory; the backward pass only multiplies them by the incoming scalar.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_LOGITS = 2**27  # logits held at a time: 512 MiB in fp32
Chunk = Callable[..., Tensor]  # (logits, targets, bias, grad=…) → losses; the logits become their gradient
MAX_NARROW_LOGITS = 2**29  # by the kernel, which holds them once, and in bf16: 1 GiB


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Σ over positions with target ≥ 0 of −log softmax(x @ weight.T + bias)[target], in fp32 or wider.

    x (..., width), weight (V, width), targets (...), bias (V,). Under autocast the products run in its
    dtype; the bias, the softmax and the sums over chunks never do. `chunk` positions are held at a time.
    `weights` (...) multiply the positions' losses, and have gradients too.
    """
    kernel, chunk = _how(x, weight, chunk)
    # The Function's own needs_input_grad is blind to no_grad, and grad mode is off inside it: ask here.
    grad = torch.is_grad_enabled()
    flat = None if weights is None else weights.flatten()
    given = (x, weight, bias, flat)
    wanted = tuple(grad and tensor is not None and tensor.requires_grad for tensor in given)
    positions = x.flatten(0, -2), targets.flatten()
    loss: Tensor = _LinearCrossEntropy.apply(*positions, weight, bias, flat, chunk, wanted, kernel)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def token_losses(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, chunk: int | None = None
) -> Tensor:
    """The summands of `linear_cross_entropy`, shaped like the targets; 0 where those are below 0."""
    kernel, chunk = _how(x, weight, chunk)
    flat, wide = x.flatten(0, -2), torch.promote_types(x.dtype, torch.float32)
    target, losses = targets.flatten(), torch.empty(targets.numel(), dtype=wide, device=x.device)
    for start in range(0, len(flat), chunk):
        rows = slice(start, start + chunk)
        logits = F.linear(flat[rows], weight)
        logits = logits if kernel else logits.to(wide)
        losses[rows] = (kernel or _plain)(logits, target[rows], bias, grad=False)
    return losses.view_as(targets)


def _how(x: Tensor, weight: Tensor, chunk: int | None) -> tuple[Chunk | None, int]:
    """Choose the kernel, if it applies, and the number of positions per chunk."""
    kernel = _kernel() if x.is_cuda and torch.is_autocast_enabled("cuda") else None
    if chunk is None:
        most = MAX_LOGITS if kernel is None else MAX_NARROW_LOGITS
        chunk = 1 << (max(1, most // len(weight)).bit_length() - 1)  # a power of two
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: must be at least 1")
    return kernel, chunk


@cache
def _kernel() -> Chunk | None:
    """Return the Triton kernel, which needs one pass over the logits instead of six, if it applies."""
    try:
        from deeploop.nn.kernels.cross_entropy import cross_entropy_
    except ImportError:
        return None
    return cross_entropy_


def stablemax_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−log(s(x_target) / Σ s(x)) of every position, in float64; 0 where the target is below 0.

    s(x) = x + 1 for x ≥ 0, else 1 / (1 − x). logits (..., V), targets (...).
    """
    x = logits.double()
    # Each branch sees only its own side: 1 / (1 − x) has a pole at 1, which `where` would pass on as NaN.
    s = torch.where(x < 0, 1 / (1 - x.clamp(max=0)), x.clamp(min=0) + 1)
    kept = targets >= 0
    chosen = s.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(kept, s.sum(-1).log() - chosen.log(), 0.0)


def _plain(logits: Tensor, targets: Tensor, bias: Tensor | None, *, grad: bool) -> Tensor:
    """−log softmax(logits + bias)[target] of each row, 0 where the target is below 0.

    The logits (C, V), in fp32 or wider, are overwritten: with `grad` by the gradient of the sum.
    """
    kept = (targets >= 0).unsqueeze(1)
    target = targets.clamp(min=0).unsqueeze(1)
    if bias is not None:
        logits += bias
    logp = logits.log_softmax(dim=-1)
    losses = -logp.gather(1, target) * kept
    if grad:  # softmax − onehot
        torch.exp(logp, out=logits).scatter_add_(1, target, logp.new_full(target.shape, -1.0)).mul_(kept)
    return losses.squeeze(1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        chunk: int,
        wanted: tuple[bool, bool, bool, bool],
        kernel: Chunk | None,
    ) -> Tensor:
        device = x.device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            w = weight.to(narrow)
            loss = torch.zeros((), dtype=wide, device=x.device)
            grad_x = torch.empty_like(x) if wanted[0] else None
            grad_w = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
            grad_b = torch.zeros(len(weight), dtype=wide, device=x.device) if wanted[2] else None
            grad_p = torch.empty(len(x), dtype=wide, device=x.device) if wanted[3] else None
            for start in range(0, len(x), chunk):
                rows = slice(start, start + chunk)
                h = x[rows].to(narrow)
                d = h @ w.T if kernel else (h @ w.T).to(wide)  # (C, V): logits, then their gradient
                losses = (kernel or _plain)(d, targets[rows], bias, grad=any(wanted))
                if grad_p is not None:
                    grad_p[rows] = losses
                if weights is not None:
                    losses = losses * weights[rows]
                    d *= weights[rows, None]
                loss += losses.sum()
                if grad_b is not None:
                    grad_b += d.sum(0, dtype=wide)
                if grad_x is not None:
                    grad_x[rows] = d.to(narrow) @ w
                if grad_w is not None:
                    _add_product(grad_w, d.to(narrow).T, h)
        ctx.save_for_backward(grad_x, grad_w, grad_b, grad_p)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w, grad_b, grad_p = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x * grad_loss
        if grad_w is not None:
            grad_w = (grad_w * grad_loss).to(ctx.dtypes[0])
        if grad_b is not None:
            grad_b = (grad_b * grad_loss).to(ctx.dtypes[1])
        if grad_p is not None:
            grad_p = grad_p * grad_loss
        return grad_x, None, grad_w, grad_b, grad_p, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in one pass if a GPU accumulates narrow products in fp32 itself."""
    if a.is_cuda and total.dtype == torch.float32 and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b
