"""The eight symmetries of a square: views of an ARC task, classes and augmentations of mazes."""

from dataclasses import dataclass

import numpy as np

from deeploop.data.draws import words

# The dihedral moves: same, rotations by 90, 180 and 270 degrees against the clock, left-right, up-down,
# transpose, anti-transpose; INVERSE[d] undoes move d.
INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)


def turn(grid: np.ndarray, move: int) -> np.ndarray:
    """One of the eight dihedral moves, as a view of the same memory."""
    if move in (1, 3, 6, 7):
        grid = grid.T
    if move in (1, 2, 5, 7):
        grid = grid[::-1]
    if move in (2, 3, 4, 7):
        grid = grid[:, ::-1]
    return grid


@dataclass(frozen=True)
class Turns:
    """A dihedral move for each of B square boards."""

    moves: np.ndarray  # (B,)

    def apply(self, boards: np.ndarray) -> np.ndarray:
        """Boards of tokens (B, side²), turned."""
        size = int(boards.shape[1] ** 0.5)
        turned = np.empty_like(boards)
        for row, grid, move in zip(turned, boards, self.moves.tolist(), strict=True):
            row.reshape(size, size)[:] = turn(grid.reshape(size, size), move)
        return turned

    def inverse(self) -> "Turns":
        """The moves that undo these."""
        return Turns(np.array(INVERSE)[self.moves])


def board_views(size: int, views: np.ndarray) -> Turns:
    """The moves by which a board is shown again at test time; view 0 leaves it as it is."""
    if views.max(initial=0) >= len(INVERSE):
        raise ValueError(f"views={views.max() + 1}: a square board has {len(INVERSE)}")
    return Turns(views)


def turn_boards(
    inputs: np.ndarray, labels: np.ndarray, key: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Square boards and their answers as tokens (B, side²), each pair under a dihedral move of its own."""
    turns = Turns((words(key, numbers, 1)[:, 0] % np.uint64(8)).astype(np.int64))
    return turns.apply(inputs), turns.apply(labels)
