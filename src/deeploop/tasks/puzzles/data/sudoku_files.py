"""A puzzle set from files of Sudokus (`sudoku_lines.py`), split by symmetry class."""

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from deeploop.data.draws import keys, orders, words
from deeploop.data.workers import process_map
from deeploop.files import sha256_of
from deeploop.tasks.puzzles.data.sets import PuzzleSet, group_table, write_puzzles
from deeploop.tasks.puzzles.data.sudoku import DIFFICULTIES, sudoku_settings
from deeploop.tasks.puzzles.data.sudoku_lines import Solved, check_piece, file_pieces, is_readable
from deeploop.tasks.puzzles.data.sudoku_symmetry import BLANK

VERSION = 1


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
def read_files(asked: SudokuFiles, tallies: list[Tally], workers: int) -> Solved:
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
    return Solved(*map(np.concatenate, zip(*parts, strict=True)))


def refuse_too_few(asked: SudokuFiles) -> None:
    """Raise for a file with too few lines to train on, before all files are solved; bad lines come later."""
    for path in asked.files:
        lines = ((line, piece.columns) for piece in file_pieces(0, path) for _, line in piece.lines)
        some = list(islice(lines, asked.train + 1))
        if 0 < len(some) <= asked.train and all(is_readable(*line, asked.size) for line in some):
            raise _too_few(path, f"{len(some):,} puzzles", asked.train)


def _too_few(path: Path, held: str, trained: int) -> ValueError:
    what = f"{held}, too few for {trained:,} to train on and some to test"
    return ValueError(f"{path}: {what}; ask for fewer with --train")


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


def _arrays(puzzles: Solved, rows: np.ndarray) -> dict[str, np.ndarray]:
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
