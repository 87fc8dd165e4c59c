"""Context: what travels beside the stream x through the blocks; and steps, in which a forward pass is run."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from deeploop.nn.cache import Cache
from deeploop.nn.documents import Documents
from deeploop.nn.layers import Rotary

Mask = Tensor | Documents | None


class Context(NamedTuple):
    """Where the tokens stand and what they see, in the order in which attention takes it."""

    rotary: Rotary
    mask: Mask = None
    cache: Cache | None = None
    slot: int = 0
    """The visit's slot of the cache; 0 without one, as compiled blocks must not see a number that changes."""


Step = tuple[Callable[[Tensor, Any], Tensor], Any]
"""A layer, and what it takes beside x: a block and its context."""


def run_steps(x: Tensor, steps: Iterable[Step]) -> Tensor:
    """x after all steps, one after the other."""
    for layer, beside in steps:
        x = layer(x, beside)
    return x
