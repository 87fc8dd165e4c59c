"""One gradient per visit: every call of a shared sublayer gets its own alias of the shared parameters.

Autograd normally sums the contributions of all visits. Here visit r reads an alias of the parameters (the
same memory, another leaf), so one backward pass yields G_{r,j} for each round r and sublayer j, including the
effect on later states. Their sum over r is the gradient of the parameter.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deeploop.accelerate.install import eager_modules
from deeploop.nn.residual import ScaledResidual
from deeploop.rules import BRANCH

Values = tuple[Tensor, ...]  # replacements for a sublayer's parameters, in order


@dataclass(frozen=True)
class Sublayer:
    """A module that is visited in every round, and those of its parameters that are measured."""

    name: str
    module: nn.Module
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, name: str, module: nn.Module) -> "Sublayer":
        """Any module with all of its matrices, without gains and biases, which the rule does not scale."""
        matrices = tuple(key for key, parameter in module.named_parameters() if parameter.ndim > 1)
        if not matrices:
            raise ValueError(f"sublayer {name!r}: the module has no matrices")
        return cls(name, module, matrices)

    def values(self) -> Values:
        return tuple(self.module.get_parameter(name) for name in self.parameters)


def residual_sublayers(model: nn.Module, branch: Collection[str] = BRANCH) -> list[Sublayer]:
    """The residual sublayers j of a deeploop model, each with the matrices that β scales, by role."""
    sublayers = []
    for name, module in model.named_modules():
        if isinstance(module, ScaledResidual):
            scaled = tuple(
                key
                for key, parameter in module.named_parameters()
                if parameter.ndim > 1 and key.split(".")[-2] in branch  # a bias has the role of its matrix
            )
            sublayers.append(Sublayer(name, module, scaled))
    if not sublayers:
        raise ValueError("the model has no residual sublayers of deeploop.nn; name its blocks explicitly")
    return sublayers


def flat(values: Sequence[Tensor]) -> Tensor:
    """All of a sublayer's values as one vector (P,), whose norm is the Frobenius norm."""
    return torch.cat([value.reshape(-1) for value in values])


@contextmanager
def separate_visits(
    sublayers: Sequence[Sublayer], supply: Callable[[Sublayer, int], Values | None]
) -> Iterator[None]:
    """Compute call number n (from 0) of a sublayer with `supply(sublayer, n)` instead of its parameters.

    None leaves the call unchanged.
    """
    with ExitStack() as stack, probing():
        for sublayer in sublayers:
            stack.enter_context(_swapped_at_each_call(sublayer, supply))
        yield


@contextmanager
def _swapped_at_each_call(
    sublayer: Sublayer, supply: Callable[[Sublayer, int], Values | None]
) -> Iterator[None]:
    owners = [sublayer.module.get_submodule(name.rpartition(".")[0]) for name in sublayer.parameters]
    keys = [name.rpartition(".")[2] for name in sublayer.parameters]
    originals = [sublayer.module.get_parameter(name) for name in sublayer.parameters]
    calls = count()

    def enter(*_: Any) -> None:
        values = supply(sublayer, next(calls))
        if values is not None:
            for owner, key, value in zip(owners, keys, values, strict=True):
                del owner._parameters[key]
                setattr(owner, key, value)

    def leave(*_: Any) -> None:
        for owner, key, original in zip(owners, keys, originals, strict=True):
            if key not in owner._parameters:
                delattr(owner, key)
                owner.register_parameter(key, original)

    handles = [
        sublayer.module.register_forward_pre_hook(enter),
        sublayer.module.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def probing() -> Iterator[None]:
    """Use arithmetic that can be differentiated twice: eager modules, and attention by plain products."""
    with eager_modules(), sdpa_kernel(SDPBackend.MATH):
        yield


class Aliases:
    """New leaves for every visit over the same memory, retained for differentiation.

    A call outside the graph (under `no_grad`, beyond a gradient horizon) is not a visit, as it has no
    gradient.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[Values]] = {}

    def __call__(self, sublayer: Sublayer, call: int) -> Values | None:
        if not torch.is_grad_enabled():
            return None
        leaves = tuple(value.detach().requires_grad_() for value in sublayer.values())
        self.of.setdefault(sublayer.name, []).append(leaves)
        return leaves

    def gradients(self, of: Tensor) -> dict[str, list[Values]]:
        """Gradients of `of` with respect to each visit's leaves, from one backward pass."""
        leaves = [leaf for visits in self.of.values() for visit in visits for leaf in visit]
        rest = iter(torch.autograd.grad(of, leaves, materialize_grads=True))
        return {
            name: [tuple(next(rest) for _ in visit) for visit in visits] for name, visits in self.of.items()
        }


def linearise(sublayers: Sequence[Sublayer], compute: Callable[[], Tensor]) -> tuple[Tensor, Aliases]:
    """Compute a result as a function of every visit's own alias; return it with the aliases."""
    aliases = Aliases()
    with separate_visits(sublayers, aliases):
        value = compute()
    for sublayer in sublayers:
        if sublayer.name not in aliases.of:
            raise ValueError(f"sublayer {sublayer.name!r}: was never visited with gradients on")
    return value, aliases


def visit_gradients(sublayers: Sequence[Sublayer], loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """G_{r,j} of the scalar that `loss` computes, as rows of (R, P) for each sublayer j.

    Memory grows with the number of sublayers: probe a large model in parts. Σ_r is the parameter's gradient;
    call this where that would be computed, outside autocast and before clipping.
    """

    value, aliases = linearise(sublayers, loss)
    return {name: torch.stack([*map(flat, visits)]) for name, visits in aliases.gradients(value).items()}
