"""How steps are executed on this device: chosen once, printed in one line, and recorded in run.json.

The fastest way is Triton kernels in bf16 on a GPU, one CUDA graph per micro-batch, and the loss read back one
step behind. Whatever is not possible is left out, and the line says why. FP8 and a bf16 stream are used on
request only; a run that can't have them is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from deeploop.accelerate import install, known
from deeploop.config.run import DeviceConfig
from deeploop.train.device import device_name
from deeploop.train.distributed import World, physical_blocks, uses_bf16
from deeploop.train.optim import supports_conditional_step
from deeploop.train.replay import MOST_GRAPHS

Blocks = Literal["kernels", "compiled", "eager"]
Precision = Literal["fp32", "bf16", "fp8"]
NAMES = {"kernels": "Triton kernels", "compiled": "compiled blocks", "eager": "eager modules"}
FP8_CAPABILITY = 8, 9
UNKNOWN = "the Triton kernels do not know these blocks"


@dataclass(frozen=True)
class Capabilities:
    """Properties of a task's steps that allow faster execution; none by default."""

    recordable: bool = False
    """Batches of one shape and number of rounds are the same work, and nothing in it waits for the device."""
    queueable: bool = False
    """Without a CUDA graph too, the next step can be queued before the loss of this one is known."""
    draws_rounds: bool = False
    """Steps differ in their number of rounds."""
    skippable: bool = False
    """A step whose loss or gradient is not finite is left out; else it ends the run."""
    tokens: int = 0
    """Tokens of every micro-batch, where they are known before the first step."""


NOTHING = Capabilities()


@dataclass(frozen=True)
class Execution:
    """Execution of a step: blocks, precision, CUDA graph, and how far the host runs ahead."""

    blocks: Blocks
    chained: bool
    """All rounds are one chain of kernels; else each block is called by itself."""
    precision: Precision
    graph: bool
    """Forward and backward pass of a micro-batch are one CUDA graph."""
    lag: int
    """Steps by which the loss is read back behind the step that is queued."""
    graph_per_rounds: bool = False
    """Rounds are drawn: a graph is kept for each number of them, at most `MOST_GRAPHS`."""
    because: tuple[str, ...] = ()
    """Why a faster execution was not chosen."""
    bf16_stream: bool = False
    """The residual stream is bf16 in training steps."""

    def apply(self, model: nn.Module) -> None:
        """Install the kernels in the blocks, or compile them."""
        low_precision = install.LowPrecision(self.precision == "fp8", self.bf16_stream)
        if low_precision.fp8:
            install.check_fp8_compiler(next(model.parameters()).device)
        for block in physical_blocks(model):
            if self.blocks == "kernels":
                install.install(block, low_precision)
            elif self.blocks == "compiled":
                block.compile()
        if self.chained:
            install.install_rounds(model, low_precision)

    def describe(self) -> str:
        """Describe the execution in one line."""
        parts = [NAMES[self.blocks], self.precision, *["bf16 stream"] * self.bf16_stream]
        drawn = f" for each number of rounds, at most {MOST_GRAPHS}" if self.graph_per_rounds else ""
        parts += [f"CUDA graph{drawn}"] * self.graph
        parts += [f"loss read back {self.lag} step behind"] * bool(self.lag)
        return ", ".join(parts) + (f" ({'; '.join(self.because)})" if self.because else "")

    def to_json(self) -> dict[str, Any]:
        """Return what run.json records of it."""
        stream = {"stream": "bf16"} if self.bf16_stream else {}
        graphs = {"most_graphs": MOST_GRAPHS} if self.graph_per_rounds else {}
        how = {"blocks": self.blocks, "precision": self.precision, **stream}
        return {**how, "graph": self.graph, **graphs, "lag": self.lag}


def choose_execution(
    config: DeviceConfig,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    task: Capabilities = NOTHING,
) -> Execution:
    """Choose the fastest execution that config, device, model, optimizer and task allow."""
    precision: Precision = "bf16" if uses_bf16(config, world.device) else "fp32"
    blocks, why_blocks = _choose_blocks(config, world.device, _first_obstacle(model, world.device))
    sharded = world.is_sharded(config)
    # Sharded blocks are gathered when they are called, so each must be called by itself.
    chained = blocks == "kernels" and not sharded and known.fits_rounds(model)
    # Without an optimizer nothing is trained: a run that was trained in FP8 is evaluated in bf16, anywhere.
    trains = optimizer is not None
    low_precision = install.LowPrecision(
        trains and config.precision == "fp8", trains and config.stream == "bf16"
    )
    if low_precision.fp8:
        require_fp8(world.device)
        _require_chain("precision=fp8", model, blocks, why_blocks, sharded)
        for block in physical_blocks(model):
            if reason := known.against_fp8(block, task.tokens):
                raise ValueError(f"device.precision=fp8: {reason}")
        precision = "fp8"
    if low_precision.bf16_stream:
        _require_chain("stream=bf16", model, blocks, why_blocks, sharded)
    obstacles = {
        "device.graph is off": not config.graph,
        "fsdp: no CUDA graph": sharded,
        "batches differ in their work: no CUDA graph": not task.recordable,
    }
    could_record = trains and blocks == "kernels" and (chained or sharded)
    why_graph = [text for text, holds in obstacles.items() if holds] if could_record else []
    graph = could_record and chained and not why_graph
    ahead = graph or (task.queueable and blocks == "kernels")
    # Without a host that looks at the loss first, the device must leave a bad step out by itself. Under ddp
    # all ranks do, or none: they share the loss and the gradient.
    lag = int(ahead and optimizer is not None and supports_conditional_step(optimizer))
    because = (*why_blocks, *why_graph[:1])
    drawn = graph and task.draws_rounds
    return Execution(blocks, chained, precision, graph, lag, drawn, because, low_precision.bf16_stream)


def require_fp8(device: torch.device) -> None:
    """Raise if the device has no FP8 matrix products."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        major, minor = FP8_CAPABILITY
        raise ValueError(
            f"device.precision=fp8: needs a GPU of compute capability {major}.{minor} or more "
            f"(Ada, Hopper, Blackwell), this is {device_name(device)}; use bf16"
        )


def _require_chain(field: str, model: nn.Module, blocks: Blocks, why: list[str], sharded: bool) -> None:
    """Raise unless all rounds are one chain of kernels: nothing else has been tested."""
    if blocks != "kernels":
        reason = why[0] if why else "there is no GPU"
        raise ValueError(
            f"device.{field}: needs the Triton kernels, which are not used: {reason}; "
            "change that, or leave the option out"
        )
    if sharded:
        raise ValueError(f"device.{field}: is not supported with device.parallel=fsdp; use ddp")
    streams = hasattr(model, "chain")  # a reasoner's chains are its stacks, of states that are bf16
    if not known.fits_rounds(model) or (field == "stream=bf16" and not streams):
        raise ValueError(f"device.{field}: is not supported for a {type(model).__name__}; leave it out")
    if getattr(model, "recompute", "off") == "block":
        raise ValueError(f"device.{field}: is not supported with device.recompute=block; use round")


def runs_fast_blocks(config: DeviceConfig, device: torch.device) -> bool:
    """Return True if blocks run in bf16 and on kernels or compiled, as the memory estimate assumes."""
    compiles = config.compile != "off" and (known.HAS_TRITON or device.type != "cuda")
    return compiles and uses_bf16(config, device)


def runs_kernels(config: DeviceConfig, device: torch.device, known: bool) -> bool:
    """Return True if `choose_execution` will run blocks on the Triton kernels."""
    return _choose_blocks(config, device, "" if known else UNKNOWN)[0] == "kernels"


def _first_obstacle(model: nn.Module, device: torch.device) -> str:
    """Return what the kernels do not support in a model's blocks, and where; empty if nothing."""
    names = {module: name for name, module in model.named_modules()}
    if any(map(known.mixes, physical_blocks(model))) and not known.runs_mixers(device):
        return "an MLP across positions has kernels for Hopper GPUs alone"
    obstacles = (known.obstacle(block, names[block]) for block in physical_blocks(model))
    return next(filter(None, obstacles), "")


def _choose_blocks(config: DeviceConfig, device: torch.device, obstacle: str) -> tuple[Blocks, list[str]]:
    on_gpu = device.type == "cuda"
    if config.compile == "off" or (config.compile == "auto" and not on_gpu):
        return "eager", ["device.compile is off"] if on_gpu else []
    if on_gpu and not known.HAS_TRITON:  # torch.compile needs it too
        return "eager", ["Triton is not installed"]
    why = list(_against_kernels(config, device, obstacle))
    return ("compiled", why[:1]) if why else ("kernels", [])


def _against_kernels(config: DeviceConfig, device: torch.device, obstacle: str) -> Iterator[str]:
    if config.compile == "on":
        yield "device.compile is on"
    if not uses_bf16(config, device):
        yield "the Triton kernels need bf16"
    if obstacle:
        yield obstacle
