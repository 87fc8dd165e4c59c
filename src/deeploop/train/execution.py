"""How steps are executed on this device: chosen once, printed in one line, and written to run.json.

Fastest first: Triton kernels in bf16 on a GPU, a micro-batch's passes as one CUDA graph, and the loss read
back one step behind. Each is left out where something stands against it, and the line says what.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from deeploop.nn import fused
from deeploop.train.distributed import DeviceConfig, World, physical_blocks, uses_bf16
from deeploop.train.optim import supports_conditional_step
from deeploop.train.replay import MOST_GRAPHS

Blocks = Literal["kernels", "compiled", "eager"]
NAMES = {"kernels": "Triton kernels", "compiled": "compiled blocks", "eager": "eager modules"}


@dataclass(frozen=True)
class Execution:
    """What runs the blocks, and how far the host is ahead of the device."""

    blocks: Blocks
    chained: bool
    """All rounds are one chain of kernels; else each block is called by itself."""
    bf16: bool
    graph: bool
    """Forward and backward pass of a micro-batch are one CUDA graph."""
    lag: int
    """Steps by which the loss is read back behind the step that is queued."""
    graph_per_rounds: bool = False
    """Rounds are drawn: a graph is kept for each number of them, at most `MOST_GRAPHS`."""
    because: tuple[str, ...] = ()
    """Why something faster was left out."""

    def apply(self, model: nn.Module) -> None:
        """Puts the blocks on the kernels, or compiles them; an eager model stays as it is."""
        for block in physical_blocks(model):
            if self.blocks == "kernels":
                fused.install(block)
            elif self.blocks == "compiled":
                block.compile()
        if self.chained:
            fused.install_rounds(model)

    def describe(self) -> str:
        """One line for a person."""
        parts = [NAMES[self.blocks], "bf16" if self.bf16 else "fp32"]
        drawn = f" for each number of rounds, at most {MOST_GRAPHS}" if self.graph_per_rounds else ""
        parts += [f"CUDA graph{drawn}"] * self.graph
        parts += [f"loss read back {self.lag} step behind"] * bool(self.lag)
        return ", ".join(parts) + (f" ({'; '.join(self.because)})" if self.because else "")

    def to_json(self) -> dict[str, Any]:
        """What run.json keeps of it."""
        precision = "bf16" if self.bf16 else "fp32"
        graphs = {"most_graphs": MOST_GRAPHS} if self.graph_per_rounds else {}
        return {"blocks": self.blocks, "precision": precision, "graph": self.graph, **graphs, "lag": self.lag}


def choose_execution(
    config: DeviceConfig,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    recordable: bool = False,
    draws_rounds: bool = False,
) -> Execution:
    """The fastest way that config, device, model and optimizer allow.

    `recordable`: batches of one shape and one number of rounds are the same work, and nothing in it waits
    for the device. `draws_rounds`: steps differ in their number of rounds.
    """
    bf16 = uses_bf16(config, world.device)
    blocks, why_blocks = _choose_blocks(config, world, model)
    sharded = world.is_sharded(config)
    # Sharded blocks are gathered when they are called, so each must be called by itself.
    chained = blocks == "kernels" and not sharded and fused.fits_rounds(model)
    obstacles = {
        "device.graph is off": not config.graph,
        "fsdp: no CUDA graph": sharded,
        "batches differ in their work: no CUDA graph": not recordable,
    }
    recorded = (chained or sharded) and blocks == "kernels" and optimizer is not None
    why_graph = [text for text, holds in obstacles.items() if holds] if recorded else []
    graph = chained and optimizer is not None and not why_graph
    # Without a host that looks at the loss first, the device must leave a bad step out by itself.
    lag = int(graph and optimizer is not None and supports_conditional_step(optimizer))
    because = (*why_blocks, *why_graph[:1])
    return Execution(blocks, chained, bf16, graph, lag, graph and draws_rounds, because)


def runs_fast_blocks(config: DeviceConfig, device: torch.device) -> bool:
    """Whether blocks run in bf16, on kernels or compiled: what the estimate of memory is of."""
    return uses_bf16(config, device) and config.compile != "off"


def runs_kernels(config: DeviceConfig, device: torch.device) -> bool:
    """Whether blocks that the Triton kernels know run on them."""
    on_gpu = device.type == "cuda" and uses_bf16(config, device)
    return on_gpu and config.compile == "auto" and fused.HAS_TRITON


def _choose_blocks(config: DeviceConfig, world: World, model: nn.Module) -> tuple[Blocks, list[str]]:
    on_gpu = world.device.type == "cuda"
    if config.compile == "off" or (config.compile == "auto" and not on_gpu):
        return "eager", ["device.compile is off"] if on_gpu else []
    why = list(_against_kernels(config, world, model))
    return ("compiled", why[:1]) if why else ("kernels", [])


def _against_kernels(config: DeviceConfig, world: World, model: nn.Module) -> Iterator[str]:
    if config.compile == "on":
        yield "device.compile is on"
    if not uses_bf16(config, world.device):
        yield "the Triton kernels need bf16"
    if not fused.HAS_TRITON:
        yield "Triton is not installed"
    if not all(map(fused.fits_block, physical_blocks(model))):
        yield "the Triton kernels do not know these blocks"
