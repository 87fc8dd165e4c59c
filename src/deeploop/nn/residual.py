"""The residual equations; `kernels/stack.py` computes their common form outer(α·x + ε·f(inner(x))) faster.

prenorm     x ← x + ε·f(inner(x)), ε = 1 unless one is given
postnorm    x ← outer(x + f(x))
sandwich    x ← outer(α·x + f(inner(x)))      the paper's Eq. (deeploop-block)
sandwich without inner norm: x ← outer(α·x + f(x)), DeepNorm's original form
factored    x ← x + ε·f(inner(x)), ε = λ/(R·√K)     looped depth by arXiv 2606.18524, in its own words
averaged    x ← x + ε·f(inner(x)), ε = 1/N          N = K·R: the branches' mean over depth
flat        x ← N(α·x + f(inner(x))), α = λ·R·√K    the sandwich whose outer norm N has no gain

The last three are at standard initialisation with the whole scale in ε or α, which is why the output
projections are not divided by √K on top of it, as those of plain pre-norm are.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from deeploop.nn.layers import RMSNorm
from deeploop.nn.written import as_written

ResidualKind = Literal["prenorm", "postnorm", "sandwich", "factored", "averaged", "flat"]
PRENORM = ("prenorm", "factored", "averaged")  # without an outer norm
ALPHA = ("sandwich", "flat")
EPSILON = ("factored", "averaged")  # which need one


@as_written
class ScaledResidual(nn.Module):
    """A residual around any `branch` that maps (..., width) to (..., width).

    Of a branch that returns a tuple, as attention in transformers and in torch does, the first element is the
    output; the rest (attention weights) is dropped.

    The sandwich and the flat block need an `alpha`, the factored and the averaged block an `epsilon`, which
    pre-norm may have: `deeploop.theory` has both by K and R. They are read at every visit, so they may be
    changed for another depth at test time. β is no part of the forward pass: it is drawn into the branch's
    matrices (`init_residual_branch_`).

    Without `outer_gain` the outer norm has no weight, as always in the flat block: a gain there multiplies
    the stream at each visit, so that its effect grows with the rounds (`deeploop.theory.flat_alpha`).

    `varying`: epsilon is multiplied as a tensor. Compiled code holds numbers fast, and would be compiled anew
    for every other one.
    """

    scale: Tensor | None

    def __init__(
        self,
        branch: nn.Module,
        width: int,
        *,
        kind: ResidualKind = "sandwich",
        alpha: float | None = None,
        epsilon: float | None = None,
        inner_norm: bool = True,
        outer_gain: bool = True,
        norm: Callable[[int], nn.Module] = RMSNorm,
        varying: bool = False,
    ) -> None:
        super().__init__()
        if kind not in get_args(ResidualKind):
            raise ValueError(f"kind={kind!r}: must be one of {', '.join(get_args(ResidualKind))}")
        self.kind = kind
        self.alpha = _scale("alpha", alpha, kind, wanted=kind in ALPHA)
        self.epsilon = _scale("epsilon", epsilon, kind, wanted=kind in EPSILON)
        if kind in PRENORM and not inner_norm:
            raise ValueError(f"inner_norm=False: must be True with kind={kind!r}, it has no other norm")
        if kind in PRENORM and not outer_gain:
            raise ValueError(f"outer_gain=False: must be True with kind={kind!r}, it has no outer norm")
        if kind == "flat" and not inner_norm:
            raise ValueError("inner_norm=False: must be True with kind='flat'; the sandwich goes without")
        self.register_buffer("scale", torch.tensor(self.epsilon) if varying else None, persistent=False)
        self.inner = norm(width) if inner_norm and kind != "postnorm" else nn.Identity()
        self.branch = branch
        self.outer = norm(width) if kind not in PRENORM else nn.Identity()
        if kind == "flat" or not outer_gain:
            _drop_gain(self.outer)

    def set_scales(self, alpha: float, epsilon: float) -> None:
        """Other scales from the next visit on."""
        self.alpha, self.epsilon = alpha, epsilon
        if self.scale is not None:
            self.scale.fill_(epsilon)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ScaledResidual":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale is not None:  # no checkpoint has it, and `to_empty` leaves it uninitialized
            self.scale.fill_(self.epsilon)
        return self

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        skip = self.alpha * x
        f = self.branch(self.inner(x), *args, **kwargs)
        f = f[0] if isinstance(f, tuple) else f
        if f.shape != x.shape:  # a sum would broadcast it
            raise ValueError(
                f"branch: gave a tensor of {tuple(f.shape)}; must be {tuple(x.shape)}, as its input"
            )
        if self.scale is not None:
            scaled: Tensor = self.outer(skip + self.scale.to(f.dtype) * f)
            return scaled
        y: Tensor = self.outer(skip + f if self.epsilon == 1 else skip + self.epsilon * f)
        return y

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:.6g}" + (f", epsilon={self.epsilon:.6g}" if self.epsilon != 1 else "")


def _drop_gain(norm: nn.Module) -> None:
    """Leave out the gain of a norm of any class.

    Ours and torch's take a weight of None for 1. Others (transformers') need a tensor: it stays as it is
    before training, a gain of 1, and is no parameter.
    """
    if not hasattr(norm, "weight"):
        raise ValueError(f"norm: a {type(norm).__name__} has no weight that could be left out")
    weight: Any = norm.weight
    norm.register_parameter("weight", None)
    if not isinstance(norm, RMSNorm | nn.RMSNorm | nn.LayerNorm):
        del norm.weight
        norm.register_buffer("weight", weight.detach(), persistent=False)


def _scale(name: str, value: float | None, kind: str, *, wanted: bool) -> float:
    """A scale of the equation: one that the kind has must be given, any other is 1."""
    if value is None:
        if wanted:
            raise ValueError(f"{name}: must be given with kind={kind!r}; deeploop.theory has it by K and R")
        return 1.0
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value}: must be a positive number")
    if not wanted and value != 1 and (name, kind) != ("epsilon", "prenorm"):
        raise ValueError(f"{name}={value}: must be 1 with kind={kind!r}, which has none")
    return float(value)
