"""The models, imported on first access: a config needs no torch."""

from importlib import import_module as _import_module
from typing import Any as _Any

_NAMES = {
    "AdaptiveDepth": "deeploop.models.adaptive",
    "Answers": "deeploop.models.halting",
    "Block": "deeploop.models.gpt",
    "Carry": "deeploop.models.reasoner",
    "ExitRule": "deeploop.models.adaptive",
    "GPTConfig": "deeploop.models.gpt_config",
    "GPTOutput": "deeploop.models.gpt",
    "HRMConfig": "deeploop.models.reasoner_config",
    "HaltingConfig": "deeploop.config.loop",
    "LoopedGPT": "deeploop.models.gpt",
    "PuzzleShape": "deeploop.models.reasoner_config",
    "Reasoner": "deeploop.models.reasoner",
    "ReasonerConfig": "deeploop.models.reasoner_config",
    "Segment": "deeploop.models.reasoner",
    "Slots": "deeploop.models.halting",
    "TRMConfig": "deeploop.models.reasoner_config",
    "flops_per_segment": "deeploop.models.accounting",
    "flops_per_token": "deeploop.models.accounting",
    "parameter_count": "deeploop.models.accounting",
    "solve": "deeploop.models.halting",
    "supervise": "deeploop.models.halting",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> _Any:
    # Configs can be used without torch, which most of these need.
    if name not in _NAMES:
        raise AttributeError(f"module 'deeploop.models' has no attribute {name!r}")
    return getattr(_import_module(_NAMES[name]), name)
