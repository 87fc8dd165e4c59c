"""Differences of losses between cells, and how sure they are: the error model of all studies.

Seeds share batches between rules, but losses are hardly correlated (about 0.1): pairing gains nothing, and
the few seeds of one cell say little about their spread. So all cells of a design share one spread, means are
compared unpaired, and intervals and p-values are corrected for the differences that are shown together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import fmean

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
        return interval(self.mean, self.half)


def interval(mean: float, half: float) -> str:
    return f"{mean:+.4f} ({mean - half:.4f} to {mean + half:.4f})"


def pooled(cells: Mapping[str, Losses]) -> Spread:
    """The spread of seeds within the cells."""
    found = spread_within(cells.values())
    if found is None:
        raise ValueError("a spread of seeds needs at least one cell with two of them")
    return found


def spread_within(cells: Iterable[Losses]) -> Spread | None:
    """The spread of seeds within the cells; None if each has one seed."""
    every = [*cells]
    squares = sum((loss - fmean(c.values())) ** 2 for c in every for loss in c.values())
    dof = sum(len(cell) - 1 for cell in every)
    return Spread(math.sqrt(squares / dof), dof) if dof else None


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


class Family:
    """The differences of a table, asked for one by one; each interval is at 95% for all of them together.

    So a difference may be printed only when all were asked for.
    """

    def __init__(self, spread: Spread | None) -> None:
        self.spread = spread
        self.size = 0

    def minus(self, one: Losses, other: Losses, note: str = "") -> "Sum":
        return self.sum((1, one), (-1, other), note=note)

    def sum(self, *terms: tuple[int, Losses], note: str = "") -> "Sum":
        """The sum of the cells' means, each with its sign."""
        self.size += 1
        return Sum(self, terms, note)


@dataclass(frozen=True)
class Sum:
    """A sum of means, and its interval; without one if no cell of the design has two seeds."""

    family: Family
    terms: tuple[tuple[int, Losses], ...]
    note: str

    def __str__(self) -> str:
        mean, spread = sum(sign * fmean(losses.values()) for sign, losses in self.terms), self.family.spread
        if spread is None:
            seeds = " and ".join(str(len(losses)) for _, losses in self.terms)
            return f"{mean:+.4f} ({seeds} seeds){self.note}"
        error = spread.error(*(len(losses) for _, losses in self.terms))
        return interval(mean, quantile(1 - 0.025 / self.family.size, spread.dof) * error) + self.note


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
