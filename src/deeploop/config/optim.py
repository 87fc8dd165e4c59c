"""Optimizers and their schedules."""

from dataclasses import dataclass
from typing import Literal

from deeploop.config.checks import at_least

MOST = 1e30  # limit of rates and decays, far enough below the largest fp32 number that products stay finite


@dataclass(frozen=True)
class BaseOptimConfig:
    """Settings that all optimizers, schedules and batches share."""

    steps: int = 100_000
    """Optimizer steps of the whole run."""
    batch: int = 480
    """Sequences in one optimizer step, over all ranks and micro-batches."""
    peak_lr: float = 1e-3
    """Learning rate at the end of warm-up."""
    warmup_steps: int = 2_000
    """Steps of linear warm-up. A model with outer norms collapses if it is too fast: see docs/training.md."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's two decay rates."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings; norm gains are never decayed."""
    clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""

    def __post_init__(self) -> None:
        at_least(1, self, "steps", "batch", section="optim.")
        self._not_negative("peak_lr", "warmup_steps", "weight_decay", "clip")
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas}: each must be in [0, 1)")

    def _not_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not 0 <= value <= MOST:
                raise ValueError(f"optim.{name}={value}: must be a number from 0 to {MOST:g}")

    @property
    def label(self) -> str:
        """The optimizer's name for display."""
        return "AdamATan2"

    @property
    def final_lr(self) -> float:
        """Learning rate at the last step; without decay, the peak."""
        return self.peak_lr


@dataclass(frozen=True)
class OptimConfig(BaseOptimConfig):
    """AdamW or Muon with a cosine schedule; the defaults are those of the public code of the same family."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks and AdamW for the rest, both at this learning rate."""
    floor_lr: float = 5e-5
    """Learning rate at the last step."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    injection_lr: float = 1.0
    """Learning rate of the injection's weights, which are new in a retrofit, relative to the others."""
    non_finite: Literal["stop", "skip"] = "stop"
    """A step with a non-finite loss or gradient ends the run, or is skipped (20 in a row at most)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_negative("floor_lr", "eps", "injection_lr")
        if self.floor_lr > self.peak_lr:
            raise ValueError(
                f"optim.floor_lr={self.floor_lr}: must be at most optim.peak_lr={self.peak_lr}, or the rate "
                "rises after warm-up"
            )

    @property
    def label(self) -> str:
        return {"adamw": "AdamW", "muon": "Muon"}[self.kind]

    @property
    def final_lr(self) -> float:
        return self.floor_lr


@dataclass(frozen=True)
class ReasonerOptimConfig(BaseOptimConfig):
    """AdamATan2 at a constant rate after warm-up, sign-SGD for puzzle embeddings; the defaults are HRM's."""

    batch: int = 768
    """Puzzles processed at a time, over all ranks and micro-batches."""
    peak_lr: float = 1e-4
    """Learning rate after warm-up."""
    warmup_steps: int = 2_000
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of all parameters."""
    clip: float = 0.0
    """Largest gradient norm; 0: no clipping. The step does not depend on the gradient's scale."""
    puzzle_lr: float = 1e-2
    """Learning rate of the puzzle embeddings, after the same warm-up."""
    puzzle_weight_decay: float = 0.1
    """Decay of the puzzle embeddings, at the steps that update them."""
    ema: float = 0.0
    """Decay of a running average of the weights, used in evaluation (TRM: 0.999); 0: no average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_negative("puzzle_lr", "puzzle_weight_decay")
        if not 0 <= self.ema < 1:
            raise ValueError(f"optim.ema={self.ema}: must be 0 (none) or more, and below 1")
