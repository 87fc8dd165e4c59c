"""Measure the cost of recurrent depth on one device: drawn rounds, truncated gradients, cache budgets.

    python benchmarks/recurrent.py                        one GPU, GPT-2 small's width, a few minutes
    python benchmarks/recurrent.py --device cpu --tiny    the same script on a small model, in seconds

1. Tokens per second of drawn rounds beside a fixed number of the same mean, with CUDA graphs and without.
   Draws differ from their mean, so the table also has the model FLOPs per second of what was drawn.
2. Memory with the gradient through the last 4 of 32 rounds, beside 4 rounds in all and 32 without truncation:
   what autograd keeps of one forward pass, and on a GPU the peak of a step.
3. Decoding with the keys and values of 1 round, 2 rounds and all: tokens per second and bytes per token.

Weights and text are fresh or any: the work does not depend on them.
"""

import argparse
import gc
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deeploop.bench.decode import time_decoding
from deeploop.bench.training import corpus_for
from deeploop.config.run import DeviceConfig
from deeploop.models import LoopedGPT
from deeploop.models.accounting import flops_per_token
from deeploop.models.gpt_config import GPTConfig
from deeploop.report.tables import text_table
from deeploop.runs.folder import provenance
from deeploop.tasks.language.config import RoundsConfig, TrainConfig
from deeploop.tasks.language.recipes import gpt2_small, tiny
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.device import device_name
from deeploop.train.distributed import World, arithmetic, open_world
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest
from deeploop.train.task import set_rounds

MEAN, DEEP, KEPT = 4, 32, 4
FEW = 4  # sequences whose memory is measured: 32 rounds of more would not fit without truncation
SAMPLED = "poisson-lognormal"
PARTS = ("speed", "memory", "decoding")


def base_config(args: argparse.Namespace, folder: Path) -> TrainConfig:
    """Prelude, core and coda of 4 blocks each at GPT-2 small's width; 1 each for --tiny."""
    base, blocks = (tiny(), 1) if args.tiny else (gpt2_small(), 4)
    model = replace(
        base.model, blocks=blocks, prelude=blocks, coda=blocks, rounds=MEAN, injection="add", rule="flat"
    )
    size = args.batch or (4 if args.tiny else 32)
    return replace(
        base,
        model=model,
        data=replace(base.data, path=args.data or corpus_for(model, folder), validation_sequences=1),
        optim=replace(base.optim, batch=size),
        device=replace(base.device, kind=args.device, micro_batch=size, recompute="off"),
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(run: Any) -> None:
    run.close()
    run.model.to("meta")
    run.optimizer.state.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def time_rounds(config: TrainConfig, world: World, warm: int, steps: int) -> dict[str, Any]:
    """Steps in a row, as a run takes them, after `warm` in which graphs are recorded."""
    run = open_run(config, world, quiet=True)
    try:
        assert isinstance(run.task, LanguageTask)
        queue = StepQueue(run, StopRequest())
        began = time.perf_counter()
        for _ in range(warm):
            queue.advance()
        synchronize(world.device)
        ready = time.perf_counter()
        for _ in range(steps):
            queue.advance()
        synchronize(world.device)
        seconds = time.perf_counter() - ready
        drawn = [run.task.rounds_at(step) for step in range(warm, warm + steps)]
        kept = config.rounds.backprop
        flops = sum(flops_per_token(config.model, R, min(R, kept or R)) for R in drawn)
        tokens = run.task.targets_per_step
        return {
            "execution": run.execution.describe(),
            "mean_rounds": sum(drawn) / steps,
            "numbers_of_rounds": len(set(drawn)),
            "warm_s": ready - began,
            "tokens_per_s": steps * tokens / seconds,
            "flops": flops * tokens / seconds,
        }
    finally:
        free(run)


def speed(config: TrainConfig, world: World, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Fixed and drawn rounds of the same mean, all of them in the graph or the last 4."""
    warm, steps = (3, 6) if args.tiny else (args.warm, args.steps)
    rows = []
    for sample, kept in (("fixed", 0), (SAMPLED, 0), (SAMPLED, KEPT)):
        for graph in (True, False) if world.device.type == "cuda" else (False,):
            name = f"{sample}, gradient through {f'the last {kept}' if kept else 'all'}"
            cell = replace(
                config,
                out=folder / f"speed-{len(rows)}",
                rounds=RoundsConfig(sample=sample, backprop=kept),
                device=replace(config.device, graph=graph),
            )
            row = {"rounds": name, "graph": graph, **time_rounds(cell, world, warm, steps)}
            print(f"{name}: {row['tokens_per_s']:,.0f} tokens/s ({row['execution']})", flush=True)
            rows.append(row)
    return rows


def memory(config: TrainConfig, world: World, folder: Path) -> list[dict[str, Any]]:
    """Measure what autograd keeps of a forward pass, and the peak of a step without a CUDA graph."""
    rows = []
    for rounds, kept in ((KEPT, 0), (DEEP, KEPT), (DEEP, 0)):
        cell = replace(
            config,
            out=folder / f"memory-{len(rows)}",
            model=replace(config.model, rounds=rounds),
            rounds=RoundsConfig(backprop=kept),
            optim=replace(config.optim, batch=FEW),
            device=replace(config.device, graph=False, micro_batch=FEW),
        )
        row: dict[str, Any] = {"rounds": rounds, "backprop": kept}
        try:
            row |= measure_memory(cell, world)
        except torch.OutOfMemoryError:
            row |= {"kept": None, "peak": None}
        print(f"memory of {row}", flush=True)
        rows.append(row)
    return rows


def measure_memory(config: TrainConfig, world: World) -> dict[str, Any]:
    cuda = world.device.type == "cuda"
    held = torch.cuda.memory_allocated(world.device) if cuda else 0  # what the row before has left behind
    run = open_run(config, world, quiet=True)
    try:
        data = run.task.batches(run.step)
        set_rounds(run.model, data.rounds)
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, arithmetic(config.device, world.device):
            run.task.loss(run.model.train(), data.batches[0])
        own = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
        kept = sum(size for place, size in sizes.items() if place not in own)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
        queue = StepQueue(run, StopRequest())
        for _ in range(2):
            queue.take()
        peak = torch.cuda.max_memory_allocated(world.device) - held if cuda else None
        return {"kept": kept, "held_before": held, "peak": peak}
    finally:
        free(run)


def decoding(model: GPTConfig, world: World, args: argparse.Namespace) -> list[dict[str, Any]]:
    """New tokens per second at each budget, for one sequence and for several, as `generate` decodes them."""
    gpt = LoopedGPT(model).to(world.device).eval()
    prompt, new = (8, 16) if args.tiny else (16, 64)  # with a budget prompts are read token by token
    rows = []
    for batch in (1, 2 if args.tiny else 32):
        prompts = torch.randint(model.vocabulary, (batch, prompt))
        for budget in (1, 2, None):
            gpt.set_cache_rounds(budget)
            first, step = time_decoding(gpt, prompts, new)
            cache = gpt.new_cache(prompt)
            with torch.inference_mode(), arithmetic(DeviceConfig(kind=args.device), world.device):
                gpt(prompts.to(world.device), cache=cache)
            rows.append(
                {
                    "sequences": batch,
                    "cache_rounds": budget,
                    "slots": gpt.slots,
                    "bytes_per_token": cache.nbytes / (batch * cache.capacity),
                    "first_token_s": first,
                    "tokens_per_s": batch / step,
                }
            )
            print(f"decoding: {rows[-1]}", flush=True)
    return rows


def report(record: dict[str, Any]) -> str:
    speeds = [
        (
            row["rounds"],
            "yes" if row["graph"] else "no",
            f"{row['mean_rounds']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['flops'] / 1e12:.3g}",
            f"{row['flops'] / record['speed'][0]['flops']:.2f}",
            f"{row['warm_s']:.1f} s",
        )
        for row in record["speed"]
    ]
    sizes = [
        (
            str(row["rounds"]),
            str(row["backprop"] or "all"),
            *("–" if row[name] is None else f"{row[name] / 2**20:,.1f}" for name in ("kept", "peak")),
        )
        for row in record["memory"]
    ]
    decoded = [
        (
            str(row["sequences"]),
            str(row["cache_rounds"] or "all"),
            str(row["slots"]),
            f"{row['bytes_per_token']:,.0f}",
            f"{row['tokens_per_s']:,.1f}",
            f"{row['first_token_s'] * 1e3:.1f}",
        )
        for row in record["decoding"]
    ]
    tables = (
        (("rounds", "graph", "mean R", "tokens/s", "TFLOP/s", "of the first", "first steps"), speeds),
        ((f"R, {FEW} sequences", "gradient through", "kept, MiB", "peak, MiB"), sizes),
        (("sequences", "cache rounds", "slots", "bytes/token", "tokens/s", "first token, ms"), decoded),
    )
    shown = [text_table(head, rows) for head, rows in tables if rows]
    return "\n\n".join([f"{record['device']}: {record['model']}", *shown])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps")
    parser.add_argument("--batch", type=int, default=0, help="sequences per step; 32, or 4 of --tiny")
    parser.add_argument("--warm", type=int, default=60, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed")
    parser.add_argument("--data", type=Path, help="corpus; unset: Python's standard library, prepared here")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="leave out the other parts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, open_world(DeviceConfig(kind=args.device)) as world:
        folder = Path(place)
        config = base_config(args, folder)
        m = config.model
        record = {
            "device": device_name(world.device),
            "model": f"width {m.width}, {m.prelude} / {m.blocks} / {m.coda} blocks, {m.injection}, "
            f"{m.block}, mean {MEAN} rounds, batch {config.optim.batch} × {m.context} tokens",
            "speed": speed(config, world, args, folder) if "speed" in args.only else [],
            "memory": memory(config, world, folder) if "memory" in args.only else [],
            "decoding": decoding(m, world, args) if "decoding" in args.only else [],
            **provenance(),
        }
    print(report(record))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
