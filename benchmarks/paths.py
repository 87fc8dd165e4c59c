"""Time a training step by each path that a machine may take, in one process, as ratios to eager modules.

    python benchmarks/paths.py --recipe gpt2-small --rounds 3 --micro-batch 32
    python benchmarks/paths.py --recipe tiny --rounds 3 --device cpu

On a GPU this also imitates one of compute capability 8.0.
"""

import argparse
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from deeploop.bench.options import BenchArgs
from deeploop.bench.timing import time_training
from deeploop.bench.training import cells_of
from deeploop.report.tables import text_table
from deeploop.tasks.recipes import get_recipe
from deeploop.train.device import device_name
from deeploop.train.distributed import open_world

EAGER = {"compile": "off"}
ON_A_CPU: dict[str, dict[str, Any]] = {"eager modules": EAGER, "compiled blocks": {"compile": "on"}}
NO_HOPPER = "the same, capability 8.0"
CAPABILITY = "torch.cuda.get_device_capability"
ON_A_GPU: dict[str, dict[str, Any]] = {
    "eager modules, fp32": EAGER | {"precision": "fp32"},
    "eager modules": EAGER,  # as without Triton
    "compiled blocks": {"compile": "on"},
    "kernels": {"graph": False},
    "kernels, CUDA graph": {},
    NO_HOPPER: {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="gpt2-small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--width", type=int, help="of the model, with heads of its size; unset: the recipe's")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    args = BenchArgs(
        recipes=(given.recipe,),
        rounds=(given.rounds,),
        micro_batch=(given.micro_batch,),
        data=given.data,
        device=given.device,
    )
    base = replace(get_recipe(given.recipe).device, kind=given.device)
    with open_world(base) as world, tempfile.TemporaryDirectory() as folder:
        ((name, config),) = cells_of(given.recipe, args, Path(folder))
        if given.width:
            config = widened(config, given.width)
        rows, eager = [], 0.0
        for path, change in (ON_A_GPU if world.device.type == "cuda" else ON_A_CPU).items():
            torch.compiler.reset()
            cell: Any = replace(
                config, out=config.out.with_name(f"path-{len(rows)}"), device=replace(config.device, **change)
            )
            with patch(CAPABILITY, lambda *_: (8, 0)) if path == NO_HOPPER else nullcontext():
                timing, tokens, _ = time_training(cell, world, given.steps)
            eager = timing.seconds if change == EAGER else eager
            rows.append((path, timing.seconds, tokens / timing.seconds, timing.first))
        print(
            f"{name}, {given.micro_batch} sequences, {device_name(world.device)}, torch {torch.__version__}"
        )
    table = [
        (path, f"{seconds * 1e3:.1f}", f"{rate / 1e3:.2f} K", f"{eager / seconds:.2f}×", f"{first:.1f} s")
        for path, seconds, rate, first in rows
    ]
    print(text_table(("path", "ms", "tokens/s", "to eager", "first step"), table))


def widened(config: Any, width: int) -> Any:
    model, scale = config.model, width / config.model.width
    hidden = round(model.hidden * scale / 16) * 16
    return replace(config, model=replace(model, width=width, heads=round(model.heads * scale), hidden=hidden))


if __name__ == "__main__":
    main()
