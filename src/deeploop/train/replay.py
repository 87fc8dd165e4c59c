"""Forward and backward pass of a micro-batch as one CUDA graph: some thousand launches become one.

At R rounds a step has a few dozen launches a visit, which at small widths take the host longer than the
device. A graph has fixed sizes and memory: one is recorded for every shape and number of rounds that comes,
the second time it does; the first time compiles the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass
class Recorded:
    """A graph, the memory that it reads its batch from, and where it leaves the loss."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss: Tensor

    def run(self, batch: Batch) -> Tensor:
        for place, tensor in zip(self.batch, batch, strict=True):
            place.copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.loss


class GraphReplay:
    """`gradients(batch)`, which adds to the parameters' gradients and returns the loss, by recorded graphs.

    Without memory for a graph of its own a batch goes on being called, and `say` tells so.
    """

    def __init__(
        self, gradients: Callable[[Batch], Tensor], model: nn.Module, say: Callable[[str], object]
    ) -> None:
        self._gradients, self._model, self._say = gradients, model, say
        self._recorded: dict[Any, Recorded | None] = {}  # None: called once
        self._sums: list[Tensor] = []
        self._too_large = False

    def begin_step(self) -> None:
        """Gradients at zero, in the memory that recorded graphs add to."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._sums = self._sums or [torch.zeros_like(p) for p in parameters]
        torch._foreach_zero_(self._sums)
        for parameter, total in zip(parameters, self._sums, strict=True):
            parameter.grad = total

    def __call__(self, batch: Batch) -> Tensor:
        key = (*(tensor.shape for tensor in batch), getattr(self._model, "rounds", None))
        if key in self._recorded and self._recorded[key] is None and not self._too_large:
            self._recorded[key] = self._record(batch)
        recorded = self._recorded.setdefault(key, None)
        return self._gradients(batch) if recorded is None else recorded.run(batch)

    def _record(self, batch: Batch) -> Recorded | None:
        static = tuple(tensor.to(self._sums[0].device, copy=True) for tensor in batch)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on meanwhile: the loader's pins memory.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = self._gradients(static)
        except torch.OutOfMemoryError:
            self._too_large = True
            self._say("no memory for a CUDA graph: kernels are launched one by one")
            return None
        except RuntimeError as error:  # torch leaves its allocator in a state that nothing can go on from
            cause = str(error.__context__ or error).partition("\n")[0]
            if "out of memory" in cause:
                raise torch.OutOfMemoryError(cause) from error
            raise ValueError(
                f"device.graph=True: can't be recorded ({cause}); start again with --device.no-graph"
            ) from error
        return Recorded(graph, static, loss)
