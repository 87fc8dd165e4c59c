"""Settings for monitoring the loop during training, and for training its exits."""

import math
from dataclasses import dataclass
from typing import Literal

from deeploop.config.checks import at_least


@dataclass(frozen=True)
class GuardConfig:
    """The collapse guard. In a collapsed run all positions share one state, and the loss is the unigram
    entropy.
    """

    stop: bool = False
    """Stop a run that is still collapsed after warm-up, instead of only warning."""


@dataclass(frozen=True)
class DiagnoseConfig:
    """Measurements of the loop during training (docs/alignment.md)."""

    every: int = 0
    """Steps between diagnoses, with one before the first step and after the last; 0: off; 500 is cheap."""
    sequences: int = 1
    """Sequences of the probe, from the start of the validation set."""
    tokens: int = 0
    """Tokens of each sequence to use; 0: all."""
    sublayers: tuple[str, ...] = ()
    """Sublayers to compare, such as blocks.0.mlp; unset: both of the first and last block."""
    iterations: int = 5
    """Largest number of iterations for an operator norm."""

    def __post_init__(self) -> None:
        at_least(0, self, "every", "tokens", section="diagnose.")
        at_least(1, self, "sequences", "iterations", section="diagnose.")


@dataclass(frozen=True)
class GateConfig:
    """Training of the exit gate (`model.exit_gate`)."""

    stage: Literal["joint", "gate-only"] = "joint"
    """joint: with the model; gate-only: freeze the model, and train the gate on whether rounds still help."""
    entropy: float = 0.1
    """Weight β of the entropy of the exits in the joint loss."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.entropy) and self.entropy >= 0):
            raise ValueError(f"gate.entropy={self.entropy}: must be 0 or more")


@dataclass(frozen=True)
class HaltingConfig:
    """Segments per puzzle, and how halting is learned; the defaults are HRM's."""

    segments: int = 16
    """Most segments of a puzzle; evaluation uses all of them."""
    exploration: float = 0.1
    """Share of segments that may halt only after a minimum, drawn from 2 … segments."""
    learn_continue: bool = True
    """Halt at q_halt > q_continue and learn both (HRM); else halt at q_halt > 0 and learn only that (TRM)."""

    def __post_init__(self) -> None:
        at_least(1, self, "segments", section="halting.")
        if not 0 <= self.exploration <= 1:
            raise ValueError(f"halting.exploration={self.exploration}: must be from 0 to 1")

    @property
    def bootstraps_continue(self) -> bool:
        """True if q_continue is learned from another forward pass; never with a single segment."""
        return self.learn_continue and self.segments > 1
