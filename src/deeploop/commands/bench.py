"""`deeploop bench`: how fast a recipe trains or decodes here, as shares of what the device can do.

The real training step is timed, with its loader, clipping and optimizer, beside the matrix products that the
same process reaches and, if asked, a reference implementation of the same model: every figure has a ratio.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from deeploop.commands import bench_decode
from deeploop.commands.parsing import run_command
from deeploop.data.corpora import stdlib
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.models.gpt_config import GPTConfig
from deeploop.recipes import get_recipe
from deeploop.report import page
from deeploop.train.config import (
    AnyTrainConfig,
    ChatTrainConfig,
    IterateTrainConfig,
    ReasonerTrainConfig,
    TrainConfig,
)
from deeploop.train.distributed import World, open_world
from deeploop.train.progress import device_name
from deeploop.train.rundir import provenance
from deeploop.train.timing import matmul_ceiling, time_reference, time_training

TOKENIZERS = {257: "bytes", 50257: "gpt2"}
OF_TRAINING = ("micro_batch", "recompute", "round_hidden", "steps", "reference", "data")
OF_DECODING = ("batch", "prompt_tokens", "new_tokens")


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """Tokens a second, model FLOP/s, share of the matrix-product ceiling, compile time and peak memory."""

    recipes: tuple[str, ...] = ("gpt2-small",)
    """Recipes to time; a reasoner's needs --data."""
    rounds: tuple[int, ...] = (1, 3, 7)
    """Rounds R of each language model."""
    micro_batch: tuple[int, ...] = ()
    """Sequences a step of a language model; unset: the recipe's micro-batch. A reasoner keeps its batch."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """As --device.precision; fp8 is timed beside bf16 in the same run."""
    stream: Literal["fp32", "bf16"] = "fp32"
    """As --device.stream."""
    recompute: Literal["off", "round", "block"] = "off"
    """Activations to compute again in the backward pass, as in --device.recompute."""
    round_hidden: bool = False
    """Round SwiGLU's hidden width up to a multiple of 16 (2730 → 2736), which tensor cores prefer."""
    steps: int = 10
    """Steps that are timed, after three that are not."""
    decode: bool = False
    """Time decoding in place of training: tokens a second, share of the memory bandwidth, transformers."""
    batch: tuple[int, ...] = (1, 64)
    """Sequences that are decoded together, with --decode."""
    prompt_tokens: int = 128
    """Tokens of each prompt, with --decode."""
    new_tokens: int = 128
    """Tokens that are added to each prompt, with --decode."""
    reference: Path | None = None
    """A file with a class ReferenceGPT to time in the same run: benchmarks/reference_gpt.py."""
    data: Path | None = None
    """Corpus; unset: Python's standard library, prepared on the way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json: Path | None = None
    """Also write the results to this file."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be at least 1")
        if not self.recipes or not self.rounds:
            raise ValueError("recipes, rounds: name at least one of each")
        for name in ("micro_batch", "batch"):
            sizes = getattr(self, name)
            if any(size < 1 for size in sizes):
                raise ValueError(f"{name}={min(sizes)}: must be at least 1")
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens={self.prompt_tokens}: must be at least 1")
        if self.new_tokens <= bench_decode.UNTIMED:
            raise ValueError(
                f"new_tokens={self.new_tokens}: must be above {bench_decode.UNTIMED}, which are not timed"
            )
        if self.json is not None and not os.access(self.json.parent, os.W_OK):
            raise ValueError(f"json={self.json}: can't be written; choose a folder that is there")
        for recipe in self.recipes:
            if isinstance(get_recipe(recipe), ChatTrainConfig):
                raise ValueError(f"recipes={recipe}: has no model of its own; time the recipe of its run")
            if isinstance(get_recipe(recipe), ReasonerTrainConfig) and self.data is None and not self.decode:
                raise ValueError(f"recipes={recipe}: is a reasoner's; give its puzzles with --data")
        if self.reference is not None and not self.reference.is_file():
            raise ValueError(f"reference={self.reference}: no such file; try benchmarks/reference_gpt.py")
        self._check_mode()

    def _check_mode(self) -> None:
        """Raises for an option that what is timed does not have."""
        other = OF_TRAINING if self.decode else OF_DECODING
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in other and value != option.default:
                why = "is for training; leave it out, or --decode" if self.decode else "needs --decode"
                raise ValueError(f"{option.name}={value}: {why}")


def run(args: BenchArgs) -> str:
    """Times every cell; returns the table to print."""
    if args.decode:
        return bench_decode.run(args)
    base = replace(get_recipe(args.recipes[0]).device, kind=args.device)
    with open_world(base) as world, tempfile.TemporaryDirectory() as folder:
        ceiling = matmul_ceiling(world.device)
        cells = [cell for recipe in args.recipes for cell in cells_of(recipe, args, Path(folder))]
        rows: list[dict[str, Any]] = []
        record = {
            "device": device_name(world.device),
            "ceiling_flops": ceiling,
            "cells": rows,
            **provenance(),
        }
        for name, config in tqdm(cells, desc="bench", disable=None, leave=False):
            rows.append(measure(name, config, world, args, ceiling))
            if args.json is not None:  # after every cell: the next one may not fit the memory
                args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return report(record)


def cells_of(recipe: str, args: BenchArgs, folder: Path) -> Iterator[tuple[str, AnyTrainConfig]]:
    """What is timed of a recipe, each with its name."""
    base = get_recipe(recipe)
    device = replace(
        base.device,
        kind=args.device,
        precision=args.precision,
        stream=args.stream,
        recompute=args.recompute,
    )
    if isinstance(base, IterateTrainConfig):
        yield recipe, replace(base, out=folder / recipe, device=device)
        return
    if isinstance(base, ReasonerTrainConfig):
        data = replace(base.data, path=args.data or base.data.path)
        yield recipe, replace(base, out=folder / recipe, data=data, device=device)
        return
    assert isinstance(base, TrainConfig)  # recipes are not custom
    for rounds in args.rounds:
        for size in args.micro_batch or (base.device.micro_batch or 16,):
            yield (
                f"{recipe} R={rounds}",
                replace(
                    base,
                    out=folder / f"{recipe}-{rounds}-{size}",
                    model=cell_model(base.model, rounds, args),
                    data=replace(
                        base.data, path=args.data or corpus_for(base.model, folder), validation_sequences=1
                    ),
                    optim=replace(base.optim, batch=size),
                    device=replace(device, micro_batch=size),
                ),
            )


def cell_model(model: GPTConfig, rounds: int, args: BenchArgs) -> GPTConfig:
    hidden = -(-model.hidden // 16) * 16 if args.round_hidden else model.hidden
    return replace(model, rounds=rounds, hidden=hidden)


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


def measure(
    name: str, config: AnyTrainConfig, world: World, args: BenchArgs, ceiling: float
) -> dict[str, Any]:
    """One cell: ours, and the reference where there is one."""
    ours, tokens, flops = time_training(config, world, args.steps)
    row: dict[str, Any] = {
        "cell": name,
        "batch": config.optim.batch,
        "steps_per_s": 1 / ours.seconds,
        "tokens_per_s": tokens / ours.seconds,
        "flops": flops / ours.seconds,
        "share_of_ceiling": flops / ours.seconds / ceiling,
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
    return row


def report(record: dict[str, Any]) -> str:
    """The table, and what its columns mean."""
    rows = []
    for row in record["cells"]:
        memory = f"{row['peak_memory'] / 2**30:.1f} GiB" if row["peak_memory"] else "–"
        cells = [
            row["cell"],
            str(row["batch"]),
            f"{row['steps_per_s']:.3g}",
            f"{row['tokens_per_s'] / 1e3:.1f} K",
            f"{row['flops'] / 1e12:.3g}",
            f"{row['share_of_ceiling']:.0%}",
            f"{row['first_step_s']:.1f} s",
            memory,
        ]
        if "ratio_to_bf16" in row:
            cells += [f"{row['bf16_tokens_per_s'] / 1e3:.1f} K", f"{row['ratio_to_bf16']:.2f}×"]
        if "ratio" in row:
            cells += [f"{row['reference_tokens_per_s'] / 1e3:.1f} K", f"{row['ratio']:.2f}×"]
        rows.append(cells)
    header = ["recipe", "batch", "steps/s", "tokens/s", "TFLOP/s", "of ceiling", "first step", "peak memory"]
    if any("ratio_to_bf16" in row for row in record["cells"]):
        header += ["bf16", "ratio"]
    if any("ratio" in row for row in record["cells"]):
        header += ["reference", "ratio"]
        rows = [row + ["–"] * (len(header) - len(row)) for row in rows]
    return (
        f"{record['device']}: products reach {record['ceiling_flops'] / 1e12:.3g} TFLOP/s; model FLOPs are 6 "
        f"a visited matrix entry, and causal attention\n\n{page.text_table(header, rows)}"
    )


def main(arguments: list[str]) -> int:
    return run_command(BenchArgs, run, arguments, prog="deeploop bench")
