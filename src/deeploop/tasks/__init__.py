"""Registry of tasks by name. Config and task classes are imported on demand."""

from importlib import import_module
from pathlib import Path
from typing import Any

from deeploop.config import old_names
from deeploop.config.json import flatten, from_dict, leaf_hints
from deeploop.config.run import RunConfig
from deeploop.files import read_json, read_table

# name in run.json: (config class, task class), each "module:Class".
KINDS = {
    "language": ("deeploop.tasks.language.config:TrainConfig", "deeploop.tasks.language.task:LanguageTask"),
    "chat": ("deeploop.tasks.chat.config:ChatTrainConfig", "deeploop.tasks.chat.task:ChatTask"),
    "hrm": ("deeploop.tasks.puzzles.config:HRMTrainConfig", "deeploop.tasks.puzzles.task:PuzzleTask"),
    "trm": ("deeploop.tasks.puzzles.config:TRMTrainConfig", "deeploop.tasks.puzzles.task:PuzzleTask"),
    "iterate": (
        "deeploop.tasks.iterate.config:IterateTrainConfig",
        "deeploop.tasks.iterate.task:IterateTask",
    ),
    "custom": ("deeploop.tasks.custom.config:CustomTrainConfig", "deeploop.tasks.custom.task:CustomTask"),
}


def config_class(kind: str) -> type[RunConfig]:
    """The config class of a kind of run. Imports no torch."""
    return _load(KINDS[kind][0])


def task_class(kind: str) -> type[Any]:
    """The task class of a kind of run."""
    return _load(KINDS[kind][1])


def read_config(path: Path) -> RunConfig:
    """Read a config from a file: a run's config.json, or TOML with the same nesting.

    The kind comes from the run.json beside a run's config.json, otherwise from the fields: the first of
    `KINDS` that has them all. `resume` is ignored.
    """
    data = read_table(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must be an object with the fields of a config")
    old_names.require_supported(data, f"{path}: ")
    stamp = read_json(path.with_name("run.json")) if path.name == "config.json" else {}
    task = str(stamp.get("task"))
    kind = config_class(task) if task in KINDS else _kind_with(set(flatten(data)))
    try:
        config: RunConfig = from_dict(kind, {**data, "resume": False})
        return config
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('config.')}") from None


def _kind_with(given: set[str]) -> type[RunConfig]:
    """The config class that has all of the given fields, or most of them."""
    return min(
        map(config_class, KINDS), key=lambda kind: len(given - old_names.readable(leaf_hints(kind).keys()))
    )


def _load(place: str) -> type[Any]:
    module, name = place.split(":")
    kind: type[Any] = getattr(import_module(module), name)
    return kind
