"""The kinds of puzzles: what each of them adds to the format of `puzzles.py`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deeploop.data import arc_grids
from deeploop.data.dihedral import turn_boards
from deeploop.data.sudoku_symmetry import shuffle_sudokus

Pairs = tuple[np.ndarray, np.ndarray]  # inputs and labels, uint8 (B, length)


@dataclass(frozen=True)
class PuzzleKind:
    """How stored pairs become examples."""

    view_parameters: int = 0
    """Numbers in a row of views.npy; 0 where a puzzle is shown as it is stored."""

    show: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], Pairs] | None = None
    """(inputs, labels, views (B, parameters), shifts (B, 2) or None): the pairs as their views show them."""

    check: Callable[[int, int, np.ndarray], None] | None = None
    """(vocabulary, length, views): raises where they are none of this kind."""

    augment: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Pairs] | None = None
    """(inputs, labels, key, draw numbers (B,)): the pairs under random symmetries, drawn anew in training."""


KINDS = {
    # Its augmentations are its views.
    "arc": PuzzleKind(arc_grids.VIEW_PARAMETERS, show=arc_grids.show, check=arc_grids.check_set),
    "sudoku": PuzzleKind(augment=shuffle_sudokus),
    "maze": PuzzleKind(augment=turn_boards),
    "pairs": PuzzleKind(),
}
