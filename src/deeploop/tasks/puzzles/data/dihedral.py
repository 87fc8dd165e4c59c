"""The eight symmetries of a square, for views of ARC tasks and for classes and augmentations of mazes."""

from dataclasses import dataclass

import numpy as np

from deeploop.data.draws import words

# The dihedral moves: identity, counterclockwise rotations by 90, 180 and 270 degrees, left-right, up-down,
# transpose, anti-transpose. INVERSE[d] undoes move d.
INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)


def turn(grid: np.ndarray, move: int) -> np.ndarray:
    """Apply one of the eight dihedral moves; returns a view of the same memory."""
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
        """Apply the moves to boards of tokens (B, side²)."""
        size = int(boards.shape[1] ** 0.5)
        turned = np.empty_like(boards)
        for row, grid, move in zip(turned, boards, self.moves.tolist(), strict=True):
            row.reshape(size, size)[:] = turn(grid.reshape(size, size), move)
        return turned

    def inverse(self) -> "Turns":
        """The inverse moves."""
        return Turns(np.array(INVERSE)[self.moves])


def board_views(size: int, views: np.ndarray) -> Turns:
    """The moves for the views of a board at test time; view 0 is the identity."""
    if views.max(initial=0) >= len(INVERSE):
        raise ValueError(f"views={views.max() + 1}: a square board has {len(INVERSE)}")
    return Turns(views)


def turn_boards(
    inputs: np.ndarray, labels: np.ndarray, key: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Apply a random dihedral move to each pair of boards and answers, tokens (B, side²)."""
    turns = Turns((words(key, numbers, 1)[:, 0] % np.uint64(8)).astype(np.int64))
    return turns.apply(inputs), turns.apply(labels)
