"""What FP8 can give: the products of a block in bf16 and in FP8, and the casts that FP8 needs, on this GPU.

    python benchmarks/fp8_products.py

Products are qkv, o, gate and up, down, each forward, for the gradient of its input (dgrad) and of its weight
(wgrad). FP8 is `torch._scaled_mm` with one scale per tensor, with and without fast accumulation. The last
table predicts the steps of docs/performance.md.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.nn.kernels import casts
from deeploop.report.page import text_table

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TILES = [(64, 64, 4), (64, 128, 8), (128, 128, 8)]


class Size(NamedTuple):
    """A model at its batch, and its step in docs/performance.md."""

    name: str
    width: int
    hidden: int
    tokens: int
    visits: int
    step_ms: float


SIZES = [
    Size("gpt2-medium R=3", 1024, 2736, 16 * 1024, 72, 222.3),
    Size("gpt2-small R=7", 768, 2048, 32 * 1024, 84, 320.3),
]


def milliseconds(call: Callable[[], object], least: float) -> float:
    """The median of calls in a row that take some `least` ms in all, after as many to warm up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    count = max(5, int(least / max(began.elapsed_time(ended), 1e-3)))
    for _ in range(count):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events))


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
        "forward": (x8, w8.T, torch.bfloat16),
        "dgrad": (dy8, wt8.T, torch.bfloat16),
        "wgrad": (dyt8, xt8.T, torch.float32),
    }
    times = {}
    for kind, (a, b, out) in operands.items():
        narrow = [
            milliseconds(
                lambda a=a, b=b, out=out, fast=fast: torch._scaled_mm(
                    a, b, one, one, out_dtype=out, use_fast_accum=fast
                ),
                least,
            )
            for fast in (True, False)
        ]
        times[kind] = (milliseconds(wide[kind], least), *narrow)
    return times


def products(size: Size, least: float) -> tuple[float, float, float]:
    """Prints the products of a visit; ms of all of them in bf16, and in FP8 with and without fast sums."""
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
    return total[0], total[1], total[2]


def cast_times(size: Size, least: float) -> dict[str, float]:
    """Prints the casts of a visit at several tiles; ms of the best of each."""
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
    best, rows = {}, []
    usual = dict(casts.TILE)
    for name, (call, moved) in calls.items():
        cells = []
        for tile_n, tile_w, warps in TILES:
            casts.TILE.update(TILE_N=tile_n, TILE_W=tile_w, num_warps=warps)
            cells.append(milliseconds(call, least / 5))
        casts.TILE.update(usual)
        best[name] = min(cells)
        rows.append((name, *(f"{ms * 1e3:.0f} ({moved / ms / 1e9:.1f})" for ms in cells)))
    print(f"\n{size.name}, {n} tokens: µs (TB/s) of casts, by tile and warps")
    print(text_table(("", *(f"{a}×{b}, {c}" for a, b, c in TILES)), rows))
    return best


def predict(size: Size, total: tuple[float, float, float], casts_ms: dict[str, float]) -> list[str]:
    """A step with all products in FP8: what products save, less transposes; other traffic stays as it is."""
    # h twice and the gradients of both branches are transposed, the attention's output cast.
    extra = 4 * casts_ms["transpose d"] + casts_ms["transpose 3d"] + casts_ms["cast d from bf16, both"]
    cells = [size.name, f"{size.step_ms:.1f}", f"{extra * size.visits:.1f}"]
    for narrow in total[1:]:
        saved = (total[0] - narrow - extra) * size.visits
        cells.append(f"{size.step_ms - saved:.1f} ({size.step_ms / (size.step_ms - saved):.2f}×)")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ms", type=float, default=30.0, help="of each timing, twice")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    rows = []
    for size in SIZES:
        rows.append(predict(size, products(size, options.ms), cast_times(size, options.ms)))
    for size in SIZES:  # the other batch
        products(size._replace(tokens=3 * 16 * 1024 - size.tokens), options.ms)
    print("\nms of a step")
    print(text_table(("", "bf16, measured", "casts", "FP8, fast sums", "FP8"), rows))


if __name__ == "__main__":
    main()
