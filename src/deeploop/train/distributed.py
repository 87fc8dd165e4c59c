"""Devices and ranks, and how a model is wrapped for them.

The model itself has no parallel code; everything here wraps it.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deeploop.config.run import DeviceConfig

T = TypeVar("T")
# Fastest first: on Hopper cuDNN's attention takes two thirds of the time of flash attention, both ways.
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class World:
    """Rank of this process, number of ranks, and device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def is_sharded(self, config: DeviceConfig) -> bool:
        """Return True if each rank holds a shard of the model."""
        return self.size > 1 and config.parallel == "fsdp"

    def rows(self, count: int) -> slice:
        """Return this rank's rows of `count`, which is a multiple of the ranks."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return True if `flag` is set on any rank."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all ranks, which have equally many."""
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, on every rank."""
        values = [value] * self.size
        if self.size == 1:
            return values
        dist.all_gather_object(values, value)
        return values


@contextmanager
def open_world(config: DeviceConfig) -> Iterator[World]:
    """Join the ranks that `torchrun` started, if any, and configure the device."""
    device = open_device(config)
    fast = device.type == "cuda" and not config.deterministic
    # For as long as the world is open: a recomputed forward pass must use the same attention kernel.
    with sdpa_kernel(ATTENTION, set_priority=True) if fast else nullcontext(), _ranks(device) as world:
        yield world


def open_device(config: DeviceConfig) -> torch.device:
    """Return this rank's device, configured."""
    if config.kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device.kind=cuda: this machine has no CUDA device; use auto or cpu")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    # Under bf16, TF32 only touches the few products that stay in fp32.
    exact = config.deterministic or config.precision == "fp32"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    return device


@contextmanager
def _ranks(device: torch.device) -> Iterator[World]:
    use_cuda = device.type == "cuda"
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield World(0, 1, device)
        return
    if dist.is_initialized():  # opened by the caller for several runs, as torch can't reopen a group reliably
        yield World(dist.get_rank(), size, device)
        return
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None)
    try:
        yield World(dist.get_rank(), size, device)
        # Wait for the last collectives of other ranks, but not after an error.
        dist.barrier()
    finally:
        # Gloo's threads free their last buffers after the ranks went on, and abort the process when
        # that falls into the interpreter's shutdown. Destroying the group joins them, if no model (in a
        # reference cycle) or cache of FSDP holds it any more; else the pause lets them finish.
        gc.collect()
        dist.destroy_process_group()
        if not use_cuda:
            time.sleep(0.1)


def wrap(model: nn.Module, config: DeviceConfig, world: World) -> nn.Module:
    """Move a model to its device and replicate or shard it over the ranks."""
    model.to(world.device)
    if world.size == 1:
        return model
    if config.parallel == "fsdp":
        from deeploop.train.sharding import shard  # imported here, as FSDP takes as long to import as torch

        return shard(model, list(physical_blocks(model)), reshard=config.reshard)
    share_weights(model)
    return model


@torch.no_grad()
def share_weights(model: nn.Module) -> None:
    """Broadcast the first rank's parameters and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        if 0 in tensor.stride():  # expanded constants can't be written to
            continue
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def physical_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Return the stored blocks, each of which is compiled and sharded by itself."""
    for name, module in model.named_modules():
        if name.split(".")[-1] in ("blocks", "prelude", "coda"):
            yield from module.children()


def begin_micro_batch(model: nn.Module, *, last: bool) -> None:
    """Prepare a micro-batch: sharded gradients are reduced only in the last one of a step."""
    if is_sharded(model):
        visits: Any = model.first_visits
        visits.begin(last=last)


def is_sharded(model: nn.Module) -> bool:
    """Return True if `wrap` has sharded this model."""
    return hasattr(model, "first_visits")


def uses_bf16(config: DeviceConfig, device: torch.device) -> bool:
    """Return True for bf16: the default on GPUs, on a CPU only on request."""
    return config.precision in ("bf16", "fp8") or (config.precision == "auto" and device.type == "cuda")


def arithmetic(config: DeviceConfig, device: torch.device) -> AbstractContextManager[object]:
    """Autocast to bf16 if configured; FP8 is inside the blocks that `Execution.apply` installs."""
    return torch.autocast(device.type, torch.bfloat16) if uses_bf16(config, device) else nullcontext()


def how_computed(
    device: torch.device, arithmetic: Callable[[], AbstractContextManager[object]]
) -> dict[str, str]:
    """Return precision and device of an evaluation, for its record."""
    with arithmetic():
        is_bf16 = torch.is_autocast_enabled(device.type)
    return {
        "precision": "bf16" if is_bf16 else "fp32",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def share_of_rank(windows: Tensor, world: World, filler: int) -> Tensor:
    """Return this rank's part of the validation windows, the same number on every rank.

    Sharded blocks communicate in every forward call, so a shorter part is padded with rows whose targets
    are -1, which are not counted.
    """
    missing = -len(windows) % world.size
    filled = torch.cat([windows, windows.new_full((missing, windows.shape[1]), filler)])
    return filled[world.rank :: world.size]
