"""The key-value cache of a looped model: one slot per visit, or fewer that rounds share.

A block that is visited R times makes R different sets of keys and values, so K blocks × R rounds need
K·R slots; visit number round·K + block has the slot of that number. Under a budget B of rounds it is slot
(round mod B)·K + block, in which a later round overwrites an earlier one (`LoopedGPT.set_cache_rounds`).
Blocks before and after the loop have a slot each, in front of these and behind them.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor


class UpdatedCache(Protocol):
    """Interface of a cache that attention needs (transformers' `Cache` has it as well)."""

    def update(self, k: Tensor, v: Tensor, slot: int, /) -> tuple[Tensor, Tensor]:
        """Add the new positions' keys and values; return those of all positions to attend to."""
        ...


class EngineAttention(ABC):
    """Attention computed by a serving engine, which keeps keys, values and mask; passed as a cache."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, slot: int) -> Tensor:
        """Return the heads' outputs (B, H, T, D) for q (B, H, T, D), k and v with H heads or fewer."""


Cache = UpdatedCache | EngineAttention


class KeyValueCache:
    """Keys and values of up to `capacity` positions, in memory allocated once.

    All visits of a forward pass write after the same `length`, which the model advances at the end. For
    inference only: in-place writes can't be differentiated.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        for name, value in (("slots", slots), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.slots, self.capacity, self.length = slots, capacity, 0
        self._memory: list[tuple[Tensor, Tensor] | None] = [None] * slots

    def update(self, k: Tensor, v: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Write k and v (B, H, T, D) after the first `length` positions; return all of them."""
        end = self.length + k.shape[2]
        keys, values = self._slot(slot, k)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def check(self, *, slots: int, length: int) -> None:
        """Raise ValueError unless the cache has `slots` slots and room for `length` positions."""
        if self.slots != slots:
            raise ValueError(f"cache of {self.slots} slots: the model needs {slots} now; use a new cache")
        if self.capacity < length:
            raise ValueError(f"cache of capacity {self.capacity}: is too small for {length} positions")

    def newest(self, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a slot at the `count` positions after the first `length`."""
        keys, values = self.memory(slot)
        new = slice(self.length, self.length + count)
        return keys[:, :, new], values[:, :, new]

    def memory(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a slot, (B, H, capacity, D)."""
        memory = self._memory[slot]
        assert memory is not None, f"slot {slot} was never written"
        return memory

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far, at full capacity."""
        return sum(tensor.nbytes for memory in self._memory if memory is not None for tensor in memory)

    def _slot(self, slot: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # Batch, dtype and device are taken from the first keys: under autocast they are not known earlier.
        memory = self._memory[slot]
        if memory is None:
            shape = (*like.shape[:2], self.capacity, like.shape[3])
            # Zeros, as masked positions are multiplied by 0, which gives NaN for uninitialized inf or NaN.
            memory = self._memory[slot] = (like.new_zeros(shape), like.new_zeros(shape))
        return memory


class PositionedCache:
    """A filled cache whose sequences each continue at their own position, one token at a time.

    `positions` (B,) are on the device, and every tensor of a step has a fixed address and size, so a step can
    be recorded as a CUDA graph. A mask must hide what is beyond a sequence's position.
    """

    def __init__(self, cache: KeyValueCache, positions: Tensor) -> None:
        self.cache, self.positions = cache, positions
        self._rows = torch.arange(len(positions), device=positions.device)

    def update(self, k: Tensor, v: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Write k and v (B, H, 1, D) at each sequence's position; return the slot up to `reach`."""
        keys, values = self.cache.memory(slot)
        keys[self._rows, :, self.positions] = k[:, :, 0]
        values[self._rows, :, self.positions] = v[:, :, 0]
        return keys[:, :, : self.reach], values[:, :, : self.reach]

    @property
    def reach(self) -> int:
        """Positions that attention reads: those used on a CPU; all on a GPU, as a graph needs one size."""
        return self.cache.capacity if self.positions.is_cuda else int(self.positions.max()) + 1

    def mask(self) -> Tensor:
        """Mask (B, 1, 1, reach) of the positions up to each sequence's own."""
        every = torch.arange(self.reach, device=self.positions.device)
        return (every <= self.positions[:, None])[:, None, None]


def causal_mask(start: int, count: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Mask (count, start + count): the positions that each of the last `count` may attend to.

    None if no mask is needed: a single position sees everything, and without a start attention is causal.
    """
    if start == 0 or count == 1:
        return None
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril(start)
