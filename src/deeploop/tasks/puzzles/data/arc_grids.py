"""ARC grids as tokens: encoding, the views of a task and their inverses, and decoding predictions.

A grid of colours 0 … 9 becomes 30 × 30 tokens: colour c is 2 + c, EOS (1) marks the row below and the
column right of the grid, PAD (0) is the rest. A view is a dihedral move (0 … 7) and a permutation of the
colours that keeps black.
"""

import numpy as np

from deeploop.tasks.puzzles.data.dihedral import INVERSE, turn

SIDE = 30
EOS, FIRST_COLOUR = 1, 2
COLOURS = 10
VOCABULARY = FIRST_COLOUR + COLOURS
VIEW_PARAMETERS = 1 + COLOURS  # the move, then the image of each colour


def encode(grid: np.ndarray, row: int = 0, column: int = 0) -> np.ndarray:
    """Encode a grid of colours as (900,) tokens with its top-left corner at (row, column)."""
    tokens = np.zeros((SIDE, SIDE), dtype=np.uint8)
    _place(tokens, grid + np.uint8(FIRST_COLOUR), row, column)
    return tokens.reshape(-1)


def _place(tokens: np.ndarray, grid: np.ndarray, row: int, column: int) -> None:
    bottom, right = row + grid.shape[0], column + grid.shape[1]
    tokens[row:bottom, column:right] = grid
    # A slice that starts outside is empty: a grid that reaches the edge has no EOS there.
    tokens[bottom : bottom + 1, column:right] = EOS
    tokens[row:bottom, right : right + 1] = EOS


def crop_shapes(tokens: np.ndarray) -> np.ndarray:
    """Height and width of the largest top-left rectangle of colours, (B, 2); ties: the least height."""
    colours = (tokens >= FIRST_COLOUR) & (tokens < VOCABULARY)
    colours = colours.reshape(-1, SIDE, SIDE)
    widths = np.logical_and.accumulate(colours, axis=2).sum(axis=2)
    widths = np.minimum.accumulate(widths, axis=1)
    height = np.argmax(widths * np.arange(1, SIDE + 1), axis=1)
    width = widths[np.arange(len(widths)), height]
    return np.stack([np.where(width > 0, height + 1, 0), width], axis=1)


def read_back(tokens: np.ndarray, views: np.ndarray) -> list[np.ndarray]:
    """Decode predictions (B, 900) to grids of colours, cropped and with their views (B, 11) undone."""
    tables = np.zeros((len(views), VOCABULARY), dtype=np.uint8)  # original colour of each token
    tables[:, FIRST_COLOUR:] = np.argsort(views[:, 1:], axis=1)
    colours = np.take_along_axis(tables, tokens.astype(np.intp), axis=1).reshape(-1, SIDE, SIDE)
    return [
        turn(grid[:height, :width], INVERSE[move])
        for grid, (height, width), move in zip(
            colours, crop_shapes(tokens).tolist(), views[:, 0].tolist(), strict=True
        )
    ]


def show(
    inputs: np.ndarray, labels: np.ndarray, views: np.ndarray, shifts: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode unshifted grids as tokens (B, 900) under their views, with top-left corners at the shifts."""
    moves = views[:, 0].tolist()
    tables = np.zeros((len(views), VOCABULARY), dtype=np.uint8)  # new token of each colour's token
    tables[:, FIRST_COLOUR:] = views[:, 1:] + np.uint8(FIRST_COLOUR)
    corners = [(0, 0)] * len(views) if shifts is None else shifts.tolist()
    shown = []
    for grids in (inputs, labels):
        tokens = np.zeros((len(grids), SIDE, SIDE), dtype=np.uint8)
        rows = zip(tokens, grids.reshape(-1, SIDE, SIDE), crop_shapes(grids).tolist(), strict=True)
        for (out, grid, (height, width)), move, table, corner in zip(
            rows, moves, tables, corners, strict=True
        ):
            _place(out, turn(table[grid[:height, :width]], move), *corner)
        shown.append(tokens.reshape(grids.shape))
    return shown[0], shown[1]


def check_set(vocabulary: int, length: int, views: np.ndarray) -> None:
    """Raise ValueError unless a set of puzzles has ARC's sizes and valid views."""
    if (vocabulary, length) != (VOCABULARY, SIDE * SIDE):
        raise ValueError(f"vocabulary {vocabulary}, length {length}: not those of ARC")
    if views.size and (views[:, 0].max() >= 8 or views[:, 1:].max() >= COLOURS):
        raise ValueError("views: a move or a colour is out of range")
