"""Solve many Sudoku at once in numpy: the search of `sudoku.py` on batches of boards.

A board is a column of 16-bit masks of possible values, one per cell. A sweep applies naked and hidden singles
to all boards at once. A board that no longer changes is branched on its first cell with the fewest values.
All branches are searched, so the guesses of a puzzle with one answer are those that `sudoku.solve` counts.
"""

from dataclasses import dataclass

import numpy as np

from deeploop.tasks.puzzles.data.sudoku_symmetry import BOXES

BATCH = 2048  # boards per sweep, which fit into a core's cache with their intermediate results


@dataclass(frozen=True)
class Solutions:
    """The solutions of a batch of puzzles."""

    counts: np.ndarray  # (B,) number of answers: 0, 1, or 2 for more than one
    answers: np.ndarray  # uint8 (B, cells) digits; one of the answers if there are several
    guesses: np.ndarray  # (B,) values tried until all or two answers were found


def solve_batch(puzzles: np.ndarray) -> Solutions:
    """Solve boards of digits (B, cells), 0 for blank."""
    size = int(puzzles.shape[1] ** 0.5)
    solutions = Solutions(
        np.zeros(len(puzzles), np.int64), np.zeros_like(puzzles), np.zeros(len(puzzles), np.int64)
    )
    boards, owners = np.ascontiguousarray(_masks(puzzles, size).T), np.arange(len(puzzles))
    while len(owners):
        now, of = boards[:, -BATCH:], owners[-BATCH:]
        boards, owners = boards[:, :-BATCH], owners[:-BATCH]
        wanted = solutions.counts[of] < 2
        if wanted.any():
            more, parents = _advance(solutions, np.compress(wanted, now, axis=1), of[wanted], size)
            boards, owners = np.concatenate([boards, more], axis=1), np.concatenate([owners, parents])
    return solutions


def _advance(
    solutions: Solutions, boards: np.ndarray, owners: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sweep once and record solved boards; return those to sweep again, and the branches of the others."""
    before = boards.copy()
    possible = _sweep(boards, size)
    changed = (boards != before).any(axis=0)
    still_open = (boards & (boards - 1)).any(axis=0)
    _record(solutions, boards, owners, possible & ~changed & ~still_open)
    ready, again = possible & ~changed & still_open, possible & changed
    children, parents = _branch(np.compress(ready, boards, axis=1), size)
    tried = owners[ready][parents]
    solutions.guesses[:] += np.bincount(tried, minlength=len(solutions.guesses))
    swept = np.compress(again, boards, axis=1)
    return np.concatenate([swept, children], axis=1), np.concatenate([owners[again], tried])


def _masks(puzzles: np.ndarray, size: int) -> np.ndarray:
    values = np.concatenate([[(1 << size) - 1], 1 << np.arange(size)]).astype(np.uint16)
    return values[puzzles]


def _record(solutions: Solutions, boards: np.ndarray, owners: np.ndarray, where: np.ndarray) -> None:
    """Record the solved boards, which are those at `where`."""
    digits = np.bitwise_count(boards[:, where] - 1) + 1  # the position of the only bit
    solutions.answers[owners[where]] = digits.T
    solutions.counts[:] = (
        solutions.counts + np.bincount(owners[where], minlength=len(solutions.counts))
    ).clip(max=2)


def _branch(boards: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Try every value of one cell on each board; return the new boards and the index of each one's parent."""
    values = np.bitwise_count(boards)
    cell = np.where(values > 1, values, size + 1).argmin(axis=0)
    choices = boards[cell, np.arange(len(cell))] >> np.arange(size, dtype=np.uint16)[:, None] & 1
    value, parents = np.nonzero(choices)
    children = np.take(boards, parents, axis=1)
    children[cell[parents], np.arange(len(parents))] = np.uint16(1) << value.astype(np.uint16)
    return children, parents


def _sweep(boards: np.ndarray, size: int) -> np.ndarray:
    """Apply naked, then hidden singles in place; return the boards (N,) without a contradiction."""
    singles = boards * ((boards & (boards - 1)) == 0)
    wrong = np.zeros(boards.shape[1], np.uint16)
    taken = np.zeros_like(boards)
    for cells, single in zip(_units(taken, size), _units(singles, size), strict=True):
        once, twice = _seen(single)
        _join(wrong, twice)
        for cell in cells:
            cell |= once
    boards &= ~taken | singles
    hidden = np.zeros_like(boards)
    for cells, places in zip(_units(boards, size), _units(hidden, size), strict=True):
        once, twice = _seen(cells)
        _join(wrong, once ^ np.uint16((1 << size) - 1))  # a value without a possible cell
        once &= ~twice
        for place in places:
            place |= once
    hidden &= boards
    _join(wrong, hidden & (hidden - 1))  # two values in one cell
    boards *= hidden == 0
    boards |= hidden
    return (wrong == 0) & (boards != 0).all(axis=0)


def _units(boards: np.ndarray, size: int) -> list[list[np.ndarray]]:
    """Views of the first, second, … cell of all rows, then of all columns, then of all boxes."""
    height, width = BOXES[size]
    grid = boards.reshape(size, size, -1)
    boxes = boards.reshape(size // height, height, size // width, width, -1)
    return [
        [grid[:, n] for n in range(size)],
        [grid[n] for n in range(size)],
        [boxes[:, row, :, column] for row in range(height) for column in range(width)],
    ]


def _seen(cells: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The values that occur in a unit, and those that occur in several of its cells."""
    once, twice = cells[0].copy(), np.zeros_like(cells[0])
    for cell in cells[1:]:
        twice |= once & cell
        once |= cell
    return once, twice


def _join(into: np.ndarray, values: np.ndarray) -> None:
    into |= np.bitwise_or.reduce(values.reshape(-1, values.shape[-1]), axis=0)
