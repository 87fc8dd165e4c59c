"""Where the time of one training step goes on a GPU: kernels by kind, then the longest ones.

    python benchmarks/profile_step.py --recipe gpt2-small --rounds 3 --batch 32 --data data/text

With --reference the step of benchmarks/reference_gpt.py is taken apart beside it.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from deeploop.bench.options import BenchArgs
from deeploop.bench.reference import reference_step
from deeploop.bench.training import cells_of
from deeploop.report.tables import text_table
from deeploop.train.distributed import open_world
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

STEPS = 5
REFERENCE = Path(__file__).with_name("reference_gpt.py")
KINDS = (  # the first that matches; names are those of CUDA kernels
    ("attention", r"flash|sdpa|fmha|cudnn|_attend"),
    ("products with what follows", r"^_product_epilogue"),
    ("matrix products", r"nvjet|gemm|cutlass|splitK"),
    ("norms and residuals", r"_norm_(for|back)ward|rms_norm"),
    ("rotary and QK-norm", r"_rotary_|_paired_"),
    ("SwiGLU", r"_swiglu_|silu"),
    ("mixing of positions", r"^_mix_"),
    ("FP8 casts", r"^_cast"),
    ("softmax and loss", r"_cross_entropy|softmax|SoftMax|nll"),
    ("optimizer and clipping", r"^_step|multi_tensor|lpnorm|Optimizer"),
    ("sums of gains' gradients", r"reduce_kernel"),
    ("the rest: copies, casts, additions", r""),
)


def kind_of(kernel: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, kernel))


def take_apart(
    name: str, step: Callable[[], object], longest: int, *, steps: int = STEPS, warm_up: int = 4
) -> None:
    """Prints where the time of a step goes; the first `warm_up` compile, plan and warm the device."""
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / steps
    # Steps in a row and the device alone: a lone step runs at higher clocks than training does.
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in kernels if "Optimizer.step" not in e.name]
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for kernel in kernels:
        kinds[kind_of(kernel.name)] += kernel.device_time
        names[kernel.name] += kernel.device_time
    total = sum(kinds.values())
    times = Counter(kernel.name for kernel in kernels)
    print(f"\n{name}: a step takes {wall * 1e3:.1f} ms, of which {total / steps / 1e3:.1f} ms in kernels")
    rows = [(kind, f"{us / steps / 1e3:.1f}", f"{us / total:.1%}") for kind, us in kinds.most_common()]
    print(text_table(("kind", "ms", "share"), rows))
    rows = [
        (key[:70], str(times[key] // steps), f"{us / steps / 1e3:.2f}", kind_of(key))
        for key, us in names.most_common(longest)
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
    parser.add_argument("--precision", choices=("auto", "fp8"), default="auto", help="as --device.precision")
    parser.add_argument("--stream", choices=("fp32", "bf16"), default="fp32", help="as --device.stream")
    parser.add_argument("--round-hidden", action="store_true", help="as in deeploop bench")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--longest", type=int, default=12, help="kernels to list")
    options = parser.parse_args()
    args = BenchArgs(
        recipes=(options.recipe,),
        rounds=(options.rounds,),
        micro_batch=(options.batch,),
        precision=options.precision,
        stream=options.stream,
        round_hidden=options.round_hidden,
        data=options.data,
    )
    with tempfile.TemporaryDirectory() as folder:
        ((name, config),) = cells_of(options.recipe, args, Path(folder))
        config = replace(config, device=replace(config.device, compile=options.compile))
        with open_world(config.device) as world:
            run = open_run(config, world)
            take_apart(name, StepQueue(run, StopRequest()).advance, options.longest)
            run.model.to("meta")
            run.optimizer.state.clear()
            if options.reference:
                step, _ = reference_step(REFERENCE, config, world)
                take_apart(f"reference, {name}", step, options.longest)


if __name__ == "__main__":
    main()
