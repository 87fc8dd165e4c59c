"""Training steps of a recipe beside those of reference_gpt.py, in one process.

    python benchmarks/beside_reference.py --rounds 1 3 7 --micro-batch 32 --data data/text
    python benchmarks/beside_reference.py --rounds 1 3 7 --micro-batch 32 --precision fp8      # needs torchao

It takes the options of `deeploop bench`; --json writes the rows.
"""

import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import tyro
from reference_gpt import ReferenceGPT
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from deeploop.bench.options import BenchArgs
from deeploop.bench.timing import time_steps, time_training
from deeploop.bench.training import cells_of
from deeploop.models.gpt_config import GPTConfig
from deeploop.report.tables import text_table
from deeploop.tasks.language.config import TrainConfig
from deeploop.train.distributed import ATTENTION, World, open_world


def fast_attention() -> AbstractContextManager[None]:
    return sdpa_kernel(ATTENTION, set_priority=True)


def reference_model(config: GPTConfig) -> ReferenceGPT:
    config.require_plain_loop("the reference")
    names = ("blocks", "rounds", "width", "heads", "hidden", "context")
    return ReferenceGPT(
        **{name: getattr(config, name) for name in names}, vocabulary=config.padded_vocabulary
    )


def reference_step(
    config: TrainConfig, world: World, *, fp8: bool = False
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of the same sizes in bf16 autocast, compiled, with fused AdamW; and what frees its memory."""
    with world.device:
        model = reference_model(config.model)
    if fp8:
        model.to_float8()
    cuda = world.device.type == "cuda"
    if cuda:
        model.compile_for_training()
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


def measure(config: TrainConfig, world: World, steps: int, *, fp8: bool) -> dict[str, float]:
    ours, tokens, _ = time_training(config, world, steps)
    step, close = reference_step(config, world, fp8=fp8)
    theirs = time_steps(step, world.device, steps)
    close()
    return {
        "tokens_per_s": tokens / ours.seconds,
        "reference_tokens_per_s": tokens / theirs.seconds,
        "ratio": theirs.seconds / ours.seconds,
        "first_step_s": ours.first,
        "reference_first_step_s": theirs.first,
        "peak_memory_gib": (ours.peak_memory or 0) / 2**30,
        "reference_peak_memory_gib": (theirs.peak_memory or 0) / 2**30,
    }


def main() -> None:
    args = tyro.cli(BenchArgs, description=__doc__)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in args.recipes:
            for name, config in cells_of(recipe, args, Path(folder)):
                assert isinstance(config, TrainConfig), "a language model's recipe"
                with open_world(config.device) as world:
                    rows[name] = measure(config, world, args.steps, fp8=args.precision == "fp8")
    header = ("recipe", *next(iter(rows.values())))
    print(text_table(header, [(name, *(f"{x:,.4g}" for x in row.values())) for name, row in rows.items()]))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
