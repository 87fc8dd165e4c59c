"""The models."""

from deeploop.models.accounting import flops_per_token, parameter_count
from deeploop.models.gpt import Block, GPTConfig, GPTOutput, LoopedGPT

__all__ = ["Block", "GPTConfig", "GPTOutput", "LoopedGPT", "flops_per_token", "parameter_count"]
