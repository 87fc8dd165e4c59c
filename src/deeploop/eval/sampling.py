"""Sampling options of generation and chat. Imports no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options for drawing the next token from the logits."""

    temperature: float = 0.8
    """Divisor of the logits; 0 always takes the likeliest token."""
    top_k: int = 0
    """Draw only from the k likeliest tokens; 0 disables this."""
    top_p: float = 1.0
    """Draw only from the smallest set of likeliest tokens with this much probability; 1 disables this."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (off) or a number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1 (off)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: must be 0 or more, and below 2^63")
