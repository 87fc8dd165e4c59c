"""Where the time of a decoding step goes on one GPU: kernels by name, and the pauses between them.

    python benchmarks/decode_step.py                      gpt2-small, a minute

1. How far the kernels' logits are from those of the modules in fp32.
2. A profile of replayed steps.
3. Milliseconds per step with one thing changed at a time, and by batch with our products and with cuBLAS's,
   which is what `FEW` is chosen by.

Weights are fresh: the work does not depend on them.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from deeploop.eval.decoding import Decoder, KernelStep, ModuleStep
from deeploop.eval.generation import GREEDY, choose
from deeploop.models import LoopedGPT
from deeploop.nn.cache import PositionedCache
from deeploop.nn.kernels import decode
from deeploop.report.tables import text_table
from deeploop.tasks.language.recipes import gpt2_small

PROMPT, CAPACITY = 128, 256


def build(rounds: int) -> LoopedGPT:
    with torch.device("cuda"):
        return LoopedGPT(replace(gpt2_small().model, rounds=rounds)).eval()


def decoder(model: LoopedGPT, batch: int, **settings: bool) -> Decoder:
    prompts = torch.randint(50257, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    greedy = partial(choose, sampling=GREEDY)
    made = Decoder(model, prompts, capacity=CAPACITY, choose=greedy, **settings)
    made.start()
    for _ in range(4):
        made.step()
    return made


def milliseconds(made: Decoder, steps: int = 30) -> float:
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    ends[0].record()
    for end in ends[1:]:
        made.step()
        end.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(ends))


@torch.inference_mode()
def agreement(model: LoopedGPT, batch: int) -> str:
    """One step of each on the same cache."""
    tokens = torch.randint(50257, (batch, PROMPT), device="cuda")
    found = {}
    for name, dtype in (("fp32", None), ("bf16", torch.bfloat16), ("kernels", torch.bfloat16)):
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            cache = model.new_cache(CAPACITY)
            model(tokens, cache=cache)
            at = PositionedCache(cache, torch.full((batch,), PROMPT, device="cuda"))
            step = KernelStep(model, at) if name == "kernels" else ModuleStep(model, at)
            found[name] = step(tokens[:, 0]).float()
    scale = found["fp32"].norm()
    off = {name: float((found[name] - found["fp32"]).norm() / scale) for name in ("bf16", "kernels")}
    return f"batch {batch}: from fp32, modules in bf16 {off['bf16']:.2e}, kernels {off['kernels']:.2e}"


def variants(model: LoopedGPT) -> Iterator[list[str]]:
    """Batch 1: as it is, and with one thing changed."""
    changes: dict[str, dict[str, object]] = {
        "as it is": {},
        "no programmatic dependent launch": {"_overlap": lambda _: {"PDL": False}},
        "tiles of 8192 numbers": {"TILE": 8192},
        "tiles of 4096 numbers": {"TILE": 4096},
        "the keys of a head undivided": {"SPLITS": 1},
    }
    for name, change in changes.items():
        with patch.multiple(decode, **change) if change else nullcontext():
            yield [name, f"{milliseconds(decoder(model, 1)):.3f}"]
    yield ["eager modules, fp32", f"{milliseconds(decoder(model, 1, kernels=False)):.3f}"]
    yield ["no graph", f"{milliseconds(decoder(model, 1, graph=False)):.3f}"]


def by_batch(model: LoopedGPT) -> Iterator[list[str]]:
    for batch in (4, 8):
        times = []
        for limit in (batch, 0):
            with patch.object(decode, "FEW", limit):
                times.append(milliseconds(decoder(model, batch)))
        yield [str(batch), *(f"{ms:.3f}" for ms in times)]


def kernels(model: LoopedGPT, batch: int, steps: int = 5) -> str:
    """Kernels of replayed steps: how many, microseconds of each; and of a step what no kernel covers."""
    made = decoder(model, batch)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            made.step()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    covered, end = 0.0, 0.0
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = (spans[-1][1] - spans[0][0]) / steps
    times = defaultdict(list)
    for event in events:
        times[event.name[:70]].append(event.time_range.elapsed_us())
    rows = [
        [name, f"{len(us) / steps:g}", f"{median(us):.2f}", f"{sum(us) / steps:.1f}"]
        for name, us in sorted(times.items(), key=lambda pair: -sum(pair[1]))
    ]
    table = text_table(["kernel", "per step", "µs", "µs per step"], rows[:16])
    return (
        f"R={model.rounds} batch {batch}: {whole:.1f} µs per step, {covered / steps:.1f} covered by kernels"
        f" ({len(events) / steps:g} of them, {sum(map(sum, times.values())) / steps:.1f} µs)\n{table}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = build(args.rounds)
    for batch in (1, 64):
        print(agreement(model, batch), flush=True)
        print(kernels(model, batch), flush=True)
    for row in variants(model):
        print(f"{row[1]} ms per step of batch 1: {row[0]}", flush=True)
    for batch, ours, cublas in by_batch(model):
        print(f"batch {batch}: {ours} ms per step with our products, {cublas} with cuBLAS", flush=True)


if __name__ == "__main__":
    main()
