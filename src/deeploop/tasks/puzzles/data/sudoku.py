"""Sudoku of 4 × 4, 6 × 6 (boxes of 2 × 3) and 9 × 9: a solver, a generator, and the puzzle set.

A puzzle is a random solved board from which clues are removed in a random order, as long as the solution
stays unique. Its rating is the number of guesses that the solver makes until it has shown this: naked and
hidden singles cost nothing, trying a value in a cell costs one. A rating of 0 means that singles alone solve
the puzzle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.draws import keys, orders, words
from deeploop.tasks.puzzles.data.generated import Candidate, build_generated, check_counts
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku_symmetry import BLANK, BOXES, class_keys

VERSION = 1
# Fewest guesses of each level, and the number from which on there are too many.
DIFFICULTIES = {"any": (0, None), "easy": (0, 1), "medium": (1, 10), "hard": (10, None)}
# Range of the number of clues to dig down to, drawn for each puzzle.
CLUES = {4: (4, 9), 6: (8, 16), 9: (17, 34)}


@dataclass(frozen=True)
class SudokuBoard:
    """The units of a board, and the peers of each cell."""

    size: int
    units: tuple[tuple[int, ...], ...]
    peers: tuple[tuple[int, ...], ...]


@cache
def board(size: int) -> SudokuBoard:
    """The board of size 4, 6 or 9."""
    if size not in BOXES:
        raise ValueError(f"size {size}: must be one of {', '.join(map(str, BOXES))}")
    height, width = BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    box = row // height * (size // width) + column // width
    units = [tuple(np.flatnonzero(kind == n).tolist()) for kind in (row, column, box) for n in range(size)]
    seen = [
        tuple(sorted({other for unit in units if cell in unit for other in unit} - {cell}))
        for cell in range(size * size)
    ]
    return SudokuBoard(size, tuple(units), tuple(seen))


def assign(cells: list[int], where: list[int], on: SudokuBoard) -> bool:
    """Propagate the single values at `where` and all singles that follow; False on a contradiction.

    A cell is the mask of its possible values. `cells` is changed in place.
    """
    full = (1 << on.size) - 1
    while True:
        while where:  # naked singles
            cell = where.pop()
            value = cells[cell]
            for peer in on.peers[cell]:
                if cells[peer] & value:
                    cells[peer] = left = cells[peer] & ~value
                    if not left:
                        return False
                    if not left & (left - 1):
                        where.append(peer)
        for unit in on.units:  # hidden singles
            once = twice = 0
            for cell in unit:
                twice |= once & cells[cell]
                once |= cells[cell]
            if once != full:
                return False
            if single := once & ~twice:
                for cell in unit:
                    mask = cells[cell]
                    if mask & single and mask & (mask - 1):
                        cells[cell] = mask & single
                        if cells[cell] & (cells[cell] - 1):
                            return False  # two values have only this cell
                        where.append(cell)
        if not where:
            return True


class Search:
    """Depth-first search, starting with the cells of fewest values; counts its guesses."""

    def __init__(self, on: SudokuBoard) -> None:
        self.on, self.guesses = on, 0

    def solutions(self, cells: list[int]) -> Iterator[list[int]]:
        """Yield the solved boards that extend a state propagated by `assign`."""
        open_cells = [cell for cell, mask in enumerate(cells) if mask & (mask - 1)]
        if not open_cells:
            yield cells
            return
        branch = min(open_cells, key=lambda cell: cells[cell].bit_count())
        for value in (1 << digit for digit in range(self.on.size)):
            if cells[branch] & value:
                self.guesses += 1
                trial = cells.copy()
                trial[branch] = value
                if assign(trial, [branch], self.on):
                    yield from self.solutions(trial)


def solve(puzzle: np.ndarray, limit: int = 2) -> tuple[list[np.ndarray], int]:
    """Up to `limit` solutions of a board of digits (0 blank), and the guesses made to find them."""
    on = board(int(len(puzzle) ** 0.5))
    cells, search = _masks(puzzle, on), Search(on)
    if not assign(cells, np.flatnonzero(puzzle).tolist(), on):
        return [], 0
    solved = list(islice(search.solutions(cells), limit))
    return [np.array([mask.bit_length() for mask in cells], np.uint8) for cells in solved], search.guesses


def _masks(puzzle: np.ndarray, on: SudokuBoard) -> list[int]:
    return [1 << (digit - 1) if digit else (1 << on.size) - 1 for digit in puzzle.tolist()]


def solved_board(size: int, key: np.ndarray) -> np.ndarray:
    """A random solved board of digits: cells in random order, each given a random possible value."""
    on = board(size)
    for attempt in count():
        drawn = words(key, np.array([attempt]), size**2 * (1 + size))[0]
        digits = orders(drawn[size**2 :].reshape(-1, size)).tolist()
        cells = [(1 << size) - 1] * size**2
        for cell in orders(drawn[: size**2]).tolist():
            for value in (1 << digit for digit in digits[cell] if cells[cell] >> digit & 1):
                trial = cells.copy()
                trial[cell] = value
                if assign(trial, [cell], on):
                    cells = trial
                    break
            else:
                break  # a dead end that singles did not reveal; start again
        else:
            return np.array([mask.bit_length() for mask in cells], dtype=np.uint8)
    raise AssertionError("unreachable")


def dig(solution: np.ndarray, order: list[int], clues: int, singles_only: bool) -> np.ndarray:
    """Remove clues in the given order while the puzzle stays unique, until `clues` are left."""
    on = board(int(len(solution) ** 0.5))
    puzzle = solution.copy()
    left = len(puzzle)
    for cell in order:
        if left <= clues:
            break
        puzzle[cell] = 0
        if _still_solved(puzzle, solution, cell, on, singles_only):
            left -= 1
        else:
            puzzle[cell] = solution[cell]
    return puzzle


def _still_solved(
    puzzle: np.ndarray, solution: np.ndarray, cell: int, on: SudokuBoard, singles_only: bool
) -> bool:
    cells, given = _masks(puzzle, on), np.flatnonzero(puzzle).tolist()
    if singles_only:
        return assign(cells, given, on) and not any(mask & (mask - 1) for mask in cells)
    # It was unique with the clue, so another solution has another value here.
    cells[cell] &= ~(1 << int(solution[cell]) - 1)
    return not (assign(cells, given, on) and next(Search(on).solutions(cells), None))


def make_sudokus(numbers: range, *, size: int, difficulty: str, seed: int) -> list[Candidate]:
    """Make the numbered puzzles of a seed, and keep those of the given difficulty."""
    least, too_many = DIFFICULTIES[difficulty]
    made = []
    for number in numbers:
        board_key, order_key = keys(seed, number, count=2)
        solution = solved_board(size, board_key)
        clues, order = _plan(size, order_key, few=least > 0)
        puzzle = dig(solution, order, clues, singles_only=too_many == 1)
        _, guesses = solve(puzzle)
        if guesses >= least and (too_many is None or guesses < too_many):
            made.append((puzzle + np.uint8(BLANK), solution + np.uint8(BLANK), guesses))
    if not made:
        return []
    classes = class_keys(
        np.stack([inputs for inputs, *_ in made]), np.stack([labels for _, labels, _ in made])
    )
    return [Candidate(*puzzle, group=key.tobytes()) for puzzle, key in zip(made, classes, strict=True)]


def _plan(size: int, key: np.ndarray, few: bool) -> tuple[int, list[int]]:
    """The number of clues to leave, and the order in which to try cells."""
    fewest, most = CLUES[size]
    drawn = words(key, np.array([0]), 1 + size**2)[0]
    clues = fewest if few else fewest + int(drawn[0] % np.uint64(most - fewest + 1))
    return clues, orders(drawn[1:]).tolist()


def build_sudoku(out: Path, *, workers: int = 1, **asked: Any) -> PuzzleSet:
    """Generate a set with these `sudoku_settings`; independent of the number of workers."""
    build = sudoku_settings(**asked)
    size = build["size"]
    make = partial(make_sudokus, size=size, difficulty=build["difficulty"], seed=build["seed"])
    return build_generated(out, make, build, kind="sudoku", vocabulary=size + 2, workers=workers)


def sudoku_settings(
    size: int = 9, train: int = 1000, test: int = 1000, difficulty: str = "any", seed: int = 0
) -> dict[str, Any]:
    """The settings that determine the content of a build, as in puzzles.json."""
    board(size)
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty {difficulty!r}: must be one of {', '.join(DIFFICULTIES)}")
    check_counts(train, test)
    asked = {"size": size, "train": train, "test": test, "difficulty": difficulty, "seed": seed}
    return {"builder": "sudoku", "version": VERSION, **asked}
