"""Training: one loop for every task, and the parts around it.

`opening` makes a run, `loop` takes it to its last step, `task` is the interface of a kind of run; the kinds
are in `deeploop.tasks`. Nothing in `nn` or `models` imports this package.

`deeploop.train.train(config)` trains; `deeploop.tasks.recipes.get_recipe("tiny")` is a config to start from.
`train(CustomTrainConfig(…), task=YourTask)` trains on a task of your own, a subclass of `CustomTask`.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_NAMES = {
    "CustomDataConfig": "deeploop.tasks.custom.config",
    "CustomTask": "deeploop.tasks.custom.task",
    "CustomTrainConfig": "deeploop.tasks.custom.config",
    "DeviceConfig": "deeploop.config.run",
    "IterateTrainConfig": "deeploop.tasks.iterate.config",
    "OptimConfig": "deeploop.config.optim",
    "TrainConfig": "deeploop.tasks.language.config",
    "load_last": "deeploop.train.rundir",
    "train": "deeploop.train.loop",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> _Any:
    # Some modules here are read without torch, which `loop` needs.
    if name not in _NAMES:
        raise AttributeError(f"module 'deeploop.train' has no attribute {name!r}")
    return getattr(_import_module(_NAMES[name]), name)
