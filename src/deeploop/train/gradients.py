"""One piece of memory for all gradients of a model: micro-batches add to it, and ranks exchange it.

A CUDA graph needs gradients that stay where they are. Ranks that hold the whole model need one all-reduce a
step: a looped block's gradient is whole only after the backward pass of its first visit, which comes last,
so there is next to nothing to exchange earlier.
"""

import torch
import torch.distributed as dist
from torch import nn

ALIGNED = 8  # numbers: every gradient begins where a kernel can read 16 bytes at once, of bf16 too


class GradientMemory:
    """The gradients of all parameters that are trained, as views of one tensor for each dtype."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """Sets all gradients to zero, and lets the parameters have them."""
        if not self._views:
            self._allocate()
        for flat in self._flat.values():
            flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def sum_over_ranks(self) -> None:
        """Adds up the gradients of all ranks, on every one of them."""
        for flat in self._flat.values():
            dist.all_reduce(flat)

    def _allocate(self) -> None:
        places, ends = [], dict.fromkeys((p.dtype for p in self._parameters), 0)
        for parameter in self._parameters:
            places.append(ends[parameter.dtype])
            ends[parameter.dtype] += -(-parameter.numel() // ALIGNED) * ALIGNED
        device = self._parameters[0].device
        self._flat = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in ends.items()}
        self._views = [
            self._flat[p.dtype][start : start + p.numel()].view_as(p)
            for p, start in zip(self._parameters, places, strict=True)
        ]
