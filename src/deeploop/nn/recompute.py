"""Recompute: activations that are thrown away after the forward pass and computed again in the backward pass.

By round, the activations of one round and R states of the stream are held at a time; by block, those of one
block visit and K·R states. Either way a step computes almost every block forward twice: 4/3 of the FLOPs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Recompute = Literal["off", "round", "block"]
T = TypeVar("T")


def recomputed(function: Callable[..., T]) -> Callable[..., T]:
    """The function; of a call only the arguments are kept, and the backward pass repeats it.

    Nothing in a block is drawn at random, so no generator has to be put back for that.
    """
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def maybe_checkpoint(function: Callable[..., T], *args: Any, recompute: bool) -> T:
    """function(*args), `recomputed` if so asked and there is a backward pass."""
    return (recomputed(function) if recompute and torch.is_grad_enabled() else function)(*args)
