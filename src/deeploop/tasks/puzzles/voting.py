"""Votes over answers: count equal answers, rank them, and find the rank of the right one.

An answer is a grid of colours; the same cells in another shape are another answer. Answers are ranked by
votes, then by mean confidence; or, with "q", by highest confidence, then by votes. Remaining ties go to the
smaller grid by shape, then by content, so that a ranking never depends on the order of votes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
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
    """The answers to one test input, with an entry for each different one."""

    def __init__(self) -> None:
        self._entries: dict[tuple[tuple[int, ...], bytes], list[float]] = {}  # confidences of the votes

    def add(self, grid: np.ndarray, confidence: float) -> None:
        key = grid.shape, grid.astype(np.uint8, copy=False).tobytes()
        self._entries.setdefault(key, []).append(confidence)

    def ranked(self, choose: Choice = "vote") -> list[Vote]:
        """All answers, best first."""
        # A plain sum depends on the order in its last digit, which would break ties.
        found = []
        for key, own in self._entries.items():
            count, mean = len(own), fsum(own) / len(own)
            merit = (count, mean) if choose == "vote" else (max(own), count)
            found.append((-merit[0], -merit[1], *key, count, mean))
        return [
            Vote(np.frombuffer(cells, dtype=np.uint8).reshape(shape), count, mean)
            for _, _, shape, cells, count, mean in sorted(found)
        ]


def place_of(expected: np.ndarray, ranked: Sequence[Vote]) -> int | None:
    """The rank of the right answer, from 1; None if it was not given."""
    places = (place for place, vote in enumerate(ranked, 1) if np.array_equal(vote.grid, expected))
    return next(places, None)


def budget_needed(places: Sequence[int | None]) -> int | None:
    """The smallest K that solves a task, whose test inputs must all be right; None if there is none."""
    known = [place for place in places if place is not None]
    return max(known) if len(known) == len(places) else None


def ladder(needed: Sequence[int | None], budgets: Sequence[int]) -> dict[int, float]:
    """Share of tasks solved with the best K answers to each input, for every K."""
    return {K: sum(own is not None and own <= K for own in needed) / len(needed) for K in budgets}
