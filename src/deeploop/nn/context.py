"""Context: the arguments that accompany the stream x through the blocks."""

from typing import NamedTuple

from torch import Tensor

from deeploop.nn.cache import Cache
from deeploop.nn.documents import Documents
from deeploop.nn.layers import Rotary

Mask = Tensor | Documents | None


class Context(NamedTuple):
    """Positions, mask and cache of the tokens, in the order of attention's arguments."""

    rotary: Rotary
    mask: Mask = None
    cache: Cache | None = None
    slot: int = 0
    """The visit's slot of the cache; 0 without one: compiled blocks must not see a number that changes."""
