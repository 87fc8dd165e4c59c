# From deeploop, Apache-2.0: deeploop/nn/recompute.py, with its imports made flat.
"""Recompute: activations that are thrown away after the forward pass and computed again in the backward pass.

By round, the activations of one round and R states of the stream are held at a time; by block, those of one
block visit and K·R states. Either way a step computes almost every block forward twice: 4/3 of the FLOPs.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Recompute = Literal["off", "round", "block"]
T = TypeVar("T")


def maybe_checkpoint(function: Callable[..., T], *args: Any, recompute: bool) -> T:
    """function(*args); if `recompute`, only the arguments are kept, and the backward pass repeats it.

    Nothing in a block is drawn at random, so no generator has to be put back for that.
    """
    if not (recompute and torch.is_grad_enabled()):
        return function(*args)
    out: T = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return out
