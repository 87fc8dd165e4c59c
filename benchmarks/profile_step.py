"""Where the time of one training step goes on a GPU: kernels by kind, then the longest ones.

    python benchmarks/profile_step.py --recipe gpt2-small --rounds 3 --batch 32 --data data/text

With --reference the step of benchmarks/reference_gpt.py is taken apart beside it.
"""

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from deeploop.experiments.bench import BenchArgs, cells_of, reference_step
from deeploop.experiments.page import text_table
from deeploop.train.distributed import open_world
from deeploop.train.loop import open_run, train_step
from deeploop.train.progress import StopRequest

REFERENCE = Path(__file__).with_name("reference_gpt.py")
KINDS = (  # the first that matches; names are those of CUDA kernels
    ("attention", r"flash|sdpa|fmha|cudnn"),
    ("matrix products", r"nvjet|gemm|cutlass|splitK"),
    ("norms and residuals", r"_norm_(for|back)ward|rms_norm"),
    ("rotary and QK-norm", r"_rotary_"),
    ("SwiGLU", r"_swiglu_|silu"),
    ("softmax and loss", r"_cross_entropy|softmax|SoftMax|nll"),
    ("optimizer and clipping", r"multi_tensor|lpnorm|Optimizer"),
    ("sums of gains' gradients", r"reduce_kernel"),
    ("the rest: copies, casts, additions", r""),
)


def kind_of(kernel: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, kernel))


def take_apart(name: str, step: Callable[[], object], longest: int) -> None:
    for _ in range(4):  # compiled, planned and warm
        step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    events = [e for e in trace.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events = [e for e in events if e.self_device_time_total > 0 and "Optimizer.step" not in e.key]
    total = sum(e.self_device_time_total for e in events)
    kinds: Counter[str] = Counter()
    for event in events:
        kinds[kind_of(event.key)] += event.self_device_time_total
    print(f"\n{name}: {total / 1e3:.1f} ms of kernels")
    rows = [(kind, f"{us / 1e3:.1f}", f"{us / total:.1%}") for kind, us in kinds.most_common()]
    print(text_table(("kind", "ms", "share"), rows))
    events.sort(key=lambda e: -e.self_device_time_total)
    rows = [
        (e.key[:70], str(e.count), f"{e.self_device_time_total / 1e3:.2f}", kind_of(e.key))
        for e in events[:longest]
    ]
    print(text_table(("kernel", "times", "ms", "kind"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="gpt2-small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--data", type=Path, required=True, help="a prepared corpus, or a reasoner's puzzles")
    parser.add_argument(
        "--compile", choices=("auto", "on", "off"), default="auto", help="as --device.compile"
    )
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--longest", type=int, default=12, help="kernels to list")
    options = parser.parse_args()
    args = BenchArgs(
        recipes=(options.recipe,), rounds=(options.rounds,), micro_batch=(options.batch,), data=options.data
    )
    with tempfile.TemporaryDirectory() as folder:
        ((name, config),) = cells_of(options.recipe, args, Path(folder))
        config = replace(config, device=replace(config.device, compile=options.compile))
        with open_world(config.device) as world:
            run, stop = open_run(config, world), StopRequest()
            take_apart(name, lambda: train_step(run, stop), options.longest)
            run.model.to("meta")
            run.optimizer.state.clear()
            if options.reference:
                step, _ = reference_step(REFERENCE, config, world)
                take_apart(f"reference, {name}", step, options.longest)


if __name__ == "__main__":
    main()
