"""The models."""

from deeploop.config.loop import HaltingConfig
from deeploop.models.accounting import flops_per_segment, flops_per_token, parameter_count
from deeploop.models.adaptive import AdaptiveDepth, ExitRule
from deeploop.models.gpt import Block, GPTOutput, LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.models.halting import Answers, Slots, solve, supervise
from deeploop.models.hrm import HRMConfig
from deeploop.models.reasoner import Carry, Reasoner, Segment
from deeploop.models.reasoner_config import PuzzleShape, ReasonerConfig
from deeploop.models.trm import TRMConfig

__all__ = [
    "AdaptiveDepth",
    "Answers",
    "Block",
    "Carry",
    "ExitRule",
    "GPTConfig",
    "GPTOutput",
    "HRMConfig",
    "HaltingConfig",
    "LoopedGPT",
    "PuzzleShape",
    "Reasoner",
    "ReasonerConfig",
    "Segment",
    "Slots",
    "TRMConfig",
    "flops_per_segment",
    "flops_per_token",
    "parameter_count",
    "solve",
    "supervise",
]
