"""Compare losses of the fast path and the reference: same weights and batches, 200 steps, over seeds.

    python benchmarks/loss_curve.py --data data/text --seeds 0 1 2
    python benchmarks/loss_curve.py --data data/text --steps 1000 --batch 16 --low fp8 bf16-stream
    python benchmarks/loss_curve.py --read seed0.json seed1.json seed2.json      # of runs with --json

Ours is the training step as a run takes it (on a GPU: bf16, Triton kernels); the reference is
benchmarks/reference_gpt.py in bf16 autocast, started from our weights, with the same AdamW, schedule and
batches. Their difference is set beside the spread over seeds of the reference itself. With --low our own
bf16 with its fp32 stream is the reference, and each of these precisions is compared with it.
"""

import argparse
import gc
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.bench.reference import compile_reference, fast_attention, reference_model
from deeploop.report.tables import text_table
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.recipes import get_recipe
from deeploop.train.active import ActiveRun
from deeploop.train.distributed import World, open_world
from deeploop.train.opening import open_run
from deeploop.train.optim import learning_rate
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

REFERENCE = Path(__file__).with_name("reference_gpt.py")
# What each of --low changes in the device's config.
LOW: dict[str, dict[str, Any]] = {"fp8": {"precision": "fp8"}, "bf16-stream": {"stream": "bf16"}}
Curves = dict[str, list[float]]  # losses of every step, the reference's first
NORMS = ("attention.inner", "attention.outer", "mlp.inner", "mlp.outer")


def reference_names(blocks: int) -> dict[str, str]:
    """The reference's names of our parameters."""
    names = {f"{name}.weight": f"{name}.weight" for name in ("embedding", "input_norm", "final_norm")}
    for k in range(blocks):
        block = f"blocks.{k}"
        names |= {f"{block}.norms.{i}.weight": f"{block}.{norm}.weight" for i, norm in enumerate(NORMS)}
        for branch, parts in (("attention", "q k v o q_norm k_norm"), ("mlp", "gate up down")):
            for part in parts.split():
                names[f"{block}.{branch}.{part}.weight"] = f"{block}.{branch}.branch.{part}.weight"
    return names


def small(data: Path, seed: int, steps: int, batch: int, out: Path) -> TrainConfig:
    base = get_recipe("gpt2-small")
    assert isinstance(base, TrainConfig)
    return replace(
        base,
        out=out,
        seed=seed,
        model=replace(base.model, blocks=6, width=512, heads=4, hidden=1360, context=512),
        data=replace(base.data, path=data, validation_sequences=1),
        # 1e-6 a step, gentle enough to leave the floor behind: there any two models have the same loss.
        optim=replace(
            base.optim, batch=batch, steps=steps, peak_lr=1e-6 * steps, floor_lr=0.0, warmup_steps=steps
        ),
        device=replace(base.device, micro_batch=batch),
    )


def our_losses(run: ActiveRun) -> list[float]:
    queue = StepQueue(run, StopRequest())
    results = [result for _ in range(run.config.optim.steps) for result in queue.advance()]
    results += queue.settle(everything=True)
    run.close()
    del queue, run  # and with them the memory of the CUDA graph, which the next run needs
    gc.collect()
    return [result.loss for result in results]


def reference_losses(model: nn.Module, run: ActiveRun, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    device, optim = run.world.device, run.config.optim
    if device.type == "cuda":
        compile_reference(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps, fused=device.type == "cuda")
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, optim)
        cuda = device.type == "cuda"
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda), fast_attention():
            loss = model(inputs.to(device).long(), targets.to(device).long())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def low_precision(config: TrainConfig, world: World, names: list[str]) -> Curves:
    """Our losses as they are, and in each of these precisions."""
    changed = {
        name: replace(config, out=config.out / name, device=replace(config.device, **LOW[name]))
        for name in names
    }
    configs = {"bf16": config, **changed}
    return {name: our_losses(open_run(one, world)) for name, one in configs.items()}


def both(config: TrainConfig, world: World) -> Curves:
    run = open_run(config, world)
    model = reference_model(REFERENCE, config.model).to(world.device)
    own = run.model.state_dict()
    model.load_parts({name: own[ours] for name, ours in reference_names(config.model.blocks).items()})
    started = run.task.state()
    batches = [run.task.batches(step).batches[0] for step in range(config.optim.steps)]
    run.task.load_state(started, {})
    return {"reference": reference_losses(model, run, batches), "ours": our_losses(run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--low", nargs="+", choices=LOW, default=[], help="precisions to set beside bf16")
    parser.add_argument("--json", type=Path, help="also write every loss to this file")
    parser.add_argument("--read", type=Path, nargs="+", default=[], help="such files, to print their table")
    options = parser.parse_args()
    if options.read:
        by_seed = [curves for file in options.read for curves in json.loads(file.read_text(encoding="utf-8"))]
    elif options.data is None:
        parser.error("--data is missing, or --read")
    else:
        by_seed = run_seeds(options)
    if options.json:
        options.json.write_text(json.dumps(by_seed) + "\n", encoding="utf-8")
    print(table(by_seed))


def run_seeds(options: argparse.Namespace) -> list[Curves]:
    curves = []
    with tempfile.TemporaryDirectory() as folder:
        base = small(options.data, 0, options.steps, options.batch, Path(folder))
        with open_world(base.device) as world:
            for seed in options.seeds:
                config = replace(base, seed=seed, out=Path(folder) / str(seed))
                curves.append(
                    low_precision(config, world, options.low) if options.low else both(config, world)
                )
    return curves


def table(by_seed: list[Curves]) -> str:
    """Means over tenths of the steps, their largest distance from the reference at a seed, its own spread."""
    against, *others = by_seed[0]
    steps = len(by_seed[0][against])
    tenth = max(1, steps // 10)
    rows = []
    for end in range(tenth, steps + 1, tenth):
        means = {
            name: [mean(curves[name][end - tenth : end]) for curves in by_seed] for name in (against, *others)
        }
        row = [f"{end - tenth + 1}–{end}", f"{mean(means[against]):.4f}"]
        row.append(f"{stdev(means[against]):.4f}" if len(by_seed) > 1 else "–")
        for name in others:
            gap = max((a - b for a, b in zip(means[name], means[against], strict=True)), key=abs)
            row += [f"{mean(means[name]):.4f}", f"{gap:+.4f}"]
        rows.append(row)
    header = ["steps", against, "its spread over seeds"]
    return text_table(header + [cell for name in others for cell in (name, "largest gap at a seed")], rows)


if __name__ == "__main__":
    main()
