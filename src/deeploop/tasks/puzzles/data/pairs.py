"""Build a puzzle folder from your own pairs of input and output, in JSON Lines.

A line is {"input": …, "output": …}. Either value is a grid (a list of rows of integers or strings), a flat
list (one row), or a string, in which each character is a symbol and each line a row. Every grid is placed in
the top-left corner of a board as large as the largest grid. Token 0 is padding, 1 marks the end of an output,
and symbols start at 2. An input is padded with 0. An output is padded with 1 to the size of the largest
output, and beyond that with 0, which is not scored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deeploop.data.corpora import json_lines
from deeploop.data.draws import keys, orders, words
from deeploop.files import sha256_of
from deeploop.tasks.puzzles.data.sets import PuzzleSet, group_table, write_puzzles

VERSION = 1
END, FIRST = 1, 2
MOST_SYMBOLS = 256 - FIRST  # a token is a byte
LONGEST_SYMBOL = 16
MOST_SHOWN = 60  # characters of a list of symbols
Grid = list[list[str]]


class Pair(NamedTuple):
    """Rows of symbols, and their location in the file."""

    where: str
    input: Grid
    output: Grid


@dataclass(frozen=True)
class PairsFile:
    """A file of pairs, and the settings of the build."""

    file: Path
    train: int | None = None  # None: all that are not held out
    test: int | None = None  # None: a tenth, at most 1,000
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """The settings that determine the content of the build, as in puzzles.json."""
        for name in ("train", "test"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"{name} {count}: must be at least 1")
        asked = {"train": self.train, "test": self.test, "seed": self.seed, "sha256": sha256_of(self.file)}
        return {"builder": "pairs", "version": VERSION, **asked}


def build_pairs(asked: PairsFile, out: Path) -> PuzzleSet:
    """Write the distinct pairs of a file as a set of puzzles."""
    settings = asked.settings()
    pairs, repeated = read_pairs(asked.file)
    shape = largest(grid for pair in pairs for grid in (pair.input, pair.output))
    outputs = largest(pair.output for pair in pairs)
    symbols = find_symbols(pairs)
    tokens = {symbol: FIRST + number for number, symbol in enumerate(symbols)}
    blank, ended = np.zeros((2, *shape), np.uint8)
    ended[: outputs[0], : outputs[1]] = END
    inputs = np.stack([place(pair.input, blank, tokens) for pair in pairs])
    labels = np.stack([place(pair.output, ended, tokens) for pair in pairs])
    return write_puzzles(
        out,
        kind="pairs",
        vocabulary=FIRST + len(symbols),
        splits={name: _arrays(inputs, labels, rows) for name, rows in draw(asked, len(pairs)).items()},
        build={
            **settings,
            "shape": list(shape),
            "output": list(outputs),
            "symbols": symbols,
            "repeated": repeated,
        },
    )


def describe_pairs(puzzles: PuzzleSet) -> list[str]:
    """A line about the board, the symbols and the repeated pairs, of a set of pairs."""
    if puzzles.kind != "pairs":
        return []
    build = puzzles.facts["build"]
    board, outputs = (" × ".join(map(str, build[name])) for name in ("shape", "output"))
    of_outputs = f" (outputs {outputs})" if outputs != board else ""
    shown = [
        symbol if symbol.isprintable() and symbol.strip() else repr(symbol) for symbol in build["symbols"]
    ]
    symbols = " ".join(shown)
    if len(symbols) > MOST_SHOWN:
        symbols = f"{symbols[:MOST_SHOWN].rpartition(' ')[0]} …"
    repeated = build.get("repeated", 0)
    left_out = f"; {repeated:,} repeated pair{'s' * (repeated > 1)} left out" if repeated else ""
    return [f"board {board}{of_outputs}, {len(shown)} symbols: {symbols}{left_out}"]


# ── Reading ─────────────────────────────────────────────────────────────────────────────────────────────
def read_pairs(file: Path) -> tuple[list[Pair], int]:
    """Read the distinct pairs of a file; also return how many others repeat one of them."""
    pairs: dict[str, Pair] = {}
    repeated = 0
    for where, value in json_lines(file):
        if not isinstance(value, dict) or not {"input", "output"} <= set(value):
            raise ValueError(f'{where}: must be {{"input": …, "output": …}}')
        pair = Pair(where, *(parse_rows(f"{where}: {name}", value[name]) for name in ("input", "output")))
        repeated += repr(pair.input) in pairs
        earlier = pairs.setdefault(repr(pair.input), pair)
        if earlier.output != pair.output:
            raise ValueError(
                f"{where}: another output for the same input as in line {earlier.where.rpartition(':')[2]}"
            )
    if not pairs:
        raise ValueError(f"{file}: has no pairs")
    return list(pairs.values()), repeated


def parse_rows(where: str, value: Any) -> Grid:
    """Parse a grid, a list or a string into rows of symbols."""
    if isinstance(value, str):
        rows: Any = [list(line) for line in value.splitlines()]
    elif isinstance(value, list) and all(isinstance(row, list) for row in value):
        rows = value
        if len(widths := {len(row) for row in rows}) > 1:
            raise ValueError(f"{where}: rows have {min(widths)} to {max(widths)} cells; must be equally long")
    elif isinstance(value, list):
        rows = [value]
    else:
        raise ValueError(f"{where}: must be a string, or a list or grid of integers or strings")
    if not any(rows):
        raise ValueError(f"{where}: is empty")
    return [[_symbol(where, cell) for cell in row] for row in rows]


def _symbol(where: str, value: Any) -> str:
    """The symbol as text; 1 and "1" are equal."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{where}: cell {value!r:.40}: must be an integer or a string")
    if not 0 < len(text := str(value)) <= LONGEST_SYMBOL:
        raise ValueError(f"{where}: symbol {text!r:.40}: must have 1 to {LONGEST_SYMBOL} characters")
    return text


def find_symbols(pairs: Sequence[Pair]) -> list[str]:
    """Return all symbols: integers by value, then the others."""
    symbols: set[str] = set()
    for pair in pairs:
        symbols |= {cell for grid in (pair.input, pair.output) for row in grid for cell in row}
        if len(symbols) > MOST_SYMBOLS:
            raise ValueError(f"{pair.where}: more than {MOST_SYMBOLS} different symbols up to here")
    return sorted(symbols, key=symbol_order)


def symbol_order(symbol: str) -> tuple[bool, int, str]:
    """Sort key of a symbol: integers come first, by value."""
    digits = symbol.removeprefix("-")
    is_number = digits.isascii() and digits.isdigit()
    return not is_number, int(symbol) if is_number else 0, symbol


# ── Placing ─────────────────────────────────────────────────────────────────────────────────────────────
def largest(grids: Iterable[Grid]) -> tuple[int, int]:
    """Return the largest number of rows and the largest number of columns."""
    sizes = [(len(grid), max(map(len, grid))) for grid in grids]
    return max(height for height, _ in sizes), max(width for _, width in sizes)


def place(grid: Grid, board: np.ndarray, tokens: dict[str, int]) -> np.ndarray:
    """Write a grid's tokens into the top-left corner of a copy of `board`; return it flattened."""
    placed = board.copy()
    for line, row in zip(placed, grid, strict=False):  # the board may have more rows
        line[: len(row)] = [tokens[cell] for cell in row]
    return placed.reshape(-1)


def draw(asked: PairsFile, count: int) -> dict[str, np.ndarray]:
    """Split the pairs at random by the seed; return the indices of each split."""
    if count < 2:
        raise ValueError(f"{asked.file}: has 1 distinct pair; needs at least 2, to train and to test on")
    test = min(1000, -(-count // 10)) if asked.test is None else asked.test
    train = max(1, count - test) if asked.train is None else asked.train
    if train + test > count:
        raise ValueError(
            f"{asked.file}: has {count:,} distinct pairs, fewer than train={train:,} plus test={test:,}; "
            "choose a smaller --train or --test"
        )
    order = orders(words(keys(asked.seed)[0], np.array([0]), count)[0])
    return {"test": order[:test], "train": order[test : test + train]}


def _arrays(inputs: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"inputs": inputs[rows], "labels": labels[rows], "groups": group_table(len(rows))}
