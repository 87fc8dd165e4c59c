"""What can be trained: the kinds of runs by name. Configs and tasks are imported when they are asked for."""

from importlib import import_module
from typing import Any

# name in run.json: (config class, task class), each "module:Class".
KINDS = {
    "language": ("deeploop.train.config:TrainConfig", "deeploop.tasks.language.task:LanguageTask"),
    "chat": ("deeploop.train.config:ChatTrainConfig", "deeploop.tasks.chat.task:ChatTask"),
    "hrm": ("deeploop.train.config:HRMTrainConfig", "deeploop.tasks.puzzles.task:PuzzleTask"),
    "trm": ("deeploop.train.config:TRMTrainConfig", "deeploop.tasks.puzzles.task:PuzzleTask"),
    "iterate": ("deeploop.train.config:IterateTrainConfig", "deeploop.tasks.iterate.task:IterateTask"),
    "custom": ("deeploop.train.config:CustomTrainConfig", "deeploop.tasks.custom.task:CustomTask"),
}


def config_class(kind: str) -> type[Any]:
    """The config of a kind of run. Imports no torch."""
    return _load(KINDS[kind][0])


def task_class(kind: str) -> type[Any]:
    """The task of a kind of run."""
    return _load(KINDS[kind][1])


def _load(place: str) -> type[Any]:
    module, name = place.split(":")
    found: type[Any] = getattr(import_module(module), name)
    return found
