"""Contribution of each visit to the residual stream: its size, and the share common to all positions."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.diagnose.collapse import token_similarity
from deeploop.diagnose.visit_grads import probing
from deeploop.nn.residual import ScaledResidual


@dataclass
class BranchVisits:
    """One sublayer's values, with one number per visit in order."""

    name: str
    ratio: list[float] = field(default_factory=list)
    """‖εf(x)‖ / ‖αx‖ over all positions: the branch relative to the skip path."""
    common: list[float] = field(default_factory=list)
    """Share of f's energy in its mean over positions: 1 if the branch adds one vector everywhere."""
    similarity: list[float] = field(default_factory=list)
    """Mean cosine between the token states after the visit."""


@torch.no_grad()
def branch_visits(model: nn.Module, run: Callable[[], object]) -> list[BranchVisits]:
    """Record every residual sublayer of the model while `run` calls it once."""
    visits = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, ScaledResidual):
                visits.append(BranchVisits(name))
                for handle in _watch(module, visits[-1]):
                    stack.callback(handle.remove)
        with probing():
            run()
    return visits


def _watch(module: ScaledResidual, record: BranchVisits) -> list[Any]:
    branch: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        branch.append(output[0] if isinstance(output, tuple) else output)  # as ScaledResidual reads it

    def compare(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        f, x = branch.pop().float().flatten(0, -2), arguments[0].float()
        energy = f.square().sum(-1).mean()
        record.ratio.append(float(module.epsilon * f.norm() / (module.alpha * x.norm())))
        record.common.append(float(f.mean(0).square().sum() / energy.clamp(min=1e-30)))
        record.similarity.append(token_similarity(output))

    return [module.branch.register_forward_hook(keep), module.register_forward_hook(compare)]
