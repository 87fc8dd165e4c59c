"""ARC grids under views, one grid at a time: references for the batched code."""

import numpy as np

from deeploop.tasks.puzzles.data.arc_grids import FIRST_COLOUR, SIDE, crop_shapes
from deeploop.tasks.puzzles.data.dihedral import INVERSE, turn


def augment(grid: np.ndarray, view: np.ndarray) -> np.ndarray:
    """Apply a view (11,) to a grid of colours: the move, then the image of each colour."""
    return view[1:][turn(grid, int(view[0]))]


def restore(grid: np.ndarray, view: np.ndarray) -> np.ndarray:
    """Undo `augment`."""
    return turn(np.argsort(view[1:])[grid], INVERSE[view[0]]).astype(np.uint8)


def crop(tokens: np.ndarray) -> np.ndarray:
    """The grid of colours in (900,) predicted tokens; 0 × 0 if there is none."""
    height, width = crop_shapes(tokens)[0]
    return (tokens.reshape(SIDE, SIDE)[:height, :width] - FIRST_COLOUR).astype(np.uint8)
