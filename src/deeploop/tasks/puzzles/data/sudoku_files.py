"""Sudoku from files of lines or CSV: solved, checked, and split by symmetry class.

A line holds a puzzle, with `.` or 0 for an empty cell, then optionally its answer; the rest is ignored. Lines
that begin with # are comments. A CSV file has a header that names a column of puzzles and optionally one of
answers.
"""

import csv
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from deeploop.data.corpora import open_text
from deeploop.data.draws import keys, orders, words
from deeploop.data.workers import process_map
from deeploop.files import sha256_of
from deeploop.tasks.puzzles.data.sets import PuzzleSet, group_table, write_puzzles
from deeploop.tasks.puzzles.data.sudoku import DIFFICULTIES, sudoku_settings
from deeploop.tasks.puzzles.data.sudoku_batch import BATCH, solve_batch
from deeploop.tasks.puzzles.data.sudoku_symmetry import BLANK, class_keys

VERSION = 1
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


class Found(NamedTuple):
    """Puzzles with one answer as digits (0 blank), one per row, with guesses, class and file."""

    inputs: np.ndarray
    answers: np.ndarray
    guesses: np.ndarray
    classes: np.ndarray
    sources: np.ndarray


@dataclass
class Tally:
    """The number of puzzles and bad lines in a file."""

    puzzles: int = 0
    bad: int = 0
    duplicates: int = 0
    first_bad: str = ""


@dataclass(frozen=True)
class SudokuFiles:
    """The files to build from, and the settings; counts are per file."""

    files: tuple[Path, ...]
    test_from: tuple[Path, ...] = ()  # only tested on
    size: int = 9
    train: int = 1000
    test: int = 1000
    difficulty: str = "any"
    seed: int = 0
    skip_bad: bool = False

    def settings(self) -> dict[str, Any]:
        """The settings that determine the content of the build, as in puzzles.json."""
        asked = sudoku_settings(self.size, self.train, self.test, self.difficulty, self.seed)
        return {
            **asked,
            "builder": "sudoku from files",
            "version": VERSION,
            "skip_bad": self.skip_bad,
            "sources": self.names(),
            "sha256": [sha256_of(path) for path in self.all_files],
            "test_only": len(self.test_from),
        }

    @property
    def all_files(self) -> tuple[Path, ...]:
        return self.files + self.test_from

    def names(self) -> list[str]:
        """The files' names, or their whole paths if two are equal."""
        if len({path.resolve() for path in self.all_files}) < len(self.all_files):
            raise ValueError("from: a file is given twice")
        names = [path.name for path in self.all_files]
        return names if len(set(names)) == len(names) else [str(path) for path in self.all_files]


def build_from_files(asked: SudokuFiles, out: Path, workers: int = 1) -> PuzzleSet:
    """Check the puzzles in the files and write a sample; independent of the number of workers."""
    settings, names = asked.settings(), asked.names()
    refuse_too_few(asked)
    tallies = [Tally() for _ in names]
    puzzles = read_files(asked, tallies, workers)
    held_out = puzzles.sources >= len(asked.files)
    kept = one_of_each_class(puzzles.classes, held_out)
    dropped = np.bincount(np.delete(puzzles.sources, kept), minlength=len(names))
    for tally, count in zip(tallies, dropped.tolist(), strict=True):
        tally.duplicates = count
    chosen = draw(asked, puzzles.guesses[kept], puzzles.sources[kept])
    return write_puzzles(
        out,
        kind="sudoku",
        vocabulary=asked.size + 2,
        splits={split: _arrays(puzzles, kept[rows]) for split, rows in chosen.items()},
        build={**settings, "files": [vars(tally) for tally in tallies]},
    )


# ── Reading ─────────────────────────────────────────────────────────────────────────────────────────────
def read_files(asked: SudokuFiles, tallies: list[Tally], workers: int) -> Found:
    """Read all puzzles with one answer, in the order of files and lines, and count them."""
    pieces = chain.from_iterable(file_pieces(n, path) for n, path in enumerate(asked.all_files))
    parts = []
    bar = tqdm(desc="sudoku", unit=" puzzles", dynamic_ncols=True, disable=None)
    with bar, closing(process_map(partial(check_piece, size=asked.size), pieces, workers)) as checked:
        for source, puzzles, bad in checked:
            path = asked.all_files[source]
            for number, what in bad:
                if not asked.skip_bad:
                    raise ValueError(f"{path}:{number}: {what}; --skip-bad leaves such lines out")
                tallies[source].first_bad = tallies[source].first_bad or f"{path.name}:{number}: {what}"
            tallies[source].bad += len(bad)
            tallies[source].puzzles += len(puzzles.inputs)
            parts.append(puzzles)
            bar.update(len(puzzles.inputs))
    for path, tally in zip(asked.all_files, tallies, strict=True):
        if not tally.puzzles:
            skipped = f" ({tally.bad:,} bad lines, the first: {tally.first_bad})" if tally.bad else ""
            raise ValueError(f"{path}: no puzzle in it{skipped}")
    return Found(*map(np.concatenate, zip(*parts, strict=True)))


def refuse_too_few(asked: SudokuFiles) -> None:
    """Raise for a file with too few lines to train on, before all files are solved; bad lines come later."""
    for path in asked.files:
        lines = ((line, piece.columns) for piece in file_pieces(0, path) for _, line in piece.lines)
        some = list(islice(lines, asked.train + 1))
        if 0 < len(some) <= asked.train and all(_is_readable(*line, asked.size) for line in some):
            raise _too_few(path, f"{len(some):,} puzzles", asked.train)


def _is_readable(line: str, columns: Columns | None, size: int) -> bool:
    try:
        return bool(read_line(line, columns, size))
    except ValueError:
        return False


def _too_few(path: Path, held: str, trained: int) -> ValueError:
    what = f"{held}, too few for {trained:,} to train on and some to test"
    return ValueError(f"{path}: {what}; ask for fewer with --train")


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


# ── Checking ────────────────────────────────────────────────────────────────────────────────────────────
def check_piece(piece: Piece, size: int) -> tuple[int, Found, list[tuple[int, str]]]:
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
    return piece.source, Found(inputs, answers, solved.guesses[good], classes, sources), sorted(bad)


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


# ── Choosing ────────────────────────────────────────────────────────────────────────────────────────────
def one_of_each_class(classes: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """The indices of the first puzzle of each class; test-only files take precedence."""
    order = np.argsort(~held_out, kind="stable")
    _, first = np.unique(classes[order], return_index=True)
    return np.sort(order[first])


def draw(asked: SudokuFiles, guesses: np.ndarray, sources: np.ndarray) -> dict[str, np.ndarray]:
    """Rows for training and for test, file by file, in an order drawn from the seed."""
    least, too_many = DIFFICULTIES[asked.difficulty]
    fits = (guesses >= least) & (guesses < (too_many or np.inf))
    train, test = [], []
    for source, path in enumerate(asked.all_files):
        own = np.flatnonzero(fits & (sources == source))
        own = own[orders(words(keys(asked.seed, source)[0], np.array([0]), len(own))[0])]
        trained = asked.train if source < len(asked.files) else 0
        if trained and len(own) <= trained:
            held = f"{len(own):,} puzzles of different classes{_of(asked.difficulty)}"
            raise _too_few(path, held, trained)
        tested = min(asked.test, len(own) - trained)
        test.append(own[:tested])
        train.append(own[tested : tested + trained])
    if not any(map(len, test)):
        raise ValueError(f"from: no puzzle is left to test on{_of(asked.difficulty)}")
    return {"train": np.concatenate(train), "test": np.concatenate(test)}


def _of(difficulty: str) -> str:
    return "" if difficulty == "any" else f" of difficulty {difficulty}"


def _arrays(puzzles: Found, rows: np.ndarray) -> dict[str, np.ndarray]:
    blank = np.uint8(BLANK)
    return {
        "inputs": puzzles.inputs[rows] + blank,
        "labels": puzzles.answers[rows] + blank,
        "groups": group_table(len(rows)),
        "ratings": puzzles.guesses[rows].astype("<i4"),
        "sources": puzzles.sources[rows].astype("<i4"),
    }


def describe_files(puzzles: PuzzleSet) -> list[str]:
    """A line about each file that a set was built from, if any."""
    tallies = puzzles.facts["build"].get("files", [])
    named = enumerate(zip(puzzles.sources, tallies, strict=True)) if tallies else []
    return [_describe(number, name, tally, puzzles) for number, (name, tally) in named]


def _describe(number: int, name: str, tally: dict[str, Any], puzzles: PuzzleSet) -> str:
    ratings: list[int] = []
    counts = []
    for split in (puzzles.train, puzzles.test):
        assert split.sources is not None
        assert split.ratings is not None
        own = split.sources == number
        counts.append(int(own.sum()))
        ratings += split.ratings[own].tolist()
    bad = f" (the first: {tally['first_bad']})" if tally["bad"] else ""
    guesses = f"; guesses: median {np.median(ratings):,.0f}, most {max(ratings):,}" if ratings else ""
    return (
        f"{name}: {tally['puzzles']:,} puzzles with one answer, {tally['duplicates']:,} of them duplicates, "
        f"{tally['bad']:,} bad lines{bad}; {counts[0]:,} to train on, {counts[1]:,} to test{guesses}"
    )
