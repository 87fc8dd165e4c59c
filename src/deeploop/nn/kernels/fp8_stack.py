# mypy: disable-error-code="no-untyped-call"
"""Blocks whose products are FP8, for any number of rounds: `stack.py` with other products.

What lies between two attentions is one function with its own backward pass, so that every kernel writes what
the next product reads, in FP8. The stream, the norms and attention are those of `stack.py`. A matrix is cast
once for all its visits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.documents import Documents, document_attention
from deeploop.nn.fp8 import (
    E4M3,
    E5M2,
    GradientScales,
    Product,
    Scales,
    against_tokens,
    block_scales,
    spaced,
)
from deeploop.nn.kernels.casts import cast_into, transposed
from deeploop.nn.kernels.norms import norms_backward, norms_forward
from deeploop.nn.kernels.products import product_groups
from deeploop.nn.kernels.rotary import rotary_backward, rotary_forward
from deeploop.nn.kernels.stack import Inject, Sublayers, norm_eps
from deeploop.nn.kernels.swiglu import swiglu, swiglu_backward_fp8
from deeploop.nn.layers import RMSNorm, Rotary
from deeploop.nn.recompute import maybe_checkpoint
from deeploop.nn.residual import ScaledResidual

LEAVING, ENTERING = 7, 6  # parameters of a block behind its attention and before it


class Prepared(NamedTuple):
    """A block, and its matrices in FP8."""

    first: ScaledResidual
    second: ScaledResidual
    qkv: Product
    o: Product
    gate_up: Product
    down: Product

    @property
    def attention(self) -> Any:
        return self.first.branch

    @property
    def heads(self) -> tuple[int, float]:
        """How many heads, and the eps of their norm."""
        a = self.attention
        return len(a.q.weight) // a.head_size, a.q_norm.eps

    def leaving(self) -> list[Tensor | None]:
        """The parameters from attention's output to the block's."""
        m: Any = self.second.branch
        gains = [self.first.outer, self.second.inner, self.second.outer]
        matrices = [self.attention.o.weight, m.gate.weight, m.up.weight, m.down.weight]
        return [*matrices, *(norm.weight if isinstance(norm, RMSNorm) else None for norm in gains)]

    def entering(self) -> list[Tensor]:
        """The parameters from the stream to attention's input."""
        a = self.attention
        inner: Any = self.first.inner
        return [layer.weight for layer in (inner, a.q, a.k, a.v, a.q_norm, a.k_norm)]


def run(
    blocks: Sequence[Sublayers],
    x: Tensor,
    rotary: Rotary,
    *,
    documents: Documents | None = None,
    rounds: int = 1,
    recompute: bool = False,
    ends: bool = True,
    inject: Inject | None = None,
) -> Tensor:
    """As `stack.run`, of causal blocks; what is no operand of a product in FP8 is bf16 in the branches."""
    if reason := against_tokens(x.numel() // x.shape[-1]):
        raise ValueError(f"device.precision=fp8: {reason}")
    with torch.autocast(x.device.type, enabled=False):
        scales = block_scales(blocks)
        gradients = GradientScales(scales.gradient)
        prepared = prepare(blocks, scales, gradients)
        for index in range(rounds):
            last = index == rounds - 1
            x = maybe_checkpoint(
                *(_round, prepared, x, rotary, documents, inject), recompute=recompute and not (last and ends)
            )
        return gradients.measure(x)


def _round(
    blocks: Sequence[Prepared],
    x: Tensor,
    rotary: Rotary,
    documents: Documents | None,
    inject: Inject | None,
) -> Tensor:
    """Every block once: into its attention, through it, and on to the attention of the next."""
    x = x if inject is None else inject(x)
    cos, sin = (table.flatten(0, -2) for table in rotary)
    x, q, k, v = _between(None, blocks[0], x, None, cos, sin)
    for block, following in zip(blocks, (*blocks[1:], None), strict=True):
        if documents is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = document_attention(q, k, v, documents)
        y = y.transpose(1, 2).reshape(-1, x.shape[-1])
        x, q, k, v = _between(block, following, x, y, cos, sin)
    return x


@torch.no_grad()
def prepare(blocks: Sequence[Sublayers], scales: Scales, gradients: GradientScales) -> list[Prepared]:
    """Every matrix in FP8, with the scales of what it is multiplied with."""
    weight, given = spaced(scales.weight), spaced(scales.input)
    weight_inverse, given_inverse = weight.reciprocal(), given.reciprocal()
    prepared = []
    for k, pair in enumerate(blocks):
        products = []
        for j, layers in enumerate(product_groups(pair)):
            rows, columns = _cast_matrices([layer.weight for layer in layers], weight[k, j, 0])
            tables = weight_inverse, given, given_inverse, gradients.scale, gradients.inverse
            products.append(Product(rows, columns, *(table[k, j, 0] for table in tables)))
        prepared.append(Prepared(*pair, *products))
    return prepared


def _cast_matrices(matrices: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices one below the other in FP8, along rows and transposed."""
    shape = sum(map(len, matrices)), matrices[0].shape[1]
    rows, columns = (
        torch.empty(size, dtype=E4M3, device=matrices[0].device) for size in (shape, shape[::-1])
    )
    start = 0
    for matrix in matrices:
        end = start + len(matrix)
        cast_into(matrix, scale, rows[start:end], columns[:, start:end])
        start = end
    return rows, columns


def check_compiler(device: torch.device) -> None:
    """Raises where a compiler spoils a transposed copy, as `casts` tells of one that did."""
    matrix = torch.randn(64, 256, device=device)  # fp32, as weights are; attention's output is bf16
    one = torch.ones(4, device=device)[0]
    copies = [_cast_matrices([x], one) for x in (matrix, matrix.bfloat16())]
    sides, dhidden = matrix.bfloat16(), matrix[:, :128].bfloat16()
    dsides, dsides_columns, _ = swiglu_backward_fp8(sides, dhidden, (E5M2, E4M3), (one, one))
    for a, b in (*copies, (dsides, dsides_columns)):
        if not torch.equal(a.view(torch.uint8).T, b.view(torch.uint8)):
            raise ValueError(
                f"device.precision=fp8: Triton {triton.__version__} miscompiles casts to FP8 for this GPU; "
                "use bf16, or another Triton"
            )


def _between(
    left: Prepared | None, entered: Prepared | None, x: Tensor, y: Tensor | None, cos: Tensor, sin: Tensor
) -> Any:
    """(x, q, k, v): the stream behind the block `left`, of whose attention y comes, and the next's inputs."""
    leaving = [None] * LEAVING if left is None else left.leaving()
    entering = [None] * ENTERING if entered is None else entered.entering()
    return _Between.apply(left, entered, cos, sin, x, y, *leaving, *entering)


def _equation(sublayer: ScaledResidual | None, following: Any) -> dict[str, Any]:
    """How the stream goes on: whether by an outer norm, and α, ε and the norms' eps."""
    outer = None if sublayer is None else sublayer.outer
    alpha, epsilon = (1.0, 1.0) if sublayer is None else (sublayer.alpha, sublayer.epsilon)
    return {"outer": isinstance(outer, RMSNorm), "scales": (alpha, epsilon, norm_eps(outer, following))}


class _Between(torch.autograd.Function):
    """From one attention's output to the next one's input; without the first half before the first of a
    round, and without the second behind the last.
    """

    @staticmethod
    def forward(
        ctx: Any, left: Prepared | None, entered: Prepared | None, cos: Tensor, sin: Tensor,
        x: Tensor, y: Tensor | None, *parameters: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        _, _, _, _, gain, after, outer_gain, next_gain, _, _, _, q_gain, k_gain = parameters
        saved: list[Tensor | None] = []
        f = sublayer = inner = scale = None
        ctx.left, ctx.entered = left, entered
        if left is not None:
            assert y is not None
            y_rows, y_columns = torch.empty_like(y, dtype=E4M3), y.new_empty(y.shape[::-1], dtype=E4M3)
            cast_into(y, left.o.scale, y_rows, y_columns)
            f = left.o.forward(y_rows).view_as(x)
            sublayer = left.second
            ctx.middle = _equation(left.first, sublayer.inner)
            x, h, norms = norms_forward(
                x, f, gain, after, narrow=E4M3, scale=left.gate_up.scale, **ctx.middle
            )
            assert h is not None
            h = h.flatten(0, -2)
            sides = left.gate_up.forward(h)
            f = left.down.forward(swiglu(sides, E4M3, left.down.scale)).view_as(x)
            saved += [y_columns, h, sides, *norms]
        if entered is not None:
            inner, scale = entered.first.inner, entered.qkv.scale
        ctx.end = _equation(sublayer, inner)
        x, h, norms = norms_forward(x, f, outer_gain, next_gain, narrow=E4M3, scale=scale, **ctx.end)
        saved += norms
        if entered is None:
            ctx.save_for_backward(*saved)
            return x, None, None, None
        assert h is not None
        h = h.flatten(0, -2)
        packed = entered.qkv.forward(h).view(*x.shape[:-1], -1)
        ctx.save_for_backward(*saved, h, packed, cos, sin, q_gain, k_gain)
        return x, *rotary_forward(packed, cos, sin, q_gain, k_gain, *entered.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dq: Any, dk: Any, dv: Any) -> tuple[Tensor | None, ...]:
        left, entered, saved = ctx.left, ctx.entered, ctx.saved_tensors
        leaving: list[Tensor | None] = [None] * LEAVING
        entering: list[Tensor | None] = [None] * ENTERING
        dh = dy = scale = None
        if entered is not None:
            saved, h, for_rotary = saved[:-6], saved[-6], saved[-5:]
            qkv: Product = entered.qkv
            heads, eps = entered.heads
            d, *gains = rotary_backward(for_rotary, dq, dk, dv, heads, eps, E5M2, qkv.gradient_scale)
            d = d.flatten(0, -2)
            dh = qkv.input_gradient(d)
            entering[1:] = [*qkv.weight_gradient(transposed(d), transposed(h)).chunk(3), *gains]
        if left is not None:
            scale = left.down.gradient_scale
        dx, df, leaving[6], entering[0] = norms_backward(
            saved[-6:], dx, dh, narrow=E5M2, scale=scale, **ctx.end
        )
        if left is not None:
            assert df is not None
            y_columns, h, sides, *norms = saved[:-6]
            df = df.flatten(0, -2)
            scales = left.gate_up.gradient_scale, left.down.scale
            dhidden = left.down.input_gradient(df)
            dsides, dsides_t, hidden_t = swiglu_backward_fp8(sides, dhidden, (E5M2, E4M3), scales)
            leaving[3] = left.down.weight_gradient(transposed(df), hidden_t)
            dh = left.gate_up.input_gradient(dsides)
            leaving[1:3] = left.gate_up.weight_gradient(dsides_t, transposed(h)).chunk(2)
            dx, df, leaving[4], leaving[5] = norms_backward(
                norms, dx, dh, narrow=E5M2, scale=left.o.gradient_scale, **ctx.middle
            )
            assert df is not None
            df = df.flatten(0, -2)
            dy = left.o.input_gradient(df)
            leaving[0] = left.o.weight_gradient(transposed(df), y_columns)
        return None, None, None, None, dx, dy, *leaving, *entering
