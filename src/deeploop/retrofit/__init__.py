"""A pretrained model as a looped GPT: read it, choose its layers, write a run to go on from.

`deeploop.retrofit.loop_pretrained("MODEL", core="8-15", rounds=4)` is the model; `rank_cores` says which
layers bear a loop before training. `open_source`, `choose_layers`, `looped_config` and `build` are its steps.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_NAMES = {
    "build": "layers",
    "choose_layers": "layers",
    "loop_pretrained": "layers",
    "looped_config": "layers",
    "open_source": "source",
    "rank_cores": "suggest",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> _Any:
    # As in `deeploop.train`: `import deeploop.retrofit` alone does not wait for torch.
    if name not in _NAMES:
        raise AttributeError(f"module 'deeploop.retrofit' has no attribute {name!r}")
    return getattr(_import_module(f"deeploop.retrofit.{_NAMES[name]}"), name)
