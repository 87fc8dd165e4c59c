"""The puzzle folder: one format for all kinds of puzzles.

An example is inputs and labels of the same length, and a puzzle id. Examples belong to puzzles, puzzles to
groups: a group is a task, a puzzle is one view of it (an augmentation), and an example is one of the task's
pairs under a view. The pairs are stored once, and the views as parameters; examples are computed when they
are read (`kinds.py`).

    views.npy              uint8 (puzzle ids, parameters): view of each puzzle; row 0 is the blank id
    train_inputs.npy …     uint8 (pairs, length), in the order of their groups; also train_labels.npy
    train_groups.npy       int64 (groups, 3): number of pairs, number of puzzles, first puzzle id
    train_shifts.npy       uint8 (examples, 2): top-left corner of each grid; optional
    train_ratings.npy      int32 (groups,): difficulty of each group; optional
    train_sources.npy      int32 (groups,): index of its file in build.sources; optional
    test_….npy             as above, for the test split
    puzzles.json           description, the build's arguments, checksums of the arrays, the content hash

A folder gets its name only when complete. Token 0 is padding; a label of 0 is not scored.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.description import check_fields, digest, naming_damage, read_array, read_description
from deeploop.files import atomic_file, naming_field, refuse_other
from deeploop.models.reasoner_config import PuzzleShape
from deeploop.tasks.puzzles.data.kinds import KINDS, PuzzleKind

PUZZLE_FORMAT = 1
SPLITS = ("train", "test")
REQUIRED = ("inputs", "labels", "groups")
OPTIONAL = ("shifts", "ratings", "sources")
TYPES = {
    "inputs": "|u1", "labels": "|u1", "groups": "<i8", "shifts": "|u1", "ratings": "<i4", "sources": "<i4",
    "views": "|u1",
}  # fmt: skip
FIELDS = {
    "kind": str,
    "vocabulary": int,
    "length": int,
    "puzzle_ids": int,
    "build": dict,
    "arrays": dict,
    "names": {split: list for split in SPLITS},
    "splits": {split: {"groups": int, "pairs": int, "puzzles": int, "examples": int} for split in SPLITS},
    "hash": str,
}


class PuzzleSplit:
    """One split. Its examples are ordered by group, then by puzzle, then by pair."""

    def __init__(
        self, kind: PuzzleKind, arrays: Mapping[str, np.ndarray], views: np.ndarray, names: list[str]
    ) -> None:
        self.kind = kind
        self.inputs, self.labels = arrays["inputs"], arrays["labels"]
        self.groups = np.array(arrays["groups"])
        self.ratings, self._shifts = arrays.get("ratings"), arrays.get("shifts")
        self.sources = arrays.get("sources")  # index of each group's file in PuzzleSet.sources
        self.names = names  # the groups' names, or empty
        self.views = views
        pairs, puzzles, _ = self.groups.T
        self._pair_ends, self._example_ends = np.cumsum(pairs), np.cumsum(pairs * puzzles)

    def __len__(self) -> int:
        return int(self._example_ends[-1])

    @property
    def side(self) -> int:
        """The side of a square board."""
        return int(self.inputs.shape[1] ** 0.5)

    @cached_property
    def scored(self) -> np.ndarray:
        """The cells that are scored in some puzzle, bool (length,)."""
        scored: np.ndarray = (self.labels != 0).any(axis=0)
        return scored

    def first_examples(self) -> np.ndarray:
        """The number of each group's first example."""
        return np.concatenate([[0], self._example_ends[:-1]])

    def origin(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Group, puzzle id and pair (counted within its group) of each numbered example."""
        group = np.searchsorted(self._example_ends, examples, side="right")
        pairs, puzzles, first_id = self.groups[group].T
        puzzle, pair = np.divmod(examples - (self._example_ends[group] - pairs * puzzles), pairs)
        return group, first_id + puzzle, pair

    def rows(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs and labels (uint8, (B, length)) and puzzle ids (B,) of the numbered examples."""
        if len(examples) and not (examples.min() >= 0 and examples.max() < len(self)):
            raise ValueError(
                f"examples {examples.min()} to {examples.max()}: the split has 0 to {len(self) - 1}"
            )
        group, ids, pair = self.origin(examples)
        where = self._pair_ends[group] - self.groups[group, 0] + pair
        inputs, labels = self.inputs[where], self.labels[where]
        if self.kind.show is not None:
            shifts = None if self._shifts is None else self._shifts[examples]
            inputs, labels = self.kind.show(inputs, labels, self.views[ids], shifts)
        return inputs, labels, ids


@dataclass(frozen=True)
class PuzzleSet:
    """A prepared set of puzzles, memory-mapped."""

    folder: Path
    kind: str
    vocabulary: int
    length: int
    puzzle_ids: int
    """The number of puzzle ids, including the blank id 0."""

    views: np.ndarray
    train: PuzzleSplit
    test: PuzzleSplit
    hash: str
    """The content hash, which does not depend on where the set was built."""

    facts: dict[str, Any]
    """puzzles.json, as read."""

    @classmethod
    def open(cls, folder: Path | str) -> "PuzzleSet":
        """Open a folder, checking names, types, shapes and puzzle ids but not the hash."""
        folder = Path(folder)
        _check_whole(folder)
        with naming_damage(folder):
            facts = _read_facts(folder)
            arrays = {name: _read_array(folder, name, entry) for name, entry in facts["arrays"].items()}
            _check_arrays(facts, arrays)
        views = np.array(arrays["views"])
        kind = KINDS[facts["kind"]]
        train, test = (PuzzleSplit(kind, _of(arrays, name), views, facts["names"][name]) for name in SPLITS)
        named = {name: facts[name] for name in ("kind", "vocabulary", "length", "puzzle_ids", "hash")}
        return cls(folder=folder, views=views, train=train, test=test, facts=facts, **named)

    @property
    def shape(self) -> PuzzleShape:
        """The sizes that a model for these puzzles has."""
        return PuzzleShape(self.vocabulary, self.length, self.puzzle_ids)

    @property
    def sources(self) -> list[str]:
        """The names of the files that the puzzles come from, if recorded."""
        return list(self.facts["build"].get("sources", []))

    def verify(self) -> None:
        """Read every array and raise ValueError unless its content has the hash in puzzles.json."""
        with naming_damage(self.folder):
            for name, entry in self.facts["arrays"].items():
                sha256, wanted = digest(_read_array(self.folder, name, entry)), entry["sha256"]
                if sha256 != wanted:
                    raise ValueError(f"{name}.npy has sha256 {sha256:.12}…, puzzles.json {wanted:.12}…")
            if (sha256 := content_hash(self.facts)) != self.hash:
                raise ValueError(f"its content has hash {sha256:.12}…, puzzles.json {self.hash:.12}…")
            self._check_values()

    def _check_values(self) -> None:
        """Raise ValueError for a token or view out of range, for which a model would have no row."""
        for name, split in zip(SPLITS, (self.train, self.test), strict=True):
            for what, tokens in (("inputs", split.inputs), ("labels", split.labels)):
                if (most := int(tokens.max(initial=0))) >= self.vocabulary:
                    raise ValueError(f"{name}_{what}: token {most}: must be below {self.vocabulary}")
        if check := KINDS[self.kind].check:
            check(self.vocabulary, self.length, self.views)


def open_puzzles(path: Path, field: str = "data.path") -> PuzzleSet:
    """Open the puzzles of a folder and verify their hash; `field` is named in errors."""
    with naming_field(field, path):
        puzzles = PuzzleSet.open(path)
        puzzles.verify()
    return puzzles


def write_puzzles(
    folder: Path,
    *,
    kind: str,
    vocabulary: int,
    splits: Mapping[str, Mapping[str, np.ndarray]],
    build: Mapping[str, Any],
    views: np.ndarray | None = None,
    names: Mapping[str, list[str]] | None = None,
) -> PuzzleSet:
    """Write a whole folder atomically; `build` holds the settings that determine its content."""
    views = np.zeros((1, 0), dtype=np.uint8) if views is None else views
    arrays = {f"{split}_{name}": array for split in SPLITS for name, array in splits[split].items()}
    arrays["views"] = views
    facts: dict[str, Any] = {
        "format": PUZZLE_FORMAT,
        "kind": kind,
        "vocabulary": vocabulary,
        "length": splits["train"]["inputs"].shape[1],
        "puzzle_ids": len(views),
        "build": dict(build),
        "splits": {name: _sizes(splits[name]["groups"]) for name in SPLITS},
        "names": {name: list(names[name]) if names else [] for name in SPLITS},
        "arrays": {
            name: {"dtype": array.dtype.str, "shape": list(array.shape), "sha256": digest(array)}
            for name, array in sorted(arrays.items())
        },
    }
    facts["hash"] = content_hash(facts)
    _check_arrays(facts, arrays)
    _write_folder(folder, arrays, facts)
    return PuzzleSet.open(folder)


def _write_folder(folder: Path, arrays: Mapping[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write the files under another name, then rename; another process may have written the same set."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    whole = folder.resolve()
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        for name, array in arrays.items():
            with atomic_file(partial / f"{name}.npy") as file:
                np.save(file, array, allow_pickle=False)
        with atomic_file(partial / "puzzles.json") as file:
            file.write(json.dumps(facts, indent=1).encode())
        os.replace(partial, whole)
    except OSError:
        if not (whole / "puzzles.json").is_file() or PuzzleSet.open(whole).hash != facts["hash"]:
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def group_table(groups: int) -> np.ndarray:
    """The group table of independent puzzles: one pair and one puzzle each, with the blank id."""
    return np.repeat(np.array([[1, 1, 0]], dtype="<i8"), groups, axis=0)


def _sizes(groups: np.ndarray) -> dict[str, int]:
    pairs, puzzles, _ = groups.T
    counts = {"pairs": pairs.sum(), "puzzles": puzzles.sum(), "examples": (pairs * puzzles).sum()}
    return {"groups": len(groups), **{name: int(count) for name, count in counts.items()}}


def content_hash(facts: dict[str, Any]) -> str:
    """Hash of puzzles.json without the hash itself; it includes the checksums of the arrays."""
    content = {name: value for name, value in facts.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _of(arrays: Mapping[str, np.ndarray], split: str) -> dict[str, np.ndarray]:
    """The arrays of one split."""
    names = {name: f"{split}_{name}" for name in (*REQUIRED, *OPTIONAL)}
    return {name: arrays[own] for name, own in names.items() if own in arrays}


def _check_whole(folder: Path) -> None:
    if not (folder / "puzzles.json").is_file():
        advice = f"`deeploop prepare {' | '.join(KINDS)} --out ANOTHER` makes one"
        refuse_other(folder, "puzzles.json", advice)
        if folder.is_file():
            raise ValueError(
                f"{folder}: is a file; make a set of it with `deeploop prepare pairs {folder} --out FOLDER`"
            )
        what = "not a whole set of puzzles (no puzzles.json)" if folder.is_dir() else "no such set of puzzles"
        raise ValueError(
            f"{folder}: {what}; make it with `deeploop prepare {' | '.join(KINDS)} --out {folder}`"
        )


def _read_facts(folder: Path) -> dict[str, Any]:
    facts = read_description(folder / "puzzles.json", "puzzles", PUZZLE_FORMAT, FIELDS)
    for name, entry in facts["arrays"].items():
        check_fields(entry, {"dtype": str, "shape": [int], "sha256": str}, f"puzzles.arrays.{name}")
        if name != "views" and name not in {f"{s}_{n}" for s in SPLITS for n in (*REQUIRED, *OPTIONAL)}:
            raise ValueError(f"puzzles.arrays: unknown array {name!r:.40}")
    return facts


def _read_array(folder: Path, name: str, entry: dict[str, Any]) -> np.ndarray:
    return read_array(folder / f"{name}.npy", "puzzles.json", entry["shape"], (entry["dtype"],))


def _check_arrays(facts: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless the arrays are consistent and all puzzle ids are valid."""
    if facts["kind"] not in KINDS:
        raise ValueError(f"kind {facts['kind']!r}: must be one of {', '.join(KINDS)}")
    wanted = (facts["puzzle_ids"], KINDS[facts["kind"]].view_parameters)
    if "views" not in arrays or arrays["views"].shape != wanted:
        raise ValueError(f"views: must be there with shape {wanted}")
    for name, values in arrays.items():
        if values.dtype.str != (kind := TYPES[name.removeprefix("train_").removeprefix("test_")]):
            raise ValueError(f"{name}: is of {values.dtype.str}, must be of {kind}")
    for name in SPLITS:
        _check_split(name, _of(arrays, name), facts)


def _check_split(name: str, split: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    if missing := set(REQUIRED) - set(split):
        raise ValueError(f"{name}: no {', '.join(sorted(missing))}")
    groups, sizes = split["groups"], facts["splits"][name]
    if groups.ndim != 2 or groups.shape[1] != 3 or not len(groups) or groups.min() < 0:
        raise ValueError(f"{name}_groups: must be a table of pairs, puzzles and first ids, and not empty")
    if groups.max() > facts["puzzle_ids"] + sizes["pairs"]:  # larger ones could overflow in sums
        raise ValueError(f"{name}_groups: numbers beyond the {facts['puzzle_ids']} puzzle ids")
    if _sizes(groups) != sizes or groups[:, :2].min() < 1:
        raise ValueError(f"{name}_groups: does not add up to the sizes {sizes}")
    board, each = (sizes["pairs"], facts["length"]), (sizes["groups"],)
    shapes: dict[str, tuple[int, ...]] = {
        "inputs": board, "labels": board, "groups": groups.shape,
        "shifts": (sizes["examples"], 2), "ratings": each, "sources": each,
    }  # fmt: skip
    for array in split:
        if split[array].shape != shapes[array]:
            raise ValueError(f"{name}_{array}: shape {split[array].shape}, must be {shapes[array]}")
    if (last := int((groups[:, 1] + groups[:, 2]).max()) - 1) >= facts["puzzle_ids"]:
        raise ValueError(f"{name}_groups: puzzle id {last}: must be below {facts['puzzle_ids']}")
    if facts["names"][name] and len(facts["names"][name]) != len(groups):
        raise ValueError(f"names.{name}: {len(facts['names'][name])} names of {len(groups)} groups")
    _check_sources(name, split.get("sources"), facts["build"].get("sources", []))


def _check_sources(split: str, sources: np.ndarray | None, names: Any) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("build.sources: must be a list of names")
    if sources is not None and not (sources.min() >= 0 and sources.max() < len(names)):
        raise ValueError(
            f"{split}_sources: must be from 0 to below {len(names)}, the number of build.sources"
        )
