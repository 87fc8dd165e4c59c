"""ARC as the public code of HRM and TRM builds it, as a puzzle set.

A checkpoint's puzzle vectors are numbered by the build that it was trained on. The folder of that build
(`build_arc_dataset.py`) holds every example as tokens, and in `identifiers.json` the name of each id: a task,
or a task under a view, "0a1d4ef5_t3_0213456789" (TRM: "0a1d4ef5|||t3|||0213456789"). Here the ids stay, the
pairs of a task are stored once, and every example is compared with the folder's.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from deeploop.data.arrays import read_npy
from deeploop.files import read_value, sha256_of
from deeploop.tasks.puzzles.data.arc_grids import (
    COLOURS,
    FIRST_COLOUR,
    SIDE,
    VOCABULARY,
    crop_shapes,
    encode,
)
from deeploop.tasks.puzzles.data.kinds import KINDS
from deeploop.tasks.puzzles.data.sets import SPLITS, PuzzleSet, PuzzleSplit, write_puzzles

NAMES = "identifiers.json"
VIEW = re.compile(r"(.+?)(_|\|\|\|)t([0-7])\2(0[1-9]{9})")
VERSION = 1
CHUNK = 8192  # examples read at once


def public_settings(folder: Path) -> dict[str, Any]:
    """The settings that tell a build from others, as in puzzles.json."""
    if not (folder / NAMES).is_file():
        raise ValueError(
            f"from-public={folder}: no {NAMES}; must be a folder that build_arc_dataset.py wrote"
        )
    return {"builder": "arc-public", "version": VERSION, "names_sha256": sha256_of(folder / NAMES)}


def build_public(folder: Path, out: Path) -> PuzzleSet:
    """Write the public build in `folder` as a puzzle set with the same ids, examples and order."""
    settings = public_settings(folder)
    names, views = _read_names(folder / NAMES)
    splits = {split: _read_split(folder / split, views, shifted=split == "train") for split in SPLITS}
    groups = splits["train"]["groups"]
    return write_puzzles(
        out,
        kind="arc",
        vocabulary=VOCABULARY,
        views=views,
        splits=splits,
        names={split: [names[first] for first in splits[split]["groups"][:, 2]] for split in SPLITS},
        build={**settings, "tasks": {"public": len(groups)}, "augmentations": int(groups[:, 1].max()) - 1},
    )


def _read_names(path: Path) -> tuple[list[str], np.ndarray]:
    """The name of each id, and its view; an id without one shows the task itself."""
    names = read_value(path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        raise ValueError(f"{path}: must be a list of names")
    views = np.tile(np.array([0, *range(COLOURS)], dtype=np.uint8), (len(names), 1))
    for view, match in zip(views, map(VIEW.fullmatch, names), strict=True):
        if match:
            view[:] = [int(digit) for digit in match[3] + match[4]]
    return names, views


def _read_split(folder: Path, views: np.ndarray, *, shifted: bool) -> dict[str, np.ndarray]:
    """The arrays of a split: its tasks' pairs unturned and in the corner, and how each example shows them."""
    inputs, labels, ids, starts, edges = (
        _read(folder / f"all__{name}.npy")
        for name in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
    )
    _check(folder, views, inputs, labels, ids, starts, edges)
    first, puzzles = edges[:-1], np.diff(edges)  # the first puzzle of each task is the task itself
    pairs = np.diff(starts)[first]
    corners = np.concatenate([_corners(inputs[at : at + CHUNK]) for at in range(0, len(inputs), CHUNK)])
    where = np.concatenate(
        [np.arange(start, start + own) for start, own in zip(starts[first], pairs, strict=True)]
    )
    split = {
        "inputs": _in_the_corner(inputs[where], corners[where]),
        "labels": _in_the_corner(labels[where], corners[where]),
        "groups": np.stack([pairs, puzzles, ids[first]], axis=1).astype("<i8"),
        **({"shifts": corners} if shifted else {}),
    }
    same_views = np.array_equal(np.diff(starts), np.repeat(pairs, puzzles))
    same_ids = np.array_equal(ids, np.repeat(ids[first] - first, puzzles) + np.arange(len(ids)))
    if not (same_views and same_ids):
        raise ValueError(f"{folder}: the views of a task must have consecutive ids, and all of its pairs")
    _compare(folder, PuzzleSplit(KINDS["arc"], split, views, []), inputs, labels)
    return split


def _read(path: Path) -> np.ndarray:
    try:
        return read_npy(path)
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: can't be read ({error})") from None


def _check(folder: Path, views: np.ndarray, *arrays: np.ndarray) -> None:
    """Raise ValueError unless the arrays have the public code's shapes, and the indices are in range."""
    inputs, labels, ids, starts, edges = arrays
    tokens = all(own.dtype == np.uint8 and own.shape[1:] == (SIDE * SIDE,) for own in (inputs, labels))
    ascending = all(
        own.ndim == 1 and own.dtype.kind == "i" and len(own) > 1 and own[0] == 0 and (np.diff(own) > 0).all()
        for own in (starts, edges)
    )
    if not (
        tokens
        and ascending
        and (len(labels), starts[-1], edges[-1]) == (len(inputs), len(inputs), len(ids))
        and ids.shape == (len(starts) - 1,)
        and ids.dtype.kind == "i"
        and 0 <= ids.min() <= ids.max() < len(views)
    ):
        raise ValueError(f"{folder}: its arrays and {NAMES} don't fit together, or are not ARC's")


def _corners(tokens: np.ndarray) -> np.ndarray:
    """Row and column of the top-left corner of each grid, uint8 (B, 2)."""
    filled = tokens.reshape(-1, SIDE, SIDE) != 0
    return np.stack([filled.any(axis=2).argmax(axis=1), filled.any(axis=1).argmax(axis=1)], axis=1).astype(
        "u1"
    )


def _in_the_corner(tokens: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """The grids as tokens without their shift."""
    boards = tokens.reshape(-1, SIDE, SIDE)
    moved = np.stack(
        [np.roll(board, -own.astype(int), (0, 1)) for board, own in zip(boards, corners, strict=True)]
    )
    shapes = crop_shapes(moved.reshape(tokens.shape)).tolist()
    return np.stack(
        [encode(board[:h, :w] - FIRST_COLOUR) for board, (h, w) in zip(moved, shapes, strict=True)]
    )


def _compare(folder: Path, split: PuzzleSplit, inputs: np.ndarray, labels: np.ndarray) -> None:
    """Raise ValueError unless every example of the split is the folder's."""
    with tqdm(total=len(split), desc=folder.name, unit=" examples", dynamic_ncols=True, disable=None) as bar:
        for at in range(0, len(split), CHUNK):
            numbers = np.arange(at, min(at + CHUNK, len(split)))
            shown = split.rows(numbers)
            bad = (shown[0] != inputs[numbers]).any(axis=1) | (shown[1] != labels[numbers]).any(axis=1)
            if bad.any():
                raise ValueError(
                    f"{folder}: example {numbers[bad.argmax()]} is not its task under the view in {NAMES}"
                )
            bar.update(len(numbers))
