"""FP8 products of a block: the formats, and a scale for every operand that needs no history.

Weights and activations are e4m3, gradients e5m2, with one scale per tensor, a power of two. FP8 is floating
point: 15 binary orders of magnitude in e4m3, 30 in e5m2. A scale must only put a tensor into that range, so
its size can be estimated. Weights are measured once for all visits of a loop, or of a reasoner's modules. An
activation's size follows from them, because its input was normalised; a gradient's from them and from the
gradient that enters the loop's backward pass, which is measured there.

Nothing is kept from step to step, so a resumed run repeats an uninterrupted one.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.kernels.products import cached_cast, product_groups
from deeploop.nn.layers import RMSNorm
from deeploop.nn.residual import ScaledResidual

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of both dimensions of an FP8 product's operands

RMS = 4.0  # of a weight or an activation times its scale: 1/112 of e4m3's largest number, 448
HIDDEN_RMS = 0.25  # of SwiGLU's hidden values, which are products: of longer tails, and aligned by training
PEAK = 2.0**6  # of the loop's output gradient times its scale: e5m2 goes to 2^15.8, at 2 bits down to 2^-14
TINY = 1e-12  # used as the size of a matrix of zeros
TINY_GRADIENT = 1e-18  # and for the peak of a gradient that is zero: with TINY its scale is still finite


def against_tokens(tokens: int) -> str:
    """Return why this number of tokens can't be multiplied in FP8; empty if it can."""
    if tokens % MULTIPLE == 0:
        return ""
    fields = "model.context, data.length, model.puzzle_positions"
    advice = f"change optim.batch, device.micro_batch or the sequences' length ({fields})"
    return f"{tokens} tokens at once must be a multiple of {MULTIPLE}; {advice}"


def in_e4m3(x: Tensor) -> Tensor:
    """Cast x to FP8 without a scale, clamped to the format's range; NaN stays NaN."""
    most = torch.finfo(E4M3).max
    return x.clamp(-most, most).to(E4M3)


class Product(NamedTuple):
    """A matrix w (m, k) in FP8, along rows and transposed; scales of x, and of the gradient of x @ w.T."""

    rows: Tensor
    columns: Tensor
    weight_inverse: Tensor
    scale: Tensor
    inverse: Tensor
    gradient_scale: Tensor
    gradient_inverse: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ w.T in bf16, for x (n, k) in FP8."""
        return multiply(x, self.rows, self.inverse, self.weight_inverse, torch.bfloat16, fast=True)

    def input_gradient(self, dy: Tensor) -> Tensor:
        """Return dy @ w in bf16, for dy (n, m) in FP8."""
        scales = self.gradient_inverse, self.weight_inverse
        return multiply(dy, self.columns, *scales, torch.bfloat16, fast=True)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """Return dy.T @ x in fp32, for both transposed, (m, n) and (k, n); it sums over tokens, hence in
        fp32.
        """
        return multiply(dy, x, self.gradient_inverse, self.inverse, torch.float32, fast=False)


def multiply(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Return a @ b.T of the unscaled values of a and b."""
    return torch._scaled_mm(a, b.T, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)


class Scales(NamedTuple):
    """Factors of the operands, (K, 4) each: one row per block; qkv, o, gate and up, down."""

    weight: Tensor
    input: Tensor
    gradient: Tensor
    """Factors of the gradients of the products' outputs, for a peak `PEAK` of the loop output's gradient."""


@cached_cast
@torch.no_grad()
def block_scales(blocks: Sequence[tuple[ScaledResidual, ScaledResidual]]) -> Scales:
    """Compute the scales of blocks of attention and SwiGLU.

    Each sublayer reads a normalised input: from its own RMSNorm, with a gain, or from the norm at the end of
    the sublayer before it, without one.
    """
    tensors: list[Tensor] = []
    for pair in blocks:
        tensors += [layer.weight for group in product_groups(pair) for layer in group]
        inner: list[Any] = [sublayer.inner for sublayer in pair if isinstance(sublayer.inner, RMSNorm)]
        tensors += [norm.weight for norm in inner]
    norms = torch.stack(torch._foreach_norm(tensors)).view(len(blocks), -1).float().unbind(1)
    # Divided one by one: a CUDA graph can't record numbers on their way from the host.
    rms = [norm / math.sqrt(tensor.numel()) for norm, tensor in zip(norms, tensors, strict=False)]
    q, k, v, o, gate, up, down, *gains = rms
    first_gain, second_gain = gains or (torch.ones_like(q), torch.ones_like(q))
    root = math.sqrt(tensors[0].shape[1])
    value, hidden = root * first_gain * v, (root * second_gain) ** 2 * gate * up
    side = root * second_gain * torch.maximum(gate, up)
    # x ← outer(α·x + ε·f): a branch receives ε/α of the stream's gradient.
    branch = [torch.full_like(q, s.epsilon / s.alpha) for s in blocks[0]]
    gradients = root * o * branch[0], branch[0], root * down * side * branch[1], branch[1]
    return Scales(
        _powers(RMS, q.maximum(k).maximum(v), o, gate.maximum(up), down),
        _powers(RMS, first_gain, value, second_gain, hidden * (RMS / HIDDEN_RMS)),
        _powers(1.0, *gradients),
    )


def _powers(target: float, *sizes: Tensor) -> Tensor:
    """Return powers of two (K, 4) that scale each size to between half the target and the target."""
    return torch.exp2((target / torch.stack(sizes, 1).clamp(min=TINY)).log2().floor())


class _MeasuredGradient(torch.autograd.Function):
    """Identity; the peak of its gradient sets the scales of the blocks' backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relative: Tensor, scale: Tensor, inverse: Tensor) -> Tensor:
        ctx.tables = relative, scale, inverse
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        relative, scale, inverse = ctx.tables
        peak = torch.linalg.vector_norm(dx, math.inf).float().clamp(min=TINY_GRADIENT)
        factor = torch.exp2((PEAK / peak).log2().floor())  # so that scale and inverse are exact
        torch.mul(relative, factor, out=scale)
        torch.reciprocal(scale, out=inverse)
        return dx, None, None, None


class GradientScales:
    """Scales of all gradients of a pass, set by its backward pass before any block reads them."""

    def __init__(self, relative: Tensor) -> None:
        self.relative = spaced(relative)
        self.scale, self.inverse = torch.empty_like(self.relative), torch.empty_like(self.relative)

    def measure(self, x: Tensor) -> Tensor:
        """Return x, the loop's output, and set the scales from its gradient."""
        apply: Any = _MeasuredGradient.apply
        out: Tensor = apply(x, self.relative, self.scale, self.inverse)
        return out


def spaced(table: Tensor) -> Tensor:
    """Spread the scalars of a table (…, 4) 16 bytes apart: Triton recompiles for pointers with less
    alignment.
    """
    return table[..., None].repeat(1, 1, 4)
