"""The symmetries of Sudoku: random ones for training, and classes that keep the splits apart.

They relabel the digits, permute bands, rows within a band, stacks and columns within a stack, and
transpose if the boxes are square. Tokens: 0 pad (never used), 1 blank, 1 + d for the digit d.
"""

from dataclasses import dataclass

import numpy as np

from deeploop.data.draws import GOLDEN, keys, mix, orders, words

# Height and width of a box by the size of the board.
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
BLANK = 1
REFINEMENTS = 4


@dataclass(frozen=True)
class Symmetry:
    """A symmetry for each of B boards: (B, size) orders of rows, columns and digits, (B,) transposes."""

    rows: np.ndarray
    columns: np.ndarray
    digits: np.ndarray
    transposed: np.ndarray

    def apply(self, boards: np.ndarray) -> np.ndarray:
        """Apply the symmetries to boards of tokens (B, size²)."""
        size = self.rows.shape[1]
        board = np.arange(len(boards))[:, None, None]
        moved = boards.reshape(-1, size, size)[board, self.rows[:, :, None], self.columns[:, None, :]]
        moved = np.where(self.transposed[:, None, None], moved.transpose(0, 2, 1), moved)
        tables = np.zeros((len(boards), size + 2), dtype=boards.dtype)
        tables[:, BLANK] = BLANK
        tables[:, BLANK + 1 :] = self.digits + BLANK + 1
        return tables[board, moved].reshape(boards.shape)

    def inverse(self) -> "Symmetry":
        """The inverse symmetries."""
        rows, columns, digits = (
            np.argsort(order, axis=1) for order in (self.rows, self.columns, self.digits)
        )
        swap = self.transposed[:, None]  # the transpose is undone first, which swaps rows and columns
        return Symmetry(np.where(swap, columns, rows), np.where(swap, rows, columns), digits, self.transposed)


def board_views(size: int, views: np.ndarray) -> Symmetry:
    """The symmetries for the views of a puzzle at test time; view 0 is the identity."""
    drawn = draw_symmetries(size, keys(0)[0], views)
    lines, stays = np.arange(size), (views == 0)[:, None]
    rows, columns, digits = (np.where(stays, lines, own) for own in (drawn.rows, drawn.columns, drawn.digits))
    return Symmetry(rows, columns, digits, drawn.transposed & (views > 0))


def draw_symmetries(size: int, key: np.ndarray, numbers: np.ndarray) -> Symmetry:
    """The numbered random symmetries of a key, all equally likely."""
    height, width = BOXES[size]
    drawn = words(key, numbers, 1 + size + (width + size) + (height + size))
    flip, digits, down, across = np.split(drawn, np.cumsum([1, size, width + size]), axis=1)
    return Symmetry(
        rows=_line_order(down, size // height, height),
        columns=_line_order(across, size // width, width),
        digits=orders(digits),
        transposed=(flip[:, 0] % np.uint64(2) == 1) & (height == width),
    )


def _line_order(drawn: np.ndarray, bands: int, lines: int) -> np.ndarray:
    """Combine an order of the bands and of the lines within each into an order of all lines."""
    band = orders(drawn[:, :bands])
    line = orders(drawn[:, bands:].reshape(-1, bands, lines))
    return (band[:, :, None] * lines + line).reshape(len(drawn), bands * lines)


def shuffle_sudokus(
    inputs: np.ndarray, labels: np.ndarray, key: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Apply a random symmetry to each pair of puzzle and solution."""
    symmetry = draw_symmetries(int(inputs.shape[1] ** 0.5), key, numbers)
    return symmetry.apply(inputs), symmetry.apply(labels)


def class_keys(inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """A key (uint64) of each puzzle's class, equal for puzzles that are symmetric images of each other.

    By colour refinement: a cell starts as clue or blank, and repeatedly mixes in its row, column, box and the
    cells of its digit in the solution. Rows and columns are treated alike and nothing depends on a place or
    a digit, so no symmetry changes the key. Different classes may share a key; then more puzzles than
    necessary are held out.
    """
    size = int(inputs.shape[1] ** 0.5)
    height, width = BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    box = row // height * (size // width) + column // width
    cells = mix((inputs != BLANK).astype(np.uint64) + GOLDEN)
    board = np.arange(len(cells))[:, None]
    order = np.argsort(labels, axis=1, kind="stable")  # groups the cells of each digit
    for _ in range(REFINEMENTS):
        held = np.zeros((2, *cells.shape), dtype=np.uint64)
        for unit in (row, column):
            held[0] += mix(_unit_sums(cells, np.argsort(unit, kind="stable")[None], size, board) ^ GOLDEN)
        held[1] += mix(_unit_sums(cells, np.argsort(box, kind="stable")[None], size, board) + GOLDEN)
        held[1] += mix(_unit_sums(cells, order, size, board) * GOLDEN)
        cells = mix(cells + mix(held[0] * GOLDEN) + mix(held[1]))
    return mix(cells.sum(axis=1, dtype=np.uint64))


def _unit_sums(cells: np.ndarray, order: np.ndarray, size: int, board: np.ndarray) -> np.ndarray:
    """For each cell, the sum over its unit; `order` lists the cells unit by unit."""
    sums = cells[board, order].reshape(len(cells), size, size).sum(axis=2, dtype=np.uint64)
    result = np.empty_like(cells)
    result[board, np.broadcast_to(order, cells.shape)] = np.repeat(sums, size, axis=1)
    return result
