"""Votes over answers: count equal ones, rank them, and ask how far down the right one stands.

An answer is a grid of colours: the same cells in another shape are another answer. Most votes first, of
equals the higher mean confidence; or, by q, the highest confidence first, of equals the most votes. Of equals
in both the smaller grid by shape and then by content, so that a ranking never depends on the order of votes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

import numpy as np

Choice = Literal["vote", "q"]


@dataclass(frozen=True)
class Vote:
    """An answer, how often it was given, and the mean confidence with which it was."""

    grid: np.ndarray
    count: int
    confidence: float


class Ballot:
    """The answers to one test input, one entry for each that differs."""

    def __init__(self) -> None:
        self._entries: dict[tuple[tuple[int, ...], bytes], list[float]] = {}  # each vote's confidence

    def add(self, grid: np.ndarray, confidence: float) -> None:
        key = grid.shape, grid.astype(np.uint8, copy=False).tobytes()
        self._entries.setdefault(key, []).append(confidence)

    def ranked(self, choose: Choice = "vote") -> list[Vote]:
        """All answers, the best first."""
        # fsum: the last digit of a plain sum depends on the order, and would break ties by it.
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
    """Where the right answer stands, from 1; None where nobody gave it."""
    places = (place for place, vote in enumerate(ranked, 1) if np.array_equal(vote.grid, expected))
    return next(places, None)


def budget_needed(places: Sequence[int | None]) -> int | None:
    """The least K at which a task is solved, of its test inputs' places: all of them must be right."""
    known = [place for place in places if place is not None]
    return max(known) if len(known) == len(places) else None


def ladder(needed: Sequence[int | None], budgets: Sequence[int]) -> dict[int, float]:
    """Share of tasks that are solved with the best K answers to each input, for every K."""
    return {K: sum(own is not None and own <= K for own in needed) / len(needed) for K in budgets}
