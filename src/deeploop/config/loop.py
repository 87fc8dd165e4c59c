"""How the loop is watched while it trains, and how its exits are trained."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GuardConfig:
    """The collapse guard: a run whose positions all carry one state predicts no better than unigrams."""

    stop: bool = False
    """Stop a run that is still collapsed after warm-up, in place of only saying so."""


@dataclass(frozen=True)
class DiagnoseConfig:
    """What is measured of the loop itself while it trains: see docs/alignment.md."""

    every: int = 0
    """Steps between two diagnoses (also before the first step and after the last); 0 is off, 500 is cheap."""
    sequences: int = 1
    """Sequences of the probe, the first of the validation set."""
    tokens: int = 0
    """Tokens of each sequence that are read; 0 reads them all."""
    sublayers: tuple[str, ...] = ()
    """Sublayers whose visits are compared, such as blocks.0.mlp; unset: both of the first and last block."""
    iterations: int = 5
    """Iterations towards an operator norm, at most."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("sequences", 1), ("tokens", 0), ("iterations", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"diagnose.{name}={getattr(self, name)}: must be {least} or more")


@dataclass(frozen=True)
class GateConfig:
    """How the exit gate of `model.exit_gate` is trained."""

    stage: Literal["joint", "gate-only"] = "joint"
    """joint: with the model; gate-only: the model stays as it is, its gate learns when rounds still help."""
    entropy: float = 0.1
    """Weight β of the entropy of the exits in the joint loss."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.entropy) and self.entropy >= 0):
            raise ValueError(f"gate.entropy={self.entropy}: must be 0 or more")


@dataclass(frozen=True)
class HaltingConfig:
    """Segments per puzzle, and how halting is learned; the defaults are HRM's."""

    segments: int = 16
    """Most segments of a puzzle; evaluation runs them all."""
    exploration: float = 0.1
    """Share of segments that may halt only after a minimum, drawn from 2 … segments."""
    learn_continue: bool = True
    """Halt at q_halt > q_continue and learn both (HRM); else halt at q_halt > 0 and learn it alone (TRM)."""

    def __post_init__(self) -> None:
        if self.segments < 1:
            raise ValueError(f"halting.segments={self.segments}: must be at least 1")
        if not 0 <= self.exploration <= 1:
            raise ValueError(f"halting.exploration={self.exploration}: must be from 0 to 1")

    @property
    def bootstraps_continue(self) -> bool:
        """Whether q_continue is learned from one more forward pass; never with one segment only."""
        return self.learn_continue and self.segments > 1
