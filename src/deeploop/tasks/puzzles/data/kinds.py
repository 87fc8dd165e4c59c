"""The kinds of puzzles: functions of each that the format in `sets.py` calls."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deeploop.tasks.puzzles.data import arc_grids, dihedral, sudoku_symmetry
from deeploop.tasks.puzzles.data.dihedral import Turns, turn_boards
from deeploop.tasks.puzzles.data.sudoku_symmetry import Symmetry, shuffle_sudokus

Pairs = tuple[np.ndarray, np.ndarray]  # inputs and labels, uint8 (B, length)


@dataclass(frozen=True)
class PuzzleKind:
    """Functions that turn stored pairs into examples."""

    view_parameters: int = 0
    """Numbers in a row of views.npy; 0 if puzzles are shown as stored."""

    show: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], Pairs] | None = None
    """(inputs, labels, views (B, parameters), shifts (B, 2) or None): the pairs under their views."""

    check: Callable[[int, int, np.ndarray], None] | None = None
    """(vocabulary, length, views): raises ValueError unless they are valid for this kind."""

    augment: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Pairs] | None = None
    """(inputs, labels, key, draw numbers (B,)): the pairs under random symmetries, for training."""

    symmetries: Callable[[int, np.ndarray], Symmetry | Turns] | None = None
    """(side, numbers (B,)): exact symmetries of a board, for voting at test time; 0 is the identity."""

    read: Callable[[np.ndarray, np.ndarray], list[np.ndarray]] | None = None
    """(predictions (B, length), views (B, parameters)): answers with their views undone."""


KINDS = {
    # ARC is augmented by its views.
    "arc": PuzzleKind(
        arc_grids.VIEW_PARAMETERS, show=arc_grids.show, check=arc_grids.check_set, read=arc_grids.read_back
    ),
    "sudoku": PuzzleKind(augment=shuffle_sudokus, symmetries=sudoku_symmetry.board_views),
    "maze": PuzzleKind(augment=turn_boards, symmetries=dihedral.board_views),
    "pairs": PuzzleKind(),
}
