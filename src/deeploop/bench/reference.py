"""Time a training step of a reference implementation: a file with a class `ReferenceGPT`.

Its constructor takes the sizes of the model, and `model(tokens, targets)` returns the loss. It may have the
methods `compile_for_training` and, for FP8, `to_float8`.
"""

import runpy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from deeploop.bench.timing import Timing, time_steps
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.language.config import TrainConfig
from deeploop.train.distributed import ATTENTION, World


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
