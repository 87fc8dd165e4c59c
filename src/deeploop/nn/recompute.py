"""Activation recomputation (checkpointing) by round or by block.

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
    """Wrap a function so that only its arguments are kept, and the backward pass repeats it.

    A block draws nothing at random, so no generator state is restored.
    """
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def maybe_checkpoint(function: Callable[..., T], *args: Any, recompute: bool) -> T:
    """Call function(*args), `recomputed` if asked for and if there is a backward pass."""
    return (recomputed(function) if recompute and torch.is_grad_enabled() else function)(*args)
