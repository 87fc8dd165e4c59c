"""Turn a pretrained model into a looped GPT: read it, choose its layers, write a run to train further.

`deeploop.retrofit.loop_pretrained("MODEL", core="8-15", rounds=4)` returns the model; `rank_cores` ranks the
layers that tolerate a loop before training. `open_source`, `choose_layers`, `looped_config` and `build` are
the single steps.
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
    # As in `deeploop.train`: `import deeploop.retrofit` alone does not import torch.
    if name not in _NAMES:
        raise AttributeError(f"module 'deeploop.retrofit' has no attribute {name!r}")
    return getattr(_import_module(f"deeploop.retrofit.{_NAMES[name]}"), name)
