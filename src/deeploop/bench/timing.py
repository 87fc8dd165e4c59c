"""Time a training step of deeploop or of a reference, and the device's fastest matrix products."""

import gc
import runpy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from deeploop.config.run import RunConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.language.config import TrainConfig
from deeploop.train.distributed import ATTENTION, World
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


def time_reference(file: Path, config: TrainConfig, world: World, steps: int, *, fp8: bool = False) -> Timing:
    step, close = reference_step(file, config, world, fp8=fp8)
    try:
        return time_steps(step, world.device, steps)
    finally:
        close()


def reference_step(
    file: Path, config: TrainConfig, world: World, *, fp8: bool = False
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make a step of the same sizes in the reference: compiled as its file asks, fused AdamW, clipping at 1.

    It runs in bf16 autocast, with FP8 products by the file's own `to_float8`. The second function returned
    frees its memory.
    """
    with world.device:
        model = reference_model(file, config.model)
    if fp8:
        if not hasattr(model, "to_float8"):
            raise ValueError(f"reference={file}: ReferenceGPT has no method to_float8")
        model.to_float8()  # type: ignore[operator]
    cuda = world.device.type == "cuda"
    if cuda:
        compile_reference(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=cuda)
    shape = (config.optim.batch, config.model.context)
    batch: Tensor = torch.randint(config.model.vocabulary, shape, device=world.device)

    def step() -> None:
        with torch.autocast(world.device.type, torch.bfloat16, enabled=cuda), fast_attention():
            loss = model(batch, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def close() -> None:
        model.to("meta")  # compiled code still holds the model
        optimizer.state.clear()

    return step, close


def fast_attention() -> AbstractContextManager[None]:
    return sdpa_kernel(ATTENTION, set_priority=True)


def compile_reference(model: nn.Module) -> None:
    """Compile a reference by its file's own `compile_for_training`; without one, block by block."""
    if hasattr(model, "compile_for_training"):
        model.compile_for_training()  # type: ignore[operator]
        return
    for block in model.get_submodule("blocks").children():
        block.compile()


def reference_model(file: Path, config: GPTConfig) -> nn.Module:
    config.require_plain_loop(f"reference={file}")
    namespace = runpy.run_path(str(file))
    if "ReferenceGPT" not in namespace:
        raise ValueError(f"reference={file}: has no class ReferenceGPT")
    names = ("blocks", "rounds", "width", "heads", "hidden", "context")
    sizes = {name: getattr(config, name) for name in names}
    model: nn.Module = namespace["ReferenceGPT"](**sizes, vocabulary=config.padded_vocabulary)
    return model


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
