"""Convert boards to text and back."""

from dataclasses import dataclass

import numpy as np

from deeploop.files import parse_json
from deeploop.tasks.puzzles.data.pairs import FIRST, parse_rows
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku_symmetry import BLANK

MAZE = "# SGo"  # from token 1 on


@dataclass(frozen=True)
class BoardText:
    """The symbols and the size of a kind of board."""

    shape: tuple[int, int]
    """Rows and columns."""
    shown: tuple[int, int]
    """Rows and columns of the answer, in the top-left corner."""
    symbols: dict[int, str]
    """The symbol of each token that has one."""
    aliases: dict[str, str]
    """Other spellings of a symbol."""
    full: bool
    """True if an input must fill the board."""

    @classmethod
    def of(cls, puzzles: PuzzleSet) -> "BoardText":
        """The symbols of a set's boards."""
        build, side = puzzles.facts["build"], int(puzzles.length**0.5)
        if puzzles.kind == "pairs":
            symbols = {FIRST + number: str(symbol) for number, symbol in enumerate(build["symbols"])}
            (height, width), (rows, columns) = build["shape"], build["output"]
            return cls((height, width), (rows, columns), symbols, {}, full=False)
        if puzzles.kind == "sudoku":
            symbols = {BLANK: ".", **{BLANK + digit: str(digit) for digit in range(1, side + 1)}}
            return cls((side, side), (side, side), symbols, {"0": "."}, full=True)
        if puzzles.kind == "maze":
            return cls((side, side), (side, side), dict(enumerate(MAZE, start=1)), {}, full=True)
        raise ValueError(f"{puzzles.folder}: puzzles of kind {puzzles.kind} have no form as text")

    def encode(self, text: str, name: str = "puzzle") -> np.ndarray:
        """Encode a JSON grid or a string as tokens (length,); a board's rows may be in one line."""
        try:
            board = parse_json(text) if text.lstrip().startswith("[") else text
        except ValueError as error:
            what = str(error).replace("line 1 column", "column")
            raise ValueError(f"{name}: not JSON: {what}; symbols that are letters need quotes") from None
        rows = parse_rows(name, board)
        cells = [self.aliases.get(cell, cell) for row in rows for cell in row]
        height, width = self.shape
        if self.full and len(cells) != height * width:
            raise ValueError(f"{name}: {len(cells)} cells, must be {height} × {width} = {height * width}")
        if self.full or (len(rows) == 1 and len(cells) == height * width):
            rows = [cells[first : first + width] for first in range(0, len(cells), width)]
        if len(rows) > height or max(map(len, rows)) > width:
            how = r"; separate rows by line breaks ($'ab\ncd'), or give a JSON grid"
            raise ValueError(
                f"{name}: {len(rows)} × {max(map(len, rows))} cells, the board has {height} × {width}"
                + how * (len(rows) == 1 < height)
            )
        tokens = {symbol: token for token, symbol in self.symbols.items()}
        if unknown := [cell for row in rows for cell in row if cell not in tokens]:
            known = " ".join([*tokens, *self.aliases])
            raise ValueError(f"{name}: symbol {unknown[0]!r}: must be one of {known}")
        board = np.zeros(self.shape, np.uint8)
        for line, row in zip(board, rows, strict=False):
            line[: len(row)] = [tokens[cell] for cell in row]
        return board.reshape(-1)

    def grid(self, tokens: np.ndarray, whole: bool = False) -> np.ndarray:
        """The tokens of the answer, or of the whole board, as (rows, columns)."""
        rows, columns = self.shape if whole else self.shown
        return tokens.reshape(self.shape)[:rows, :columns]

    def text(self, grid: np.ndarray) -> np.ndarray:
        """The symbols of tokens; empty for padding and ends."""
        return np.array([[self.symbols.get(token, "") for token in row] for row in grid.tolist()])
