"""Time a block's products in bf16 and in FP8, and the casts that FP8 needs, on this GPU.

    python benchmarks/fp8_products.py

Products are qkv, o, gate and up, down, each forward, for the gradient of its input (dgrad) and of its weight
(wgrad). FP8 is `torch._scaled_mm` with one scale per tensor, with and without fast accumulation. The first
table says, kernel by kernel, whether this GPU and its compiler compute what they should.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.nn.fp8 import E4M3, E5M2, Product, multiply
from deeploop.nn.kernels import casts, swiglu
from deeploop.report.tables import text_table

CALLS = 10
TILES = [(64, 64, 4), (64, 128, 8), (128, 128, 8)]


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
    """Prints the casts of a visit at several tiles."""
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
    rows = []
    usual = dict(casts.TILE)
    for name, (call, moved) in calls.items():
        cells = []
        for tile_n, tile_w, warps in TILES:
            casts.TILE.update(TILE_N=tile_n, TILE_W=tile_w, num_warps=warps)
            cells.append(milliseconds(call, least / 5))
        casts.TILE.update(usual)
        rows.append((name, *(f"{ms * 1e3:.0f} ({moved / ms / 1e9:.1f})" for ms in cells)))
    print(f"\n{size.name}, {n} tokens: µs (TB/s) of casts, by tile and warps")
    print(text_table(("", *(f"{a}×{b}, {c}" for a, b, c in TILES)), rows))


def check(size: Size) -> None:
    """Prints how far each kernel's FP8 output is from torch's, and how many of its values are not finite."""
    n, d, h = 4096, size.width, size.hidden
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    scale = torch.tensor(4.0, device="cuda")
    fake = lambda x, dtype=E4M3: (x.float() * scale).to(dtype)  # noqa: E731
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for name, x in {"bf16": draw(n, d), "fp32": draw(2 * h, d).float()}.items():
        rows8, columns8 = torch.zeros_like(x).to(E4M3), torch.zeros_like(x.T.contiguous()).to(E4M3)
        casts.cast_into(x, scale, rows8, columns8)
        results |= {f"cast of {name}": (rows8, fake(x)), f"cast of {name}, transposed": (columns8, fake(x).T)}
        results |= {f"transpose of a cast of {name}": (casts.transposed(rows8), rows8.T)}
    sides, dhidden = draw(n, 2 * h), draw(n, h)
    dsides, dsides_t, hidden_t = swiglu.swiglu_backward_fp8(sides, dhidden, (E5M2, E4M3), (scale, scale))
    g, u = (side.float().requires_grad_() for side in sides.chunk(2, dim=1))
    hidden = torch.nn.functional.silu(g) * u
    exact = torch.cat(torch.autograd.grad(hidden, (g, u), dhidden.float()), dim=1)
    results |= {
        "SwiGLU's gradients": (dsides, fake(exact, E5M2)),
        "SwiGLU's gradients, transposed": (dsides_t, dsides.T),
    }
    results |= {"SwiGLU's values, transposed": (hidden_t, fake(hidden.detach()).T)}
    x, w, dy = fake(draw(n, d)), fake(draw(2 * h, d)), fake(draw(n, 2 * h), E5M2)
    inverse = scale.reciprocal()
    product = Product(w, w.T.contiguous(), inverse, scale, inverse, scale, inverse)
    wide = {name: t.float() / 4 for name, t in (("x", x), ("w", w), ("dy", dy))}
    transposes = dy.T.contiguous(), x.T.contiguous()
    results |= {
        "forward": (product.forward(x), wide["x"] @ wide["w"].T),
        "dgrad": (product.input_gradient(dy), wide["dy"] @ wide["w"]),
        "wgrad": (product.weight_gradient(*transposes), wide["dy"].T @ wide["x"]),
    }
    table = []
    for name, (ours, theirs) in results.items():
        a, b = ours.float(), theirs.float()
        table.append((name, f"{(a - b).norm() / b.norm():.1e}", str(int((~a.isfinite()).sum()))))
    print(f"\n{size.name}: relative difference, and values that are not finite")
    print(text_table(("kernel", "difference", "not finite"), table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ms", type=float, default=30.0, help="of each timing, twice")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for size in SIZES:
        check(size)
    for size in SIZES:
        products(size, options.ms)
        cast_times(size, options.ms)
    for size in SIZES:  # the other batch
        products(size._replace(tokens=3 * 16 * 1024 - size.tokens), options.ms)


if __name__ == "__main__":
    main()
