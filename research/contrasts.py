"""Differences of losses between cells, and how sure they are.

`contrasts` is for designs with a few seeds in every cell. Seeds share batches between rules, but losses are
hardly correlated (about 0.1): pairing gains nothing, and the few seeds of one cell say little about their
spread, so all cells share one, and Holm's correction is over the table. `paired` is for grids whose cells
have different seeds: seed by seed, with Student's interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import fmean

from deeploop.diagnose.exponent import half_width

Losses = Mapping[int, float]  # seed → loss


@dataclass(frozen=True)
class Spread:
    """Standard deviation of a run's loss over seeds, pooled over the cells of a design."""

    sd: float
    dof: int

    def error(self, *counts: float) -> float:
        """Standard error of a contrast of means over so many seeds each."""
        return self.sd * math.sqrt(sum(1 / n for n in counts))


@dataclass(frozen=True)
class Contrast:
    """The mean of one cell minus another's."""

    one: str
    other: str
    mean: float
    half: float
    """Half of the interval, at 95% for all contrasts of the table together (Bonferroni)."""
    p: float
    """By Holm's method: below 0.05 the two are told apart."""

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ({self.mean - self.half:.4f} to {self.mean + self.half:.4f})"


def pooled(cells: Mapping[str, Losses]) -> Spread:
    """The spread of seeds within the cells."""
    squares = sum((loss - fmean(c.values())) ** 2 for c in cells.values() for loss in c.values())
    dof = sum(len(cell) - 1 for cell in cells.values())
    if dof < 1:
        raise ValueError("a spread of seeds needs at least one cell with two of them")
    return Spread(math.sqrt(squares / dof), dof)


def contrasts(cells: Mapping[str, Losses], pairs: Sequence[tuple[str, str]] | None = None) -> list[Contrast]:
    """These pairs of cells, or every pair, the lowest loss first. All cells give the spread."""
    spread = pooled(cells)
    if pairs is None:
        order = sorted(cells, key=lambda name: fmean(cells[name].values()))
        pairs = [(worse, better) for better, worse in combinations(order, 2)]
    means = [fmean(cells[a].values()) - fmean(cells[b].values()) for a, b in pairs]
    errors = [spread.error(len(cells[a]), len(cells[b])) for a, b in pairs]
    raw = [2 * upper_tail(abs(m) / e, spread.dof) for m, e in zip(means, errors, strict=True)]
    point = quantile(1 - 0.025 / len(pairs), spread.dof)
    rows = zip(pairs, means, errors, holm(raw), strict=True)
    return [Contrast(a, b, mean, point * error, p) for (a, b), mean, error, p in rows]


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values, adjusted for their number by Holm's step-down method."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def upper_tail(t: float, dof: int) -> float:
    """P(T > t) of Student's t, t ≥ 0: by Simpson's rule over the angle atan(t/√dof), where it is smooth."""
    scale = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)
    low, high, steps = math.atan(t / math.sqrt(dof)), math.pi / 2, 200
    width = (high - low) / steps
    weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
    total = sum(w * max(0.0, math.cos(low + i * width)) ** (dof - 1) for i, w in enumerate(weights))
    return scale * total * width / 3


@cache
def quantile(share: float, dof: int) -> float:
    """The value below which a share of Student's t lies, for shares of a half and more."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, dof) > 1 - share else (low, middle)
    return high


# ── Seed by seed ──
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
