"""Whether the fast path trains as the reference does: the same weights and batches, 200 steps, over seeds.

    python benchmarks/loss_curve.py --data data/text --seeds 0 1 2
    python benchmarks/loss_curve.py --data data/text --steps 1000 --batch 16 --precision fp8

Ours is the training step as a run takes it (on a GPU: bf16, Triton kernels); the reference is
benchmarks/reference_gpt.py in bf16 autocast, started from our weights, with the same AdamW, schedule and
batches. Their difference is set beside the spread over seeds of the reference itself. With --precision fp8
or --stream bf16 our own bf16 with its fp32 stream is the reference.
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

from deeploop.recipes import get_recipe
from deeploop.report.page import text_table
from deeploop.train.active import ActiveRun
from deeploop.train.config import TrainConfig
from deeploop.train.distributed import World, open_world
from deeploop.train.opening import open_run
from deeploop.train.optim import learning_rate
from deeploop.train.progress import StopRequest
from deeploop.train.steps import StepQueue
from deeploop.train.timing import compile_reference, fast_attention, reference_model

REFERENCE = Path(__file__).with_name("reference_gpt.py")
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


def low_precision(config: TrainConfig, world: World, **device: Any) -> tuple[list[float], list[float]]:
    """Our losses with these fields of the device's config, and as they are without."""
    changed = replace(config, out=config.out / "low-precision", device=replace(config.device, **device))
    return our_losses(open_run(changed, world)), our_losses(open_run(config, world))


def both(config: TrainConfig, world: World) -> tuple[list[float], list[float]]:
    run = open_run(config, world)
    model = reference_model(REFERENCE, config.model).to(world.device)
    own = run.model.state_dict()
    model.load_parts({name: own[ours] for name, ours in reference_names(config.model.blocks).items()})
    started = run.task.state()
    batches = [run.task.micro_batches()[0] for _ in range(config.optim.steps)]
    run.task.load_state(started, {})
    return our_losses(run), reference_losses(model, run, batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", choices=("auto", "fp8"), default="auto", help="as --device.precision")
    parser.add_argument("--stream", choices=("fp32", "bf16"), default="fp32", help="as --device.stream")
    parser.add_argument("--json", type=Path, help="also write every loss to this file")
    options = parser.parse_args()
    curves = []
    device = {"precision": options.precision, "stream": options.stream}
    against_bf16 = device != {"precision": "auto", "stream": "fp32"}
    with tempfile.TemporaryDirectory() as folder:
        base = small(options.data, 0, options.steps, options.batch, Path(folder))
        with open_world(base.device) as world:
            for seed in options.seeds:
                config = replace(base, seed=seed, out=Path(folder) / str(seed))
                curves.append(low_precision(config, world, **device) if against_bf16 else both(config, world))
    if options.json:
        options.json.write_text(json.dumps({"ours, reference by seed": curves}) + "\n", encoding="utf-8")
    rows = []
    tenth = max(1, options.steps // 10)
    for end in range(tenth, options.steps + 1, tenth):
        ours, theirs = (
            [mean(curve[end - tenth : end]) for curve in side] for side in zip(*curves, strict=True)
        )
        gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        spread = stdev(theirs) if len(theirs) > 1 else float("nan")
        rows.append(
            (
                f"{end - tenth + 1}–{end}",
                f"{mean(ours):.4f}",
                f"{mean(theirs):.4f}",
                f"{gap:.4f}",
                f"{spread:.4f}",
            )
        )
    names = ("low precision", "bf16") if against_bf16 else ("ours", "reference")
    print(text_table(("steps", *names, "largest gap at a seed", "spread over seeds"), rows))


if __name__ == "__main__":
    main()
