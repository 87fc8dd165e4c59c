"""Differences of losses over the seeds that two cells share, whose batches are the same. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from deeploop.diagnose.exponent import half_width

Losses = Mapping[int, float]  # seed → loss


@dataclass(frozen=True)
class Difference:
    """Mean of one minus other over the seeds that both have."""

    mean: float
    half: float
    """Half of the 95% interval, by Student's t; infinite with one seed."""
    seeds: int

    def __str__(self) -> str:
        if not math.isfinite(self.half):
            return f"{self.mean:+.4f} ({self.seeds})"
        return f"{self.mean:+.4f} ({self.mean - self.half:.4f} to {self.mean + self.half:.4f}; {self.seeds})"


def by_seed(one: Losses, other: Losses) -> dict[int, float]:
    """One minus other, for every seed that both have."""
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def paired(one: Losses, other: Losses) -> Difference | None:
    """None where they share no seed."""
    differences = [*by_seed(one, other).values()]
    if not differences:
        return None
    return Difference(fmean(differences), half_width(differences), len(differences))
