"""The models."""

from deeploop.models.accounting import flops_per_token, parameter_count
from deeploop.models.adaptive import AdaptiveDepth, ExitRule
from deeploop.models.gpt import Block, GPTConfig, GPTOutput, LoopedGPT

__all__ = [
    "AdaptiveDepth",
    "Block",
    "ExitRule",
    "GPTConfig",
    "GPTOutput",
    "LoopedGPT",
    "flops_per_token",
    "parameter_count",
]
