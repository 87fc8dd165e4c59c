"""A residual rule (`deeploop.rules`) around any branch: outer(α·x + ε·f(s·inner(x))).

`kernels/stack.py` computes it faster where s is 1.
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.nn.init import scale_branch_
from deeploop.nn.layers import RMSNorm
from deeploop.nn.written import as_written
from deeploop.rules import Rule, as_rule
from deeploop.theory.scaling import Scales

HEAD_NORM = re.compile(r"(^|\.)(q|k|query|key)_?(layer)?norm$")  # of queries and keys: no norm of the stream
SKIP = re.compile(r"Residual|^(Transformer)?Block$|(Encoder|Decoder)Layer")


@as_written
class ScaledResidual(nn.Module):
    """A residual rule around any `branch` that maps (..., width) to (..., width).

    ScaledResidual(attention, 768, "deeploop", blocks=12, rounds=3)

    If the branch returns a tuple, as attention in transformers and in torch does, the first element is its
    output; the rest (attention weights) is dropped. The residual adds the norms and the skip: the branch must
    have none.

    The scales follow from the number of stored `blocks` K and the number of `rounds` R that each is applied.
    α and ε are used at every visit. β is applied once: the branch's value, output and feed-forward matrices
    are multiplied by it here, unless `init` is False, as for trained weights.

    To count the depth differently, pass `alpha` or `epsilon` (`Rule.scales`) instead of blocks and rounds,
    and draw with β by `init_residual_branch_`. A rule that differs between blocks needs the `number` of the
    stored block, from 1.

    To compile a loop, compile each layer (`for layer in loop: layer.compile()`): each is then compiled once,
    where `torch.compile` of the whole model unrolls all K·R visits.
    """

    scale: Tensor | None

    def __init__(
        self,
        branch: nn.Module,
        width: int,
        rule: Rule | str = "deeploop",
        *,
        blocks: int | None = None,
        rounds: int = 1,
        number: int | None = None,
        alpha: float | None = None,
        epsilon: float | None = None,
        init: bool = True,
        norm: Callable[[int], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        self.rule = as_rule(rule)
        scales = _scales(self.rule, blocks, rounds, alpha, epsilon)
        self.alpha, self.epsilon = scales.alpha, scales.epsilon
        if self.rule.by_block and (number is None or number < 1):
            raise ValueError(f"number={number}: must be given with rule={rule}, the stored block's, from 1")
        self.input_scale = self.rule.input_scale(number or 1)
        # A tensor: compiled code holds numbers fast, and would be compiled anew for every other one.
        scale = torch.tensor(self.epsilon) if self.rule.varies else None
        self.register_buffer("scale", scale, persistent=False)
        self.inner = norm(width) if self.rule.inner_norm else nn.Identity()
        self.branch = branch
        self.outer = norm(width) if self.rule.outer_norm else nn.Identity()
        if self.rule.outer_norm and not self.rule.outer_gain:
            _drop_gain(self.outer)
        if init:
            warn_of_own_residual(branch, width)
            if scales.beta != 1:
                scale_branch_(branch, scales.beta, gate=self.rule.gate)

    def set_scales(self, alpha: float, epsilon: float) -> None:
        """Set the scales from the next visit on."""
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
        read = self.inner(x)
        read = read if self.input_scale == 1 else self.input_scale * read
        f = self.branch(read, *args, **kwargs)
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
    """Remove the gain of a norm of any class.

    Ours and torch's accept a weight of None as 1. Others (transformers') need a tensor: it keeps its
    untrained value, a gain of 1, and is no longer a parameter.
    """
    if not hasattr(norm, "weight"):
        raise ValueError(f"norm: a {type(norm).__name__} has no weight that could be left out")
    weight: Any = norm.weight
    norm.register_parameter("weight", None)
    if not isinstance(norm, RMSNorm | nn.RMSNorm | nn.LayerNorm):
        del norm.weight
        norm.register_buffer("weight", weight.detach(), persistent=False)


def warn_of_own_residual(branch: nn.Module, width: int) -> None:
    """Warn about a norm of the stream, or a skip, that is visible inside a branch."""
    for name, module in branch.named_modules():
        kind, place = type(module).__name__, f"branch.{name}".rstrip(".")
        sizes = [parameter.numel() for parameter in module.parameters(recurse=False)]
        if "Norm" in kind and not HEAD_NORM.search(name) and all(size == width for size in sizes):
            text = f"{place} is a {kind}: the residual has the norms already; leave it out of the branch"
        elif isinstance(module, ScaledResidual) or SKIP.search(kind):
            text = f"{place} is a {kind}, which seems to have a skip of its own; give its branches one by one"
        else:
            continue
        warnings.warn(text, stacklevel=3)
        return


def _scales(
    rule: Rule, blocks: int | None, rounds: int, alpha: float | None, epsilon: float | None
) -> Scales:
    """Return the rule's scales at K and R, or those given, which the rule must have unless they are 1."""
    given = {"alpha": (alpha, rule.has_alpha), "epsilon": (epsilon, rule.has_epsilon)}
    for name, (value, has) in given.items():
        if value is None:
            if has and blocks is None:
                raise ValueError(
                    f"blocks: must be given with rule={rule}, the stored blocks K (and their rounds R); "
                    f"or {name}"
                )
        elif blocks is not None:
            raise ValueError(f"{name}={value}: must be left out with blocks={blocks}, which determine it")
        elif not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value}: must be a positive number")
        elif value != 1 and not has:
            raise ValueError(f"{name}={value}: must be 1 with rule={rule}, which has none")
    if blocks is not None:
        return rule.scales(blocks, rounds)
    return Scales(float(alpha or 1.0), 1.0, float(epsilon or 1.0))
