"""What can be trained: the kinds of runs by name. Configs and tasks are imported when they are asked for."""

from importlib import import_module
from typing import Any

# name in run.json: (config class, task class), each "module:Class".
KINDS = {
    "language": ("deeploop.train.config:TrainConfig", "deeploop.train.language:LanguageTask"),
    "chat": ("deeploop.train.config:ChatTrainConfig", "deeploop.train.chat:ChatTask"),
    "hrm": ("deeploop.train.config:HRMTrainConfig", "deeploop.train.puzzle:PuzzleTask"),
    "trm": ("deeploop.train.config:TRMTrainConfig", "deeploop.train.puzzle:PuzzleTask"),
    "iterate": ("deeploop.train.config:IterateTrainConfig", "deeploop.train.iterate:IterateTask"),
    "custom": ("deeploop.train.config:CustomTrainConfig", "deeploop.train.custom:CustomTask"),
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
