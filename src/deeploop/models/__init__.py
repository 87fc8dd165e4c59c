"""The models, imported when they are first touched: a config needs no torch."""

from importlib import import_module as _import_module
from typing import Any as _Any

_MODULES = {
    "accounting": ("flops_per_segment", "flops_per_token", "parameter_count"),
    "adaptive": ("AdaptiveDepth", "ExitRule"),
    "gpt": ("Block", "GPTOutput", "LoopedGPT"),
    "gpt_config": ("GPTConfig",),
    "halting": ("Answers", "HaltingConfig", "Slots", "solve", "supervise"),
    "hrm": ("HRMConfig",),
    "reasoner": ("Carry", "PuzzleShape", "Reasoner", "ReasonerConfig", "Segment"),
    "trm": ("TRMConfig",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deeploop.models' has no attribute {name!r}")
    return getattr(_import_module(f"deeploop.models.{_HOME[name]}"), name)
