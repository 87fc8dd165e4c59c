"""The eight symmetries of a square: views of an ARC task, classes and augmentations of mazes."""

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


def turn_boards(
    inputs: np.ndarray, labels: np.ndarray, key: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Square boards and their answers as tokens (B, side²), each pair under a dihedral move of its own."""
    size = int(inputs.shape[1] ** 0.5)
    moves = (words(key, numbers, 1)[:, 0] % np.uint64(8)).tolist()
    turned = np.empty((2, *inputs.shape), dtype=inputs.dtype)
    for out, grids in zip(turned, (inputs, labels), strict=True):
        for row, grid, move in zip(out, grids, moves, strict=True):
            row.reshape(size, size)[:] = turn(grid.reshape(size, size), move)
    return turned[0], turned[1]
