"""Time a training step, and the device's fastest matrix products."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from deeploop.config.run import RunConfig
from deeploop.train.distributed import World
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """One model, timed."""

    seconds: float  # per step
    first: float  # the first step: compilation, and what is loaded once
    peak_memory: int | None  # bytes


def time_training(config: RunConfig, world: World, steps: int) -> tuple[Timing, int, int]:
    """Time the step that a run takes; count its tokens and its FLOPs."""
    opened = open_run(config, world)
    try:
        timing = time_steps(StepQueue(opened, StopRequest()).advance, world.device, steps)
        return timing, opened.task.targets_per_step, opened.task.flops_per_step
    finally:
        opened.close()
        opened.model.to("meta")  # gives the memory back although compiled code still holds the model
        opened.optimizer.state.clear()
        gc.collect()  # a CUDA graph has memory of its own, and is part of a reference cycle


def time_steps(step: Callable[[], object], device: torch.device, steps: int) -> Timing:
    """Return the median time of steps in a row, as in a run: the host prepares one while the device computes
    the last.
    """
    gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    intervals = _device_intervals if cuda else _host_intervals
    first = intervals(step, 1)[0]
    intervals(step, WARM_UP - 1)
    seconds = median(intervals(step, steps))
    return Timing(seconds, first, torch.cuda.max_memory_allocated(device) if cuda else None)


def _host_intervals(step: Callable[[], object], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _device_intervals(step: Callable[[], object], steps: int) -> list[float]:
    """Return the seconds between the ends of steps on the device, without waiting for it in between."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(ends)]


def matmul_ceiling(device: torch.device) -> float:
    """Measure the FLOP/s of a large product in the precision of training: bf16 on a GPU, fp32 on a CPU."""
    cuda = device.type == "cuda"
    n, dtype, repeats = (8192, torch.bfloat16, 20) if cuda else (1024, torch.float32, 5)
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))

    def products() -> None:
        for _ in range(repeats):
            a @ b

    return repeats * 2 * n**3 / time_steps(products, device, 5).seconds
