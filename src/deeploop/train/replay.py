"""Capture the forward and backward pass of a micro-batch in a CUDA graph: thousands of launches become one.

At R rounds a step has a few dozen launches per visit; for small widths launching takes longer than computing.
A graph has fixed shapes and memory, so one is captured for every shape and number of rounds, at its second
use: the first one compiles the kernels. At most `MOST_GRAPHS` are kept, in one memory pool, as only one runs
at a time. Other results of a micro-batch that a task needs are returned with the loss (`Task.leave`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
MOST_GRAPHS = 16
"""Graphs kept at a time: rounds drawn around a mean of 4 take 16 values, and rare ones cost little."""


@dataclass
class Recorded:
    """A graph, and the memory of its batch, of the loss and of the task's other results."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    left: Batch

    def run(self, batch: Batch) -> Batch:
        for place, tensor in zip(self.batch, batch, strict=True):
            place.copy_(tensor, non_blocking=True)
        self.graph.replay()
        return tuple(tensor.clone() for tensor in self.left)  # as the next replay overwrites it


class GraphReplay:
    """Call `gradients(batch)`, which accumulates gradients and returns loss and more, by CUDA graphs.

    The gradients must stay at their addresses between steps (`GradientMemory`). A batch without memory for a
    graph is called directly, and `say` reports it once. When `MOST_GRAPHS` are kept, a shape that comes twice
    as often as the least used graph replaces it; the others are called directly.
    """

    def __init__(
        self, gradients: Callable[[Batch], Batch], model: nn.Module, say: Callable[[str], object]
    ) -> None:
        self._gradients, self._model, self._say = gradients, model, say
        self._recorded: dict[Any, Recorded] = {}
        self._uses: Counter[Any] = Counter()
        self._pool: Any = None
        self._too_large = False

    def __call__(self, batch: Batch) -> Batch:
        kinds = ((tensor.shape, tensor.dtype) for tensor in batch)
        key = (*kinds, getattr(self._model, "rounds", None))
        self._uses[key] += 1
        if key not in self._recorded and self._uses[key] > 1 and self._has_place_for(key):
            recorded = self._record(batch)
            if recorded is not None:
                self._recorded[key] = recorded
        return self._recorded[key].run(batch) if key in self._recorded else self._gradients(batch)

    def _has_place_for(self, key: Any) -> bool:
        """Return True if one more graph may be recorded; drop the least used one if necessary."""
        if self._too_large or len(self._recorded) < MOST_GRAPHS:
            return not self._too_large
        least = min(self._recorded, key=self._uses.__getitem__)
        if self._uses[key] < 2 * self._uses[least]:
            return False
        del self._recorded[least]
        return True

    def _record(self, batch: Batch) -> Recorded | None:
        device = next(self._model.parameters()).device
        static = tuple(tensor.to(device, copy=True) for tensor in batch)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads continue during capture: the loader's pins memory.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                left = self._gradients(static)
        except torch.OutOfMemoryError:
            self._too_large = True
            self._say("no memory for a CUDA graph: kernels are launched one by one")
            return None
        except RuntimeError as error:  # torch's allocator is unusable after a failed capture
            cause = str(error.__context__ or error).partition("\n")[0]
            if "out of memory" in cause:
                raise torch.OutOfMemoryError(cause) from error
            raise ValueError(
                f"device.graph=True: can't be recorded ({cause}); start again with --device.no-graph"
            ) from error
        self._pool = self._pool or graph.pool()
        return Recorded(graph, static, left)
