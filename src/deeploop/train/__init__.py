"""Training: one loop for every task, and what it needs around it.

`config` composes the component configs, `loop` runs them; `language` is the task of predicting the
next token, `puzzle` that of solving puzzles, `iterate` that of applying a step many times. Nothing in `nn`
or `models` imports this package.

`deeploop.train.train(config)` trains; `deeploop.recipes.get_recipe("tiny")` is a config to start from.
`train(CustomTrainConfig(…), task=YourTask)` trains on a task of your own, a subclass of `CustomTask`.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_NAMES = {
    "CustomDataConfig": "custom",
    "CustomTask": "custom",
    "CustomTrainConfig": "config",
    "DeviceConfig": "distributed",
    "IterateTrainConfig": "config",
    "OptimConfig": "optim",
    "TrainConfig": "config",
    "load_last": "rundir",
    "train": "loop",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> _Any:
    # Some modules here are read without torch, which `loop` needs.
    if name not in _NAMES:
        raise AttributeError(f"module 'deeploop.train' has no attribute {name!r}")
    return getattr(_import_module(f"deeploop.train.{_NAMES[name]}"), name)
