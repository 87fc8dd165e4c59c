"""The block's building pieces, usable in any PyTorch model."""

from deeploop.nn.cache import Cache, KeyValueCache, causal_mask
from deeploop.nn.init import init_residual_branch_, init_truncated_
from deeploop.nn.layers import (
    CausalSelfAttention,
    RMSNorm,
    SelfAttention,
    SwiGLU,
    apply_rotary,
    rotary_table,
)
from deeploop.nn.loss import linear_cross_entropy, stablemax_cross_entropy
from deeploop.nn.residual import ScaledResidual

__all__ = [
    "Cache",
    "CausalSelfAttention",
    "KeyValueCache",
    "RMSNorm",
    "ScaledResidual",
    "SelfAttention",
    "SwiGLU",
    "apply_rotary",
    "causal_mask",
    "init_residual_branch_",
    "init_truncated_",
    "linear_cross_entropy",
    "rotary_table",
    "stablemax_cross_entropy",
]
