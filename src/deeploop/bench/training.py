"""`deeploop bench` of training: how fast a recipe trains here, as shares of what the device can do.

The real training step is timed, with its loader, clipping and optimizer. Matrix products and, if asked, a
reference implementation of the same model are timed in the same process, so every figure has a ratio.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deeploop.bench import collect
from deeploop.bench.options import BenchArgs
from deeploop.bench.reference import time_reference
from deeploop.bench.timing import matmul_ceiling, time_training
from deeploop.config.run import RunConfig
from deeploop.data.corpora import stdlib
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.models.gpt_config import GPTConfig
from deeploop.report.tables import MISSING, Table, number
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.recipes import get_recipe
from deeploop.train.device import device_name
from deeploop.train.distributed import World, open_world

TOKENIZERS = {257: "bytes", 50257: "gpt2"}


def run(args: BenchArgs) -> str:
    """Time every cell and return the table to print."""
    base = replace(get_recipe(args.recipes[0]).device, kind=args.device)
    with open_world(base) as world, tempfile.TemporaryDirectory() as folder:
        ceiling = matmul_ceiling(world.device)
        cells = [cell for recipe in args.recipes for cell in cells_of(recipe, args, Path(folder))]
        bar = tqdm(cells, desc="bench", disable=None, leave=False)
        rows = (measure(name, config, world, args, ceiling) for name, config in bar)
        return report(collect(rows, {"device": device_name(world.device), "ceiling_flops": ceiling}, args))


def cells_of(recipe: str, args: BenchArgs, folder: Path) -> Iterator[tuple[str, RunConfig]]:
    """Yield the configs of a recipe to time, each with its name."""
    base = get_recipe(recipe)
    device = replace(
        base.device,
        kind=args.device,
        precision=args.precision,
        stream=args.stream,
        recompute=args.recompute,
    )
    if not isinstance(base, TrainConfig):
        data = replace(base.data, path=args.data) if args.data and base.folders else base.data
        yield recipe, replace(base, out=folder / recipe, data=data, device=device)
        return
    hidden = -(-base.model.hidden // 16) * 16 if args.round_hidden else base.model.hidden
    for rounds in args.rounds:
        for size in args.micro_batch or (base.device.micro_batch or 16,):
            yield (
                f"{recipe} R={rounds}",
                replace(
                    base,
                    out=folder / f"{recipe}-{rounds}-{size}",
                    model=replace(base.model, rounds=rounds, hidden=hidden),
                    data=replace(
                        base.data, path=args.data or corpus_for(base.model, folder), validation_sequences=1
                    ),
                    optim=replace(base.optim, batch=size),
                    device=replace(device, micro_batch=size),
                ),
            )


def corpus_for(model: GPTConfig, folder: Path) -> Path:
    if model.vocabulary not in TOKENIZERS:
        raise ValueError(f"model.vocabulary={model.vocabulary}: no tokenizer of ours has it; give --data")
    tokenizer = get_tokenizer(TOKENIZERS[model.vocabulary])
    source = stdlib()
    path = folder / f"corpus-{tokenizer.name}"
    if path.exists():
        return path
    prepare(source, tokenizer, path, validation_tokens=100_000, source=source.description)
    return path


def measure(name: str, config: RunConfig, world: World, args: BenchArgs, ceiling: float) -> dict[str, Any]:
    """Measure one cell: our model, and the reference if there is one."""
    ours, tokens, flops = time_training(config, world, args.steps)
    # The ceiling is of products in bf16 on a GPU and in fp32 elsewhere.
    like_ceiling = args.precision in ("auto", "bf16" if world.device.type == "cuda" else "fp32")
    row: dict[str, Any] = {
        "cell": name,
        "batch": config.optim.batch,
        "steps_per_s": 1 / ours.seconds,
        "tokens_per_s": tokens / ours.seconds,
        "flops": flops / ours.seconds,
        **({"share_of_ceiling": flops / ours.seconds / ceiling} if like_ceiling else {}),
        "first_step_s": ours.first,
        "peak_memory": ours.peak_memory,
    }
    if args.precision == "fp8":
        device = replace(config.device, precision="bf16", stream="fp32")
        plain = replace(config, out=config.out.with_name(f"{config.out.name}-bf16"), device=device)
        bf16, _, _ = time_training(plain, world, args.steps)
        row |= {"bf16_tokens_per_s": tokens / bf16.seconds, "ratio_to_bf16": bf16.seconds / ours.seconds}
    if args.reference is not None and isinstance(config, TrainConfig):
        theirs = time_reference(args.reference, config, world, args.steps)
        row |= {
            "reference_tokens_per_s": tokens / theirs.seconds,
            "ratio": theirs.seconds / ours.seconds,
            "reference_first_step_s": theirs.first,
            "reference_peak_memory": theirs.peak_memory,
        }
        if args.precision == "fp8" and importlib.util.find_spec("torchao"):
            fp8 = time_reference(args.reference, config, world, args.steps, fp8=True)
            row |= {
                "reference_fp8_tokens_per_s": tokens / fp8.seconds,
                "ratio_fp8": fp8.seconds / ours.seconds,
                "reference_fp8_first_step_s": fp8.first,
            }
    return row


def report(record: dict[str, Any]) -> str:
    """Format the table, and explain its columns."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "recipe": lambda row: row["cell"],
        "batch": lambda row: str(row["batch"]),
        "steps/s": lambda row: f"{row['steps_per_s']:.3g}",
        "tokens/s": lambda row: _thousands(row["tokens_per_s"]),
        "TFLOP/s": lambda row: f"{row['flops'] / 1e12:.3g}",
        "of ceiling": lambda row: number(row.get("share_of_ceiling"), ".0%"),
        "first step": lambda row: f"{row['first_step_s']:.1f} s",
        "peak memory": lambda row: f"{row['peak_memory'] / 2**30:.1f} GiB" if row["peak_memory"] else MISSING,
    }
    compared: dict[str, Callable[[dict[str, Any]], str]] = {
        "bf16": lambda row: _thousands(row.get("bf16_tokens_per_s")),
        "to bf16": lambda row: _times(row.get("ratio_to_bf16")),
        "reference": lambda row: _thousands(row.get("reference_tokens_per_s")),
        "to reference": lambda row: _times(row.get("ratio")),
        "its FP8": lambda row: _thousands(row.get("reference_fp8_tokens_per_s")),
        "to its FP8": lambda row: _times(row.get("ratio_fp8")),
    }
    table = Table.of("training", "", record["cells"], columns | compared)
    unused = [heading for heading in compared if {*table.column(heading)} <= {MISSING}]
    return (
        f"{record['device']}: products reach {record['ceiling_flops'] / 1e12:.3g} TFLOP/s; model FLOPs are 6 "
        f"a visited matrix entry, and causal attention\n\n{table.without(unused).text()}"
    )


def _thousands(tokens_per_s: float | None) -> str:
    return MISSING if tokens_per_s is None else f"{tokens_per_s / 1e3:.1f} K"


def _times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}×"
