# mypy: disable-error-code="no-untyped-call"
"""Blocks whose products are FP8, for any number of rounds: `stack.py` with other products.

Everything between two attentions is one function with its own backward pass, so that each kernel writes the
next product's input in FP8. The stream, the norms and attention are those of `stack.py`, except that blocks
which `forward.py` supports use its rotating product of q, k, v and its attention. A matrix is cast once for
all rounds of a call, or for all calls inside a `cast_cache`.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop.nn.documents import Documents
from deeploop.nn.fp8 import (
    E4M3,
    E5M2,
    GradientScales,
    Product,
    Scales,
    against_tokens,
    block_scales,
)
from deeploop.nn.kernels import on_hopper
from deeploop.nn.kernels.attention import attend_with_gradient, has_backward
from deeploop.nn.kernels.casts import cast_into, transposed
from deeploop.nn.kernels.epilogues import Matrix, State, query_factor, rotate, unpaired
from deeploop.nn.kernels.forward import fits
from deeploop.nn.kernels.fp8_matrices import cast_matrices, fp8_operands
from deeploop.nn.kernels.norms import SavedNorms, norms_backward, norms_forward
from deeploop.nn.kernels.rotary import paired_backward, rotary_backward, rotary_forward
from deeploop.nn.kernels.stack import Inject, Sublayers, attend_heads, norm_eps
from deeploop.nn.kernels.swiglu import swiglu, swiglu_backward_fp8
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary
from deeploop.nn.recompute import maybe_checkpoint
from deeploop.nn.residual import ScaledResidual


class Leaving(NamedTuple):
    """The parameters from attention's output to the block's, or their gradients; gains if there are any."""

    o: Tensor | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None
    attention_outer: Tensor | None = None
    mlp_inner: Tensor | None = None
    mlp_outer: Tensor | None = None


class Entering(NamedTuple):
    """The parameters from the stream to attention's input, or their gradients."""

    attention_inner: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None


class SavedLeaving(NamedTuple):
    """Tensors saved for backward between attention's output and the block's, except those of the norms."""

    y_columns: Tensor
    h: Tensor
    sides: Tensor


class SavedEntering(NamedTuple):
    """Tensors saved for backward between the norm and attention's input."""

    h: Tensor
    packed: Tensor | None
    cos: Tensor
    sin: Tensor
    q_gain: Tensor | None
    k_gain: Tensor | None


class Prepared(NamedTuple):
    """A block, and its matrices in FP8."""

    first: ScaledResidual
    second: ScaledResidual
    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    rotated: Matrix | None
    """The matrix of q, k, v for `rotate`; `qkv` then has its rows in the same order."""

    @property
    def attention(self) -> Any:
        return self.first.branch

    @property
    def heads(self) -> tuple[int, float]:
        """Return the number of heads, and the eps of their norm if they have one."""
        a = self.attention
        return len(a.q.weight) // a.head_size, a.q_norm.eps if self.causal else 0.0

    @property
    def head_size(self) -> int:
        return int(self.attention.head_size)

    @property
    def causal(self) -> bool:
        return isinstance(self.attention, CausalSelfAttention)

    def leaving(self) -> Leaving:
        m: Any = self.second.branch
        matrices = self.attention.o.weight, m.gate.weight, m.up.weight, m.down.weight
        norms = self.first.outer, self.second.inner, self.second.outer
        return Leaving(*matrices, *(norm.weight if isinstance(norm, RMSNorm) else None for norm in norms))

    def entering(self) -> Entering:
        a, inner = self.attention, self.first.inner
        gain = inner.weight if isinstance(inner, RMSNorm) else None
        heads = (a.q_norm.weight, a.k_norm.weight) if self.causal else (None, None)
        return Entering(gain, a.q.weight, a.k.weight, a.v.weight, *heads)


def run(
    blocks: Sequence[Sublayers],
    x: Tensor,
    rotary: Rotary,
    other: Tensor | None = None,
    *,
    documents: Documents | None = None,
    rounds: int = 1,
    recompute: bool = False,
    ends: bool = True,
    inject: Inject | None = None,
    positions: int | None = None,
) -> Tensor:
    """Run as `stack.run` does, on x + other; values in the branches that no FP8 product reads are bf16."""
    if reason := against_tokens(x.numel() // x.shape[-1]):
        raise ValueError(f"device.precision=fp8: {reason}")
    with torch.autocast(x.device.type, enabled=False):
        scales = block_scales(blocks)
        gradients = GradientScales(scales.gradient)
        prepared = prepare(blocks, scales, gradients, _rotates(blocks, x))
        for index in range(rounds):
            last = index == rounds - 1
            x = maybe_checkpoint(
                *(_round, prepared, x, other, rotary, documents, inject),
                recompute=recompute and not (last and ends),
            )
            other = None
        return gradients.measure(x[:, :positions])


def _round(
    blocks: Sequence[Prepared],
    x: Tensor,
    other: Tensor | None,
    rotary: Rotary,
    documents: Documents | None,
    inject: Inject | None,
) -> Tensor:
    """Apply every block once, in steps that go from one attention to the next."""
    x = x if inject is None else inject(x)
    cos, sin = (table.flatten(0, -2) for table in rotary)
    x, q, k, v = _between(None, blocks[0], x, other, cos, sin)
    for block, following in zip(blocks, (*blocks[1:], None), strict=True):
        rotated = block.rotated is not None
        y = attend_with_gradient(q, k, v) if rotated else attend_heads(q, k, v, block.causal, documents)
        y = y.transpose(1, 2).reshape(-1, x.shape[-1])
        x, q, k, v = _between(block, following, x, y, cos, sin)
    return x


def _rotates(blocks: Sequence[Sublayers], x: Tensor) -> bool:
    """Return True if `rotate` and `attend` support these blocks: a reasoner's, in bf16 on a Hopper GPU."""
    return on_hopper(x) and x.dtype == torch.bfloat16 and all(map(fits, blocks)) and has_backward()


def prepare(
    blocks: Sequence[Sublayers], scales: Scales, gradients: GradientScales, rotates: bool
) -> list[Prepared]:
    """Cast every matrix to FP8, with the scales of its operands."""
    prepared = []
    every = fp8_operands(blocks, scales, in_pairs=rotates)
    for k, (pair, operands) in enumerate(zip(blocks, every, strict=True)):
        qkv, o, gate_up, down = (
            own.product(gradients.scale[k, j, 0], gradients.inverse[k, j, 0])
            for j, own in enumerate(operands)
        )
        rotated = Matrix(operands[0].rows, inverse=operands[0].both_inverse) if rotates else None
        prepared.append(Prepared(*pair, qkv, o, gate_up, down, rotated))
    return prepared


def check_compiler(device: torch.device) -> None:
    """Raise if the compiler miscompiles transposed copies, as described in `casts`."""
    matrix = torch.randn(64, 256, device=device)  # fp32, as weights are; attention's output is bf16
    one = torch.ones(4, device=device)[0]
    copies = [cast_matrices([x], one) for x in (matrix, matrix.bfloat16())]
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
    """Return (x, q, k, v): the stream after the block `left`, of whose attention y is, and the next block's
    inputs.

    Without such a block, y is added to x if it is given.
    """
    leaving = Leaving() if left is None else left.leaving()
    entering = Entering() if entered is None else entered.entering()
    return _Between.apply(left, entered, cos, sin, x, y, *leaving, *entering)


def _equation(sublayer: ScaledResidual | None, following: Any) -> dict[str, Any]:
    """Return how the stream continues: through an outer norm or not, with α, ε and the norms' eps."""
    outer = None if sublayer is None else sublayer.outer
    alpha, epsilon = (1.0, 1.0) if sublayer is None else (sublayer.alpha, sublayer.epsilon)
    return {"outer": isinstance(outer, RMSNorm), "scales": (alpha, epsilon, norm_eps(outer, following))}


def _take(tensors: Iterator[Any], kind: Any) -> Any:
    """Take the next tensors as a NamedTuple of this kind; autograd passes and saves them side by side."""
    return kind(*islice(tensors, len(kind._fields)))


class _Between(torch.autograd.Function):
    """The step from one attention's output to the next one's input.

    The first half is missing before the first attention of a round, the second half after the last.
    """

    @staticmethod
    def forward(
        ctx: Any, left: Prepared | None, entered: Prepared | None, cos: Tensor, sin: Tensor,
        x: Tensor, y: Tensor | None, *parameters: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        given = iter(parameters)
        leaving: Leaving = _take(given, Leaving)
        entering: Entering = _take(given, Entering)
        saved: list[Tensor | None] = []
        f = sublayer = inner = scale = None
        qkv: tuple[Tensor | None, ...] = (None, None, None)
        if left is not None:
            assert y is not None
            x, f, read, middle_norms = _leave_block(left, leaving, x, y)
            saved += [*read, *middle_norms]
            sublayer = left.second
        else:
            f = y
        if entered is not None:
            inner, scale = entered.first.inner, entered.qkv.scale
        end = _equation(sublayer, inner)
        x, h, norms = norms_forward(
            x, f, leaving.mlp_outer, entering.attention_inner, narrow=E4M3, scale=scale, **end
        )
        saved += norms if left is not None else norms._replace(x=x, f=None)  # of a sum nothing is read again
        if entered is not None:
            assert h is not None
            qkv, to_read = _enter_attention(entered, entering, x, h, cos, sin)
            saved += to_read
        ctx.left, ctx.entered, ctx.end, ctx.adds = left, entered, end, left is None and y is not None
        ctx.save_for_backward(*saved)
        return x, *qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dq: Any, dk: Any, dv: Any) -> tuple[Tensor | None, ...]:
        left, entered, saved = ctx.left, ctx.entered, iter(ctx.saved_tensors)
        leaving, entering = Leaving(), Entering()
        dh = dy = scale = None
        if left is not None:
            read, middle_norms = _take(saved, SavedLeaving), _take(saved, SavedNorms)
            scale = left.down.gradient_scale
        norms = _take(saved, SavedNorms)
        if entered is not None:
            dh, entering = _enter_attention_backward(entered, _take(saved, SavedEntering), dq, dk, dv)
        dx, df, douter, dinner = norms_backward(norms, dx, dh, narrow=E5M2, scale=scale, **ctx.end)
        if left is not None:
            assert df is not None
            dx, dy, leaving = _leave_block_backward(left, read, middle_norms, dx, df)
        elif ctx.adds:
            dy = dx
        leaving = leaving._replace(mlp_outer=douter)
        entering = entering._replace(attention_inner=dinner)
        return None, None, None, None, dx, dy, *leaving, *entering


def _leave_block(
    block: Prepared, parameters: Leaving, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, SavedLeaving, SavedNorms]:
    """Return the stream after attention (output y), and the MLP's output, not yet added to it."""
    y_rows, y_columns = torch.empty_like(y, dtype=E4M3), y.new_empty(y.shape[::-1], dtype=E4M3)
    cast_into(y, block.o.scale, y_rows, y_columns)
    f = block.o.forward(y_rows).view_as(x)
    gains = parameters.attention_outer, parameters.mlp_inner
    middle = _equation(block.first, block.second.inner)
    x, h, norms = norms_forward(x, f, *gains, narrow=E4M3, scale=block.gate_up.scale, **middle)
    assert h is not None
    h = h.flatten(0, -2)
    sides = block.gate_up.forward(h)
    f = block.down.forward(swiglu(sides, E4M3, block.down.scale)).view_as(x)
    return x, f, SavedLeaving(y_columns, h, sides), norms


def _leave_block_backward(
    block: Prepared, saved: SavedLeaving, norms: SavedNorms, dx: Tensor, df: Tensor
) -> tuple[Tensor, Tensor, Leaving]:
    """Return the gradients of x, y and the parameters, except the last norm's gain; df is the MLP output's,
    in FP8.
    """
    df = df.flatten(0, -2)
    scales = block.gate_up.gradient_scale, block.down.scale
    dhidden = block.down.input_gradient(df)
    dsides, dsides_t, hidden_t = swiglu_backward_fp8(saved.sides, dhidden, (E5M2, E4M3), scales)
    down = block.down.weight_gradient(transposed(df), hidden_t)
    dh = block.gate_up.input_gradient(dsides)
    gate, up = block.gate_up.weight_gradient(dsides_t, transposed(saved.h)).chunk(2)
    middle = _equation(block.first, block.second.inner)
    dx, dattention, outer, inner = norms_backward(
        norms, dx, dh, narrow=E5M2, scale=block.o.gradient_scale, **middle
    )
    assert dattention is not None
    dattention = dattention.flatten(0, -2)
    dy = block.o.input_gradient(dattention)
    o = block.o.weight_gradient(transposed(dattention), saved.y_columns)
    return dx, dy, Leaving(o, gate, up, down, attention_outer=outer, mlp_inner=inner)


def _enter_attention(
    block: Prepared, parameters: Entering, x: Tensor, h: Tensor, cos: Tensor, sin: Tensor
) -> tuple[tuple[Tensor, ...], SavedEntering]:
    """Return q, k, v of the normalised stream h (B, T, width)."""
    B, T, width = h.shape
    rows = h.flatten(0, -2)
    if block.rotated is not None:
        state = State(x.view(-1, width), None, rows)
        packed = rotate(state, block.rotated, (cos, sin), block.head_size, eps=0.0)
        qkv = packed.view(B, T, 3, -1, block.head_size).permute(2, 0, 3, 1, 4).unbind()
        return qkv, SavedEntering(rows, None, cos, sin, None, None)
    packed = block.qkv.forward(rows).view(B, T, -1)
    of_rotary = packed, cos, sin, parameters.q_gain, parameters.k_gain
    return rotary_forward(*of_rotary, *block.heads), SavedEntering(rows, *of_rotary)


def _enter_attention_backward(
    block: Prepared, saved: SavedEntering, dq: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Entering]:
    """Return the gradients of h and the parameters, except the norm's gain."""
    of_rotary: Any = saved[1:]
    qkv, q_gain, k_gain = block.qkv, None, None
    if block.rotated is not None:
        given = saved.cos, saved.sin, query_factor(block.head_size)
        d = paired_backward(dq, dk, dv, *given, E5M2, qkv.gradient_scale)
    else:
        d, q_gain, k_gain = rotary_backward(of_rotary, dq, dk, dv, *block.heads, E5M2, qkv.gradient_scale)
        d = d.flatten(0, -2)
    dh = qkv.input_gradient(d)
    q, k, v = qkv.weight_gradient(transposed(d), transposed(saved.h)).chunk(3)
    if block.rotated is not None:
        q, k = (unpaired(gradient, block.head_size) for gradient in (q, k))
    return dh, Entering(q=q, k=k, v=v, q_gain=q_gain, k_gain=k_gain)
