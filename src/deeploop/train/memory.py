"""Fit a step to the device's memory: micro-batch and recomputation, where the config leaves them open.

The choice is made once, from an estimate of a step's memory (`models/accounting.py`) and what is free on the
fullest rank. Another micro-batch changes results by rounding: fix both where a run must repeat bit for bit.
"""

import os
from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import NamedTuple

import torch

from deeploop.config.run import DeviceConfig
from deeploop.nn.fp8 import against_tokens
from deeploop.nn.recompute import Recompute
from deeploop.train.distributed import World
from deeploop.train.execution import runs_fast_blocks

BUDGET = 0.8  # share of the free memory to use: the estimate is within 20%, and the allocator fragments
FEW = 4  # micro-batch below which recomputation costs less than small products
PLAIN = 3  # upper bound on the activations of blocks in fp32 or without kernels, relative to the estimate


Needs = Callable[[int, Recompute], int]  # sequences at once, what is recomputed → bytes


class Fit(NamedTuple):
    """Sequences computed at once on each rank, and what is recomputed in the backward pass."""

    micro_batch: int
    recompute: Recompute


def fit(batch: int, config: DeviceConfig, world: World, needs: Needs, *, tokens: int = 0) -> Fit:
    """Return the config's micro-batch and recompute, or what fits; `needs` estimates the bytes of a choice.

    `tokens` per sequence are needed for FP8.

    On a CPU: the whole share at once, nothing recomputed. On a GPU, the first in this order that fits: off,
    round, block, each at the micro-batch set or else at the largest even split of the share, of at least
    four sequences except for the last of them. FP8 and a bf16 stream have no block, and FP8 takes only splits
    whose tokens it can multiply; where there is none, `choose_execution` refuses the run.
    """
    sizes = even_splits(batch, config, world)
    if config.precision == "fp8":
        sizes = [size for size in sizes if not against_tokens(size * tokens)] or sizes
    free = free_memory(world)
    if free is None:
        return Fit(sizes[0], "off" if config.recompute == "auto" else config.recompute)
    estimate = needs_on(world.device, config, needs)
    ways: tuple[Recompute, ...] = ("off", "round", "block")
    if config.precision == "fp8" or config.stream == "bf16":
        ways = ways[:-1]  # these need a chain, which blocks recomputed one by one are not
    ways = ways if config.recompute == "auto" else (config.recompute,)
    for recompute in ways:
        for size in sizes[:1] if config.micro_batch else sizes:
            enough = size >= min(FEW, sizes[0]) or recompute == ways[-1]
            if enough and estimate(size, recompute) <= BUDGET * free:
                return Fit(size, recompute)
    return Fit(sizes[0 if config.micro_batch else -1], ways[-1])  # there is no alternative


def needs_on(device: torch.device, config: DeviceConfig, needs: Needs) -> Needs:
    """Return the memory estimate for the blocks that run on a device."""
    return needs if runs_fast_blocks(config, device) else partial(plain_needs, needs)


def plain_needs(needs: Needs, size: int, recompute: Recompute) -> int:
    """Estimate the bytes of blocks without kernels: a constant plus a share for each sequence."""
    fixed = needs(0, recompute)
    return fixed + PLAIN * (needs(size, recompute) - fixed)


def even_splits(batch: int, config: DeviceConfig, world: World) -> list[int]:
    """Return the micro-batches that divide a rank's share within the limit, largest first."""
    if batch % world.size:
        raise ValueError(f"optim.batch={batch}: must be a multiple of the {world.size} ranks")
    share = batch // world.size
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    divisors = {*small, *(share // size for size in small)}
    return sorted((size for size in divisors if size <= (config.micro_batch or share)), reverse=True)


def free_memory(world: World) -> int | None:
    """Return the bytes free on the fullest rank's GPU, cached blocks included; None on a CPU."""
    if world.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(world.device)
    reserve = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return min(world.gather(free + reserve))


def memory_of(device: torch.device) -> tuple[int, str]:
    """Return the bytes available to a step, and the name of their owner; ranks on a CPU share them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "the GPU"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks, "this machine"


def shards(config: DeviceConfig, world: World) -> int:
    """Return the number of ranks that a parameter is sharded over."""
    return world.size if world.is_sharded(config) else 1
