"""Time a block's products in bf16 and in FP8, and the casts that FP8 needs, on this GPU.

    python benchmarks/fp8_products.py

Products are qkv, o, gate and up, down, each forward, for the gradient of its input (dgrad) and of its weight
(wgrad). FP8 is `torch._scaled_mm` with one scale per tensor, with and without fast accumulation. Whether the
kernels compute what they should, `make test-gpu` says.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.nn.fp8 import E4M3, E5M2, multiply
from deeploop.nn.kernels import casts
from deeploop.report.tables import text_table

CALLS = 10


class Size(NamedTuple):
    """A model at its batch."""

    name: str
    width: int
    hidden: int
    tokens: int


SIZES = [
    Size("gpt2-medium", 1024, 2736, 16 * 1024),
    Size("gpt2-small", 768, 2048, 32 * 1024),
]


def milliseconds(call: Callable[[], object], least: float) -> float:
    """The median over replays of a CUDA graph of ten calls, as the training step is one; `least` ms in all.

    Called from Python, a cast would take as long as its launch.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    took = replays(graph, 2)[-1]
    return median(replays(graph, max(3, int(least / took)))) / CALLS


def replays(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """ms of each of so many replays in a row."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def fp8(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    return x.to(dtype)


def product_times(n: int, k: int, m: int, least: float) -> dict[str, tuple[float, float, float]]:
    """ms in bf16, FP8 with fast accumulation and without, of x (n, k) @ w (m, k).T and its gradients."""
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, w, dy = draw(n, k), draw(m, k), draw(n, m)
    one = torch.ones((), device="cuda")
    wide: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: x @ w.T,
        "dgrad": lambda: dy @ w,
        "wgrad": lambda: torch.mm(dy.T, x, out_dtype=torch.float32),
    }
    x8, xt8 = fp8(x), fp8(x.T.contiguous())
    w8, wt8 = fp8(w), fp8(w.T.contiguous())
    dy8, dyt8 = fp8(dy, E5M2), fp8(dy.T.contiguous(), E5M2)
    operands = {
        "forward": (x8, w8, torch.bfloat16),
        "dgrad": (dy8, wt8, torch.bfloat16),
        "wgrad": (dyt8, xt8, torch.float32),
    }
    times = {}
    for kind, (a, b, out) in operands.items():
        narrow = [
            milliseconds(lambda a=a, b=b, out=out, fast=fast: multiply(a, b, one, one, out, fast=fast), least)
            for fast in (True, False)
        ]
        times[kind] = (milliseconds(wide[kind], least), *narrow)
    return times


def products(size: Size, least: float) -> None:
    """Prints the products of a visit: in bf16, and in FP8 with and without fast sums."""
    n, d, h = size.tokens, size.width, size.hidden
    shapes = {"qkv": (d, 3 * d), "o": (d, d), "gate, up": (d, 2 * h), "down": (h, d)}
    rows, total = [], [0.0, 0.0, 0.0]
    for name, (k, m) in shapes.items():
        for kind, times in product_times(n, k, m, least).items():
            rates = [f"{ms:.3f} ({2 * n * k * m / ms / 1e9:.0f})" for ms in times]
            rows.append((name, kind, *rates, f"{times[0] / times[1]:.2f}×", f"{times[0] / times[2]:.2f}×"))
            total = [t + ms for t, ms in zip(total, times, strict=True)]
    ratios = [f"{total[0] / ms:.2f}×" for ms in total[1:]]
    rows.append(("all", "", *(f"{ms:.3f}" for ms in total), *ratios))
    print(f"\n{size.name}, {n} tokens: ms (TFLOP/s) of a visit's products")
    header = ("product", "", "bf16", "FP8, fast sums", "FP8", "fast", "not fast")
    print(text_table(header, rows))


def cast_times(size: Size, least: float) -> None:
    """Prints the casts of a visit."""
    n, d, h = size.tokens, size.width, size.hidden
    scale = torch.ones((), device="cuda")
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    for name, width in {"transpose d": d, "transpose 3d": 3 * d, "transpose 2·hidden": 2 * h}.items():
        x8 = torch.randn(n, width, device="cuda").to(E5M2)
        calls[name] = (lambda x8=x8: casts.transposed(x8), 2 * n * width)
    y = torch.randn(n, d, device="cuda", dtype=torch.bfloat16)
    rows8, columns8 = (
        torch.empty(n, d, device="cuda", dtype=E4M3),
        torch.empty(d, n, device="cuda", dtype=E4M3),
    )
    calls["cast d from bf16, both"] = (lambda: casts.cast_into(y, scale, rows8, columns8), 4 * n * d)
    w = torch.randn(2 * h, d, device="cuda")
    w8 = torch.empty(2 * h, d, device="cuda", dtype=E4M3)
    wt8 = torch.empty(d, 2 * h, device="cuda", dtype=E4M3)
    calls["cast gate, up from fp32, both"] = (lambda: casts.cast_into(w, scale, w8, wt8), 12 * h * d)
    times = {name: (milliseconds(call, least / 5), moved) for name, (call, moved) in calls.items()}
    rows = [(name, f"{ms * 1e3:.0f}", f"{moved / ms / 1e9:.1f}") for name, (ms, moved) in times.items()]
    print(f"\n{size.name}, {n} tokens: casts")
    print(text_table(("", "µs", "TB/s"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ms", type=float, default=30.0, help="of each timing, twice")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for size in SIZES:
        products(size, options.ms)
        cast_times(size, options.ms)
    for size in SIZES:  # the other batch
        products(size._replace(tokens=3 * 16 * 1024 - size.tokens), options.ms)


if __name__ == "__main__":
    main()
