"""Lines of Sudoku files, as text or CSV: parsed, solved, and checked.

A line holds a puzzle, with `.` or 0 for an empty cell, then optionally its answer; the rest is ignored. Lines
that begin with # are comments. A CSV file has a header that names a column of puzzles and optionally one of
answers.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deeploop.data.corpora import open_text
from deeploop.tasks.puzzles.data.sudoku_batch import BATCH, solve_batch
from deeploop.tasks.puzzles.data.sudoku_symmetry import BLANK, class_keys

PUZZLE_COLUMNS = ("puzzle", "quizzes", "question")
ANSWER_COLUMNS = ("solution", "solutions", "answer")


class Columns(NamedTuple):
    """The columns of a CSV file: their number, and those of puzzles and answers."""

    width: int
    puzzle: int
    answer: int | None


@dataclass(frozen=True)
class Piece:
    """Some numbered lines of one file; `columns` for CSV."""

    source: int
    columns: Columns | None
    lines: list[tuple[int, str]]


class Solved(NamedTuple):
    """Puzzles with one answer as digits (0 blank), one per row, with guesses, class and file."""

    inputs: np.ndarray
    answers: np.ndarray
    guesses: np.ndarray
    classes: np.ndarray
    sources: np.ndarray


def file_pieces(source: int, path: Path) -> Iterator[Piece]:
    """Yield a file's lines in pieces, without comments and empty lines."""
    with open_text(path, errors="replace") as file:  # invalid bytes become bad characters
        lines = ((number, line.strip()) for number, line in enumerate(file, start=1))
        lines = (line for line in lines if line[1] and not line[1].startswith("#"))
        first = next(lines, None)
        if first is None:
            return
        columns = csv_columns(first[1])
        rest = lines if columns else chain([first], lines)
        while some := list(islice(rest, BATCH)):
            yield Piece(source, columns, some)


def csv_columns(header: str) -> Columns | None:
    """The columns named in a CSV header, or None if the line is not one."""
    names = [name.strip().lower() for name in _fields(header)]
    puzzle = next((n for n, name in enumerate(names) if name in PUZZLE_COLUMNS), None)
    answer = next((n for n, name in enumerate(names) if name in ANSWER_COLUMNS), None)
    return None if puzzle is None else Columns(len(names), puzzle, answer)


def _fields(line: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from None


def check_piece(piece: Piece, size: int) -> tuple[int, Solved, list[tuple[int, str]]]:
    """The file's number, its puzzles with one answer, and the errors in other lines."""
    numbers, rows, bad = [], [], []
    for number, line in piece.lines:
        try:
            rows.append(read_line(line, piece.columns, size))
            numbers.append(number)
        except ValueError as error:
            bad.append((number, str(error)))
    inputs = np.array([puzzle for puzzle, _ in rows], np.uint8).reshape(-1, size * size)
    solved = solve_batch(inputs)
    wrong = [_wrong(*one) for one in zip(rows, solved.counts.tolist(), solved.answers, strict=True)]
    bad += [(number, what) for number, what in zip(numbers, wrong, strict=True) if what]
    good = np.array([not what for what in wrong], bool)
    inputs, answers = inputs[good], solved.answers[good]
    blank = np.uint8(BLANK)
    classes = class_keys(inputs + blank, answers + blank)
    sources = np.full(len(inputs), piece.source, np.int32)
    return piece.source, Solved(inputs, answers, solved.guesses[good], classes, sources), sorted(bad)


Row = tuple[np.ndarray, np.ndarray | None]  # a puzzle and the file's own answer, as digits


def read_line(line: str, columns: Columns | None, size: int) -> Row:
    """Parse the puzzle of a line, and its answer if there is one."""
    if columns is None:
        puzzle, *rest = re.split(r"[\s,;|]+", line)
        answer = rest[0] if rest and re.fullmatch(rf"[1-9]{{{size * size}}}", rest[0]) else None
    else:
        cells = _fields(line)
        if len(cells) != columns.width:
            raise ValueError(f"{len(cells)} columns, the header has {columns.width}")
        puzzle = cells[columns.puzzle].strip()
        answer = None if columns.answer is None else cells[columns.answer].strip()
    clues = _digits(puzzle, size)
    if clues.all():
        raise ValueError("no empty cell")
    if answer is None:
        return clues, None
    try:
        return clues, _digits(answer, size)
    except ValueError as error:
        raise ValueError(f"answer: {error}") from None


def is_readable(line: str, columns: Columns | None, size: int) -> bool:
    """True if a line holds a puzzle that can be parsed."""
    try:
        return bool(read_line(line, columns, size))
    except ValueError:
        return False


def _digits(text: str, size: int) -> np.ndarray:
    if len(text) != size * size:
        raise ValueError(f"{len(text)} characters, must be {size * size}")
    if other := re.search(rf"[^.0-{size}]", text):
        raise ValueError(f"character {other[0]!r}: must be 1 to {size}, or . or 0 for an empty cell")
    return np.frombuffer(text.replace(".", "0").encode(), np.uint8) - ord("0")


def _wrong(row: Row, count: int, answer: np.ndarray) -> str:
    if count != 1:
        return "more than one answer" if count else "no answer"
    if row[1] is not None and (row[1] != answer).any():
        return "its answer is not the puzzle's only one"
    return ""
