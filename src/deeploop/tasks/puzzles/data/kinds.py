"""The kinds of puzzles: what each of them adds to the format of `sets.py`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deeploop.tasks.puzzles.data import arc_grids, dihedral, sudoku_symmetry
from deeploop.tasks.puzzles.data.dihedral import Turns, turn_boards
from deeploop.tasks.puzzles.data.sudoku_symmetry import Symmetry, shuffle_sudokus

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

    symmetries: Callable[[int, np.ndarray], Symmetry | Turns] | None = None
    """(side, numbers (B,)): exact symmetries that show a board again at test time; 0 leaves it as it is."""

    read: Callable[[np.ndarray, np.ndarray], list[np.ndarray]] | None = None
    """(predictions (B, length), views (B, parameters)): answers as they were before their views."""


KINDS = {
    # Its augmentations are its views.
    "arc": PuzzleKind(
        arc_grids.VIEW_PARAMETERS, show=arc_grids.show, check=arc_grids.check_set, read=arc_grids.read_back
    ),
    "sudoku": PuzzleKind(augment=shuffle_sudokus, symmetries=sudoku_symmetry.board_views),
    "maze": PuzzleKind(augment=turn_boards, symmetries=dihedral.board_views),
    "pairs": PuzzleKind(),
}
