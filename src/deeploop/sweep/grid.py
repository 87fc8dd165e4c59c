"""Grids: axes over a recipe, each cell a full config; also read from a file.

A setting is a field's path and its value, as on the command line of `deeploop train` but with underscores:
{"optim.peak_lr": 6e-4}. The pseudo-field `recipe` chooses the recipe. An axis maps each of its labels to
settings. Later settings win: recipe, the grid's own, its axes in order, the command line's.
"""

import difflib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deeploop.config import old_names
from deeploop.config.json import from_dict, leaf_hints, to_dict
from deeploop.config.short_names import SHORT
from deeploop.files import read_table
from deeploop.paper import grids
from deeploop.paper.grids import Scale
from deeploop.tasks.puzzles.recipes import published_steps
from deeploop.tasks.recipes import get_recipe

Settings = Mapping[str, Any]
Axis = Mapping[Any, Settings]
NOT_SETTABLE = ("out", "resume")  # set by the sweep itself
MOST_CELLS = 10_000  # each one's config is made before the first is run, which takes about a millisecond
LABEL = re.compile(r"[\w.+-]+")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    recipe: str
    settings: Settings
    axes: Mapping[str, Any]

    def config(self) -> Any:
        """The full config, but for the run folder."""
        return configure(self.recipe, self.settings)


@dataclass(frozen=True)
class Grid:
    """A named sweep at one scale."""

    name: str
    recipe: str
    axes: Mapping[str, Axis]
    settings: Settings = field(default_factory=dict)
    scale: str = "own"
    omit: tuple[Mapping[str, Any], ...] = ()
    """Corners of the grid that are left out, by their labels."""
    evaluate: bool = False
    """Cells are also scored with `deeploop eval`."""
    compare_at: int | None = None
    """The step at which losses are compared; None is the last one."""
    shares_folder_of: str | None = None
    """Another sweep with the same cells, so that none is trained twice."""

    @property
    def family(self) -> str:
        """Name of its folder and record; sweeps that share cells have the same one."""
        return self.shares_folder_of or self.name

    def cells(self, overrides: Settings | None = None) -> list[Cell]:
        """Return every cell, in the order of its axes; building each config checks its settings."""
        if (count := math.prod(map(len, self.axes.values()))) > MOST_CELLS:
            raise ValueError(f"axes: {count:,} cells; must be at most {MOST_CELLS:,}, so split the sweep")
        cells = [self._cell(labels, overrides or {}) for labels in self._corners()]
        (name, times), *_ = Counter(cell.name for cell in cells).most_common(1) or [("", 0)]
        if times > 1:
            raise ValueError(f"axes: two cells would be named {name}; change a label")
        for cell in cells:
            cell.config()
        return cells

    def _corners(self) -> Iterator[dict[str, Any]]:
        for labels in itertools.product(*self.axes.values()):
            corner = dict(zip(self.axes, labels, strict=True))
            if not any(omitted.items() <= corner.items() for omitted in self.omit):
                yield corner

    def _cell(self, labels: dict[str, Any], overrides: Settings) -> Cell:
        settings: dict[str, Any] = {"recipe": self.recipe, **self.settings}
        for axis, label in labels.items():
            settings.update(self.axes[axis][label])
        settings.update(overrides)
        recipe = settings.pop("recipe")
        name = "-".join(itertools.starmap(_label, labels.items()))
        return Cell(name, recipe, old_names.settings(settings, recipe), labels)


def along(path: str, values: Iterable[Any]) -> dict[str, Axis]:
    """Make an axis over one field's values, named after the field: along("model.p", …) is {"p": …}."""
    return {path.rpartition(".")[2]: {value: {path: value} for value in values}}


def configure(recipe: str, settings: Settings) -> Any:
    """Return the recipe's config with these fields changed."""
    base = get_recipe(recipe)
    known = leaf_hints(type(base))
    values = to_dict(base)
    for path, value in settings.items():
        if path in old_names.REMOVED_PATHS:
            raise ValueError(f"{path}: was removed; {old_names.INSTEAD}")
        if path in NOT_SETTABLE or path not in known:
            names = {*known, *(name for name in SHORT if SHORT[name] in known)} - set(NOT_SETTABLE)
            near = difflib.get_close_matches(path, names, 1)
            hint = f"; perhaps you meant {near[0]}" if near else ""
            raise ValueError(f"{path}: not a field that a sweep of {recipe} can set{hint}")
        *parents, leaf = path.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        place[leaf] = str(value) if isinstance(value, Path) else value
    try:
        config = from_dict(type(base), values)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("config.")) from None
    return config if "optim.steps" in settings else published_steps(config)


def _label(axis: str, label: Any) -> str:
    """Format a part of a cell's name: `p0.5`, `deeploop`."""
    text = label if isinstance(label, str) else f"{axis}{label}"
    text = text.translate({ord("/"): "_", ord(":"): "-", ord(","): "-", ord("="): ""})
    if not LABEL.fullmatch(text) or text.startswith("."):
        raise ValueError(f"axes.{axis}={label!r}: names a folder, so letters, digits, . + - and _ are valid")
    return text


def named_grid(name: str, scale: Scale) -> Grid:
    """Return a sweep that `deeploop sweep` lists."""
    data = grids.paper_grid(name, scale)
    omit, folder = tuple(data.pop("omit", ())), data.pop("shares_folder_of", None)
    return replace(_grid(name, data), scale=scale, omit=omit, shares_folder_of=folder)


# ── A grid from a file ──────────────────────────────────────────────────────────────────────────────────
def read_grid(path: Path) -> Grid:
    """Read the grid in a TOML or JSON file: recipe, settings, axes, evaluate, compare_at."""
    data = read_table(path)
    try:
        return _grid(path.stem, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _grid(name: str, data: Any) -> Grid:
    kinds = {"recipe": str, "settings": dict, "axes": dict, "evaluate": bool, "compare_at": int}
    if not isinstance(data, dict):
        raise ValueError("must be an object with recipe, settings and axes")
    for key, value in data.items():
        if key not in kinds:
            raise ValueError(f"{key}: unknown; choose from {', '.join(kinds)}")
        if type(value) is not kinds[key]:
            raise ValueError(f"{key}={value!r}: must be a {kinds[key].__name__}")
    for key in ("recipe", "axes"):
        if not data.get(key):
            raise ValueError(f"{key}: missing")
    axes: dict[str, Axis] = {}
    for key, values in _flat(data["axes"], lists_end=True).items():
        for axis, labels in _axis(key, values).items():
            if axis in axes:
                raise ValueError(f"axes.{key}: there is an axis {axis} already")
            axes[axis] = labels
    _check_disjoint(axes)
    return Grid(
        name,
        data["recipe"],
        axes,
        _flat(data.get("settings", {})),
        evaluate=data.get("evaluate", False),
        compare_at=data.get("compare_at"),
    )


def _axis(key: str, values: Any) -> dict[str, Axis]:
    """`"model.p" = [0.25, 0.5]`, or a name with a table of settings a label."""
    if isinstance(values, list) and values and not any(isinstance(v, list | dict) for v in values):
        if len(set(values)) < len(values):
            raise ValueError(f"axes.{key}={values}: holds a value twice")
        return along(key, values)
    if isinstance(values, dict) and values and all(isinstance(s, dict) for s in values.values()):
        return {key: {label: _flat(settings) for label, settings in values.items()}}
    raise ValueError(
        f"axes.{key}={values!r}: must be a list of values, or a table of settings for each label"
    )


def _check_disjoint(axes: Mapping[str, Axis]) -> None:
    fields = {
        axis: {path for settings in labels.values() for path in settings} for axis, labels in axes.items()
    }
    for one, other in itertools.combinations(fields, 2):
        if shared := fields[one] & fields[other]:
            raise ValueError(f"axes.{other}: sets {min(shared)}, as the axis {one} does")


def _flat(table: Mapping[str, Any], prefix: str = "", lists_end: bool = False) -> dict[str, Any]:
    """Nested tables as dotted paths: {"optim": {"steps": 9}} → {"optim.steps": 9}.

    Among axes a table is a path only if lists are at its ends; else it holds a label's settings. A short name
    (`rounds`) is its field's path.
    """
    paths: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, dict) and (not lists_end or _ends_in_lists(value))
        name = prefix + key if isinstance(value, dict) else SHORT.get(prefix + key, prefix + key)
        paths |= _flat(value, f"{prefix}{key}.", lists_end) if nested else {name: value}
    return paths


def _ends_in_lists(value: Any) -> bool:
    inner = isinstance(value, dict) and value and all(map(_ends_in_lists, value.values()))
    return isinstance(value, list) or bool(inner)
