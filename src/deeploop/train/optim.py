"""AdamW or Muon in groups, AdamATan2 for reasoners, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.config.optim import BaseOptimConfig, OptimConfig, ReasonerOptimConfig
from deeploop.train.adam_atan2 import AdamATan2

Group = dict[str, Any]


def learning_rate(step: int, config: BaseOptimConfig) -> float:
    """Return the rate of step `step` (from 0): a linear ramp, then half a cosine."""
    warm = config.warmup_steps
    if step < warm:
        return config.peak_lr * (step + 1) / warm
    progress = (step - warm) / max(1, config.steps - warm)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.final_lr + (config.peak_lr - config.final_lr) * cosine


def make_optimizer(
    model: nn.Module, config: OptimConfig, *, fused: bool, matrix_lr_multiplier: float = 1.0
) -> torch.optim.Optimizer:
    """Make the optimizer with three groups: block matrices, embeddings, and norm gains without decay.

    An injection's weights are with the gains: decay would shrink the carry, which starts as the identity.
    With a rate of their own they come last, in a group of their own. Each group carries its
    `lr_multiplier`, so that the schedule stays one number per step.
    """
    kinds = ("matrices", "embedding", "gains", "injection")
    groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name, parameter in model.named_parameters():
        injected = "injection" in name
        undecayed = parameter.ndim < 2 or injected
        role = name.split(".")[-2:][0]  # blocks.0.attention.branch.v.weight: role v
        kind = "gains" if undecayed else "embedding" if role in ("embedding", "head") else "matrices"
        groups["injection" if injected and config.injection_lr != 1 else kind].append(parameter)
    multiplier = {"matrices": matrix_lr_multiplier, "injection": config.injection_lr}
    built: dict[str, Group] = {
        kind: {
            "params": parameters,
            "weight_decay": 0.0 if kind in ("gains", "injection") else config.weight_decay,
            "lr_multiplier": multiplier.get(kind, 1.0),
        }
        for kind, parameters in groups.items()
        if parameters
    }
    settings: dict[str, Any] = {"lr": config.peak_lr, "betas": config.betas, "eps": config.eps}
    if config.kind == "adamw":
        return torch.optim.AdamW(built.values(), fused=fused, **settings)
    assert config.kind == "muon", config.kind
    return MuonAdamW([built.pop("matrices")], [*built.values()], fused=fused, **settings)


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` on `matrices`, which are groups of 2D parameters, and `torch.optim.AdamW` on `rest`.

    Muon steps along the orthogonal matrix nearest to a matrix's momentum. One learning rate serves both:
    Muon's is scaled so that its update has the RMS of AdamW's. Schedules and checkpoints see the groups and
    the state of this object alone.
    """

    def __init__(
        self,
        matrices: list[Group],
        rest: list[Group],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        super().__init__([*matrices, *rest], {"lr": lr})
        self._muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "no loss is evaluated again"
        count = len(self._muon.param_groups)
        # Handed over at every step: load_state_dict replaces both lists and state.
        self._muon.param_groups = self.param_groups[:count]
        self._adamw.param_groups = self.param_groups[count:]
        for inner in (self._muon, self._adamw):
            inner.state = self.state
            inner.step()


def make_reasoner_optimizer(model: nn.Module, config: ReasonerOptimConfig) -> AdamATan2:
    """Make AdamATan2 over all parameters alike, as published."""
    group = {"params": list(model.parameters())}
    return AdamATan2(
        [group], config.peak_lr, betas=config.betas, weight_decay=config.weight_decay, ema=config.ema
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:  # a task's own optimizer may not set one
        group["lr"] = rate * group.get("lr_multiplier", 1.0)


def supports_conditional_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer can skip a step on the device, as a tensor says.

    AdamW's fused kernel can, and AdamATan2 on a GPU; a CPU would gain nothing. Sharded
    parameters can't have it.
    """
    from torch.distributed.tensor import DTensor  # now: commands that train nothing do without it

    group = optimizer.param_groups[0]
    first = group["params"][0]
    able = group.get("fused") or (isinstance(optimizer, AdamATan2) and first.is_cuda)
    return bool(able) and not isinstance(first, DTensor)


def clipped_step(
    optimizer: torch.optim.Optimizer, norm: Tensor, clip: float, *, only_if: Tensor | None = None
) -> None:
    """Take the optimizer's step with gradients of norm `norm` clipped to `clip` (0: not clipped).

    With `only_if`, the device skips the step if that is false, without the host waiting for it; the optimizer
    must support a conditional step.
    """
    if only_if is not None:
        optimizer.found_inf = (~only_if).float()  # type: ignore[attr-defined]
        optimizer.grad_scale = ((norm + 1e-6) / clip).clamp(min=1) if clip else None  # type: ignore[attr-defined]
    elif clip:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    optimizer.step()
