"""One buffer for all gradients of a model, which micro-batches add to and ranks all-reduce.

A CUDA graph needs gradients that stay where they are. Ranks that hold the whole model need one all-reduce per
step: a looped block's gradient is whole only after the backward pass of its first visit, which comes last,
so there is next to nothing to exchange earlier.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from deeploop.train.distributed import World

ALIGNED = 8  # numbers: every gradient begins where a kernel can read 16 bytes at once, of bf16 too


class GradientMemory:
    """The gradients of all parameters that are trained, as views of one tensor for each dtype."""

    def __init__(self, model: nn.Module) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = [*self._named.values()]
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """Zero all gradients and attach them to the parameters."""
        if not self._views:
            self._allocate()
        for flat in self._flat.values():
            flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def sum_over_ranks(self) -> None:
        """All-reduce the gradients (sum)."""
        for flat in self._flat.values():
            dist.all_reduce(flat)

    @contextmanager
    def all_used(self, world: World) -> Iterator[None]:
        """Raise for parameters that got no gradient inside, on any rank.

        Their gradient is zero here, so the optimizer would decay them; on one rank it skips them.
        """
        met: set[str] = set()
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: met.add(name))
            for name, parameter in self._named.items()
        ]
        yield
        for hook in hooks:
            hook.remove()
        unused = self._named.keys() - set().union(*world.gather(met))
        if unused:
            raise ValueError(
                f"{', '.join(sorted(unused))}: got no gradient in the first step; with several ranks every "
                "parameter must have one, so freeze these (requires_grad_(False)) or use them"
            )

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
