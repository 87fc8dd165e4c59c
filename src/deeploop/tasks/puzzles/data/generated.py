"""Puzzle sets of generated puzzles: their split, when to stop, and the folder.

A hash of a puzzle's class, which its symmetries do not change, decides its split. So no puzzle of one split
is a symmetric image of one in the other, even with another seed.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from deeploop.data.draws import TEST_SHARE
from deeploop.data.workers import process_map
from deeploop.tasks.puzzles.data.sets import PuzzleSet, group_table, write_puzzles

# Attempts in one piece of work, and how many may fail in a row.
CHUNK = 32
FRUITLESS = 20_000


@dataclass(frozen=True)
class Candidate:
    """A generated puzzle: tokens, difficulty, and its class as bytes."""

    inputs: np.ndarray
    labels: np.ndarray
    rating: int
    group: bytes

    @property
    def split(self) -> str:
        """The split, which depends only on the class."""
        drawn = int.from_bytes(hashlib.sha256(self.group).digest()[:8], "little")
        return "test" if drawn < TEST_SHARE * 2**64 else "train"


def check_counts(train: int, test: int) -> None:
    """Raise ValueError unless both splits get puzzles."""
    for name, value in (("train", train), ("test", test)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")


def build_generated(
    out: Path,
    make: Callable[[range], list[Candidate]],
    build: dict[str, Any],
    *,
    kind: str,
    vocabulary: int,
    workers: int,
) -> PuzzleSet:
    """Generate numbered puzzles until both splits are full; independent of the number of workers."""
    pieces = (range(start, start + CHUNK) for start in count(0, CHUNK))
    with closing(process_map(make, pieces, workers)) as made:
        chosen = _fill(made, build["train"], build["test"], kind)
    return write_puzzles(
        out,
        kind=kind,
        vocabulary=vocabulary,
        splits={name: _arrays(puzzles) for name, puzzles in chosen.items()},
        build=build,
    )


def _fill(made: Iterable[list[Candidate]], train: int, test: int, kind: str) -> dict[str, list[Candidate]]:
    """The first distinct puzzles of each split."""
    wanted = {"train": train, "test": test}
    chosen: dict[str, list[Candidate]] = {name: [] for name in wanted}
    seen: set[bytes] = set()
    fruitless = 0
    with tqdm(total=train + test, desc=kind, unit=" puzzles", dynamic_ncols=True, disable=None) as bar:
        for candidates in made:
            new = list(_new(candidates, chosen, wanted, seen))
            bar.update(len(new))
            if all(len(chosen[name]) == wanted[name] for name in wanted):
                return chosen
            fruitless = 0 if new else fruitless + CHUNK
            if fruitless >= FRUITLESS:
                so_far = ", ".join(f"{name} {len(chosen[name])} of {wanted[name]}" for name in wanted)
                raise ValueError(
                    f"{kind}: no new puzzle in {fruitless} attempts ({so_far}): ask for fewer or easier"
                )
    raise AssertionError("attempts never end")


def _new(
    candidates: list[Candidate], chosen: dict[str, list[Candidate]], wanted: dict[str, int], seen: set[bytes]
) -> Iterator[Candidate]:
    for candidate in candidates:
        split = candidate.split
        puzzle = candidate.inputs.tobytes()
        if len(chosen[split]) < wanted[split] and puzzle not in seen:
            seen.add(puzzle)
            chosen[split].append(candidate)
            yield candidate


def _arrays(puzzles: list[Candidate]) -> dict[str, np.ndarray]:
    return {
        "inputs": np.stack([puzzle.inputs for puzzle in puzzles]),
        "labels": np.stack([puzzle.labels for puzzle in puzzles]),
        "groups": group_table(len(puzzles)),
        "ratings": np.array([puzzle.rating for puzzle in puzzles], dtype="<i4"),
    }
