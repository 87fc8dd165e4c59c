"""Votes over answers: count equal answers, rank them, and find the rank of the right one.

An answer is a grid of colours; two grids of different shapes are different answers. Answers are ranked by
number of votes, then by mean confidence; with "q", by highest confidence, then by number of votes. Ties are
broken by shape, then by content, so that a ranking does not depend on the order of votes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from operator import itemgetter
from typing import Literal

import numpy as np

Choice = Literal["vote", "q"]


@dataclass(frozen=True)
class Vote:
    """An answer, its number of votes, and their mean confidence."""

    grid: np.ndarray
    count: int
    confidence: float


class Ballot:
    """Counts the equal answers to one test input."""

    def __init__(self) -> None:
        self._confidences: dict[tuple[tuple[int, ...], bytes], list[float]] = {}  # by shape and content

    def add(self, grid: np.ndarray, confidence: float) -> None:
        """Count a vote for an answer."""
        key = grid.shape, grid.astype(np.uint8, copy=False).tobytes()
        self._confidences.setdefault(key, []).append(confidence)

    def ranked(self, choose: Choice = "vote") -> list[Vote]:
        """Return all answers, best first."""
        keyed = []
        for (shape, cells), confidences in self._confidences.items():
            count = len(confidences)
            mean = fsum(confidences) / count  # fsum, as a plain sum depends on the order of votes
            first, second = (count, mean) if choose == "vote" else (max(confidences), count)
            vote = Vote(np.frombuffer(cells, dtype=np.uint8).reshape(shape), count, mean)
            keyed.append(((-first, -second, shape, cells), vote))
        return [vote for _, vote in sorted(keyed, key=itemgetter(0))]


def place_of(expected: np.ndarray, ranked: Sequence[Vote]) -> int | None:
    """Return the rank of the right answer, from 1; None if it is not among them."""
    places = (place for place, vote in enumerate(ranked, 1) if np.array_equal(vote.grid, expected))
    return next(places, None)


def budget_needed(places: Sequence[int | None]) -> int | None:
    """Return the smallest K whose best K answers include the right one for every test input, or None."""
    return None if None in places else max(place for place in places if place is not None)


def ladder(needed: Sequence[int | None], budgets: Sequence[int]) -> dict[int, float]:
    """Return the share of tasks solved with the best K answers to each input, for every K in `budgets`."""
    return {K: sum(own is not None and own <= K for own in needed) / len(needed) for K in budgets}
