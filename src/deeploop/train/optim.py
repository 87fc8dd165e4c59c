"""AdamW or Muon in groups, AdamATan2 for reasoners, and the learning rate as a function of the step."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deeploop.models.gpt_config import GPTConfig
from deeploop.rules import BRANCH
from deeploop.train.adam_atan2 import AdamATan2
from deeploop.train.muon import MuonAdamW

MOST = 1e30  # far from the largest number of fp32, with which rates and decays are multiplied


@dataclass(frozen=True)
class BaseOptimConfig:
    """What every task's optimizer, schedule and batch have in common."""

    steps: int = 100_000
    """Optimizer steps of the whole run."""
    batch: int = 480
    """Sequences in one optimizer step, over all ranks and micro-batches."""
    peak_lr: float = 1e-3
    """Learning rate at the end of warm-up."""
    warmup_steps: int = 2_000
    """Steps of linear warm-up. Too fast a rise collapses a model with outer norms: see docs/training.md."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's two decay rates."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings; norm gains are never decayed."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"optim.{name}={getattr(self, name)}: must be at least 1")
        self._not_negative("peak_lr", "warmup_steps", "weight_decay", "clip")
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas}: each must be in [0, 1)")

    def _not_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not 0 <= value <= MOST:
                raise ValueError(f"optim.{name}={value}: must be a number from 0 to {MOST:g}")

    @property
    def final_lr(self) -> float:
        """Learning rate at the last step; the peak's where there is no decay."""
        return self.peak_lr

    def branch_multiplier(self, step: int) -> float:
        """Rate of the matrices drawn at beta over that of the others, after `step` finished steps."""
        return 1.0


@dataclass(frozen=True)
class OptimConfig(BaseOptimConfig):
    """AdamW or Muon, half a cosine and the batch: the paper's values by default."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks and AdamW for the rest, both at the rate given here."""
    floor_lr: float = 5e-5
    """Learning rate at the last step."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    branch_lr: float = 1.0
    """Learning rate of the matrices drawn at beta (value, output, feed-forward) over that of the others."""
    injection_lr: float = 1.0
    """Learning rate of the injection's weights, which are new in a retrofit, over that of the others."""
    branch_release_steps: int = 0
    """Steps over which that multiple goes to 1, in a straight line; 0 keeps it."""
    wait_for_escape: bool = False
    """Hold the warm-up at every step whose batch has its positions merged (token similarity above 0.5)."""
    non_finite: Literal["stop", "skip"] = "stop"
    """A step with a loss or gradient that is not finite ends the run, or is skipped (20 in a row at most)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_negative("floor_lr", "eps", "branch_lr", "injection_lr", "branch_release_steps")
        if self.floor_lr > self.peak_lr:
            raise ValueError(
                f"optim.floor_lr={self.floor_lr}: must be at most optim.peak_lr={self.peak_lr}, or the rate "
                "rises after warm-up"
            )

    @property
    def final_lr(self) -> float:
        return self.floor_lr

    def branch_multiplier(self, step: int) -> float:
        released = min(1.0, step / self.branch_release_steps) if self.branch_release_steps else 0.0
        return self.branch_lr + (1 - self.branch_lr) * released


@dataclass(frozen=True)
class ReasonerOptimConfig(BaseOptimConfig):
    """AdamATan2 at a constant rate after warm-up, sign-SGD on puzzle vectors: HRM's values by default."""

    batch: int = 768
    """Puzzles worked on at a time, over all ranks and micro-batches."""
    peak_lr: float = 1e-4
    """Learning rate after warm-up."""
    warmup_steps: int = 2_000
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of all parameters."""
    clip: float = 0.0
    """Largest gradient norm; 0 turns clipping off. The step does not depend on the gradient's scale."""
    puzzle_lr: float = 1e-2
    """Learning rate of the puzzles' vectors, after the same warm-up."""
    puzzle_weight_decay: float = 0.1
    """Decay of the puzzles' vectors, at the steps that touch them."""
    ema: float = 0.0
    """Decay of a running average of the weights, which evaluation then uses (TRM: 0.999); 0 keeps none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_negative("puzzle_lr", "puzzle_weight_decay")
        if not 0 <= self.ema < 1:
            raise ValueError(f"optim.ema={self.ema}: must be 0 (none) or more, and below 1")


def learning_rate(step: int, config: BaseOptimConfig, held: int = 0) -> float:
    """The rate of the step after `step` finished ones: a linear ramp, then half a cosine.

    In `held` of them the ramp stood still; the cosine has the steps that are left.
    """
    if step - held < config.warmup_steps:
        return config.peak_lr * (step - held + 1) / config.warmup_steps
    warm = config.warmup_steps + held
    progress = (step - warm) / max(1, config.steps - warm)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.final_lr + (config.peak_lr - config.final_lr) * cosine


def make_gpt_optimizer(
    model: nn.Module, shape: GPTConfig, config: OptimConfig, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of a looped GPT of that shape, fused where the device has it."""
    return make_optimizer(
        model,
        config,
        fused=device.type == "cuda",
        matrix_lr_multiplier=shape.matrix_lr_multiplier,
        branch=shape.init_rule.branch,
    )


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    *,
    fused: bool,
    matrix_lr_multiplier: float = 1.0,
    branch: Collection[str] = BRANCH,
) -> torch.optim.Optimizer:
    """The optimizer over three groups: block matrices, embeddings, and the undecayed norm gains.

    An injection's weights are with the gains: decay would shrink the carry, which starts as the identity.
    With a rate of their own they come last, in a group of their own.

    With a rate of their own, the matrices of the roles in `branch` come first, in one more. Each group
    carries `lr_multiplier` and whether it is that one, so that the schedule stays one number per step.
    """
    apart = branch if config.branch_lr != 1 else ()
    kinds = ("branch", "matrices", "embedding", "gains", "injection")
    groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name, parameter in model.named_parameters():
        injected = "injection" in name
        undecayed = parameter.ndim < 2 or injected
        role = name.split(".")[-2:][0]  # blocks.0.attention.branch.v.weight: role v
        kind = "gains" if undecayed else "embedding" if role in ("embedding", "head") else "matrices"
        kind = "injection" if injected and config.injection_lr != 1 else kind
        # A bias has the role of its matrix, but β does not scale it, and Muon takes matrices alone.
        groups["branch" if role in apart and not undecayed else kind].append(parameter)
    multiplier = dict.fromkeys(("branch", "matrices"), matrix_lr_multiplier)
    multiplier["injection"] = config.injection_lr
    built: dict[str, dict[str, Any]] = {
        kind: {
            "params": parameters,
            "weight_decay": 0.0 if kind in ("gains", "injection") else config.weight_decay,
            "lr_multiplier": multiplier.get(kind, 1.0),
            "branch": kind == "branch",
        }
        for kind, parameters in groups.items()
        if parameters
    }
    settings: dict[str, Any] = {"lr": config.peak_lr, "betas": config.betas, "eps": config.eps}
    if config.kind == "adamw":
        return torch.optim.AdamW(built.values(), fused=fused, **settings)
    matrices = [built.pop(kind) for kind in ("branch", "matrices") if kind in built]
    return MuonAdamW(matrices, [*built.values()], fused=fused, **settings)


def make_reasoner_optimizer(model: nn.Module, config: ReasonerOptimConfig) -> AdamATan2:
    """AdamATan2 over all parameters alike, as published."""
    group = {"params": list(model.parameters()), "lr_multiplier": 1.0, "branch": False}
    return AdamATan2(
        [group], config.peak_lr, betas=config.betas, weight_decay=config.weight_decay, ema=config.ema
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, branch_multiplier: float = 1.0) -> None:
    for group in optimizer.param_groups:  # those of a task of somebody's own may carry neither
        own = group.get("lr_multiplier", 1.0)
        group["lr"] = rate * own * (branch_multiplier if group.get("branch", False) else 1.0)


def supports_conditional_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a device can leave out the optimizer's step by itself, where a tensor says so.

    AdamW's fused kernel can, and AdamATan2 on a GPU: a CPU has no queue, and nothing to gain. Sharded
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
    """The optimizer's step; gradients of norm `norm` are scaled down to at most `clip` (0: are left).

    With `only_if`, the device takes it only where that is true, and nobody has to wait for it first: for an
    optimizer that supports a conditional step.
    """
    if only_if is not None:
        optimizer.found_inf = (~only_if).float()  # type: ignore[attr-defined]
        optimizer.grad_scale = ((norm + 1e-6) / clip).clamp(min=1) if clip else None  # type: ignore[attr-defined]
    elif clip:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    optimizer.step()
