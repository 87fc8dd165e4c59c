"""Where the time of a reasoner's training step goes on one GPU, and what its parts could take.

    python benchmarks/reasoner_step.py                    hrm-arc1 and trm-arc1 at batch 768, two minutes
    python benchmarks/reasoner_step.py --only steps       their steps alone, in bf16 and in FP8

1. A training step of each recipe: milliseconds, peak memory, kernels by kind.
2. Attention that sees every position, by backend and by length: what a length of 901 costs beside 896.
3. The products of a block, and the passes over memory between them, each beside its bound.
4. The kernels of calls without a gradient: products that do the pass after them, in bf16 and in FP8, and
   attention without padding, beside cuBLAS or cuDNN with the passes that they replace, and how far they are
   from float32.

Boards are drawn at random in ARC's format: the work does not depend on what is on them.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from profile_step import take_apart
from torch.nn.attention import SDPBackend, sdpa_kernel

from deeploop.bench.timing import matmul_ceiling, time_steps
from deeploop.config.run import RunConfig
from deeploop.nn.fp8 import in_e4m3
from deeploop.nn.kernels import attention, epilogues, norms, rotary, swiglu
from deeploop.nn.layers import rotary_table
from deeploop.report.tables import text_table
from deeploop.tasks.puzzles.data.sets import write_puzzles
from deeploop.tasks.recipes import get_recipe
from deeploop.train.distributed import open_world
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

WIDTH, HIDDEN, HEADS, HEAD = 512, 1536, 8, 64
LENGTHS = {"hrm-arc1": 901, "trm-arc1": 916}
BYTES_PER_SECOND = 4.2e12  # of a copy on an H200, reading and writing
Rows = Iterator[tuple[str, ...]]


def draw_boards(folder: Path, count: int = 2048, length: int = 900, kind: str = "maze") -> Path:
    """A set of random boards, by default of ARC's size and without its views."""
    draw = np.random.default_rng(0)
    symbols = (2, 11) if kind == "sudoku" else (1, 12)
    boards = {name: draw.integers(*symbols, (count, length), dtype=np.uint8) for name in ("inputs", "labels")}
    splits = {name: {**boards, "groups": np.array([[1, 1, 0]] * count)} for name in ("train", "test")}
    write_puzzles(folder, kind=kind, vocabulary=symbols[1], splits=splits, build={})
    return folder


def steps(recipe: str, config: RunConfig, options: argparse.Namespace) -> None:
    """A step of a recipe: its time, memory, and kernels."""
    with open_world(config.device) as world:
        run = open_run(config, world)
        queue = StepQueue(run, StopRequest())
        torch.cuda.reset_peak_memory_stats()
        timing = time_steps(queue.advance, world.device, options.steps)
        peak = (timing.peak_memory or 0) / 2**30
        micro_batch, recompute = run.task.fit
        estimate = run.task.step_bytes / 2**30
        print(
            f"\n{recipe}, {run.execution.precision}: {timing.seconds * 1e3:.1f} ms per step of "
            f"{config.optim.batch}, in micro-batches of {micro_batch}, recompute {recompute}; "
            f"peak {peak:.1f} GiB (estimate {estimate:.1f}), first step {timing.first:.1f} s"
        )
        take_apart(recipe, queue.advance, options.longest, steps=1, warm_up=0)
        run.close()
        run.model.to("meta")
        run.optimizer.state.clear()
        del queue, run
    gc.collect()
    torch.cuda.empty_cache()


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median of some runs in a row; NaN where a device or a library cannot do it."""
    try:
        return time_steps(work, torch.device("cuda"), repeats).seconds * 1e3
    except Exception as error:  # what a backend lacks is a result here
        print(f"  failed: {type(error).__name__}: {str(error)[:200]}")
        return float("nan")


def attention_rows(batch: int) -> Rows:
    """Forward, and forward with backward, of (batch, 8, T, 64) in memory of the order B, T, H, D."""
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for length in (896, 901, 916, 960, 1024):
        shape = (batch, length, HEADS, HEAD)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
        dy = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        flops = 4 * batch * length**2 * WIDTH
        for name, backend in backends.items():
            if name == "flash" and length not in LENGTHS.values():
                continue
            with sdpa_kernel(backend):
                forward = milliseconds(partial(F.scaled_dot_product_attention, q, k, v))
                inputs = [x.detach().requires_grad_() for x in (q, k, v)]
                y = F.scaled_dot_product_attention(*inputs)
                backward = milliseconds(partial(torch.autograd.grad, y, inputs, dy, retain_graph=True))
            rates = flops / forward / 1e9, 2.5 * flops / backward / 1e9
            yield (
                f"{name}, T = {length}",
                f"{forward:.3f}",
                f"{rates[0]:.0f}",
                f"{backward:.3f}",
                f"{rates[1]:.0f}",
            )


def product_rows(rows: int, ceiling: float) -> Rows:
    """The products of a block forward and backward, by cuBLAS."""
    sizes = {
        "q, k, v": (WIDTH, 3 * WIDTH),
        "o": (WIDTH, WIDTH),
        "gate, up": (WIDTH, 2 * HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    for name, (into, out) in sizes.items():
        x, w = _normal(rows, into), _normal(out, into)
        y = _normal(rows, out)
        flops = 2 * rows * into * out
        for what, work in {
            "forward": partial(torch.mm, x, w.T),
            "to the input": partial(torch.mm, y, w),
            "to the weight": partial(torch.mm, y.T, x, out_dtype=torch.float32),
        }.items():
            ms = milliseconds(work)
            bound = flops / ceiling * 1e3
            yield f"{name}, {what}", f"{ms:.3f}", f"{flops / ms / 1e9:.0f}", f"{bound:.3f}"


def pass_rows(batch: int, length: int) -> Rows:
    """The passes over memory between products: milliseconds beside bytes over the copy's rate."""
    rows = batch * length
    x, f = _normal(batch, length, WIDTH), _normal(batch, length, WIDTH)
    sides, packed = _normal(rows, 2 * HIDDEN), _normal(batch, length, 3 * WIDTH)
    cos, sin = (table.cuda() for table in rotary_table(length, HEAD))
    works: dict[str, tuple[Callable[[], object], int]] = {
        "x ← N(x + f)": (lambda: norms.residual(x, f, eps=1e-5), 6 * WIDTH),
        "silu(gate)·up": (lambda: swiglu.swiglu(sides), 6 * HIDDEN),
        "rotary of q and k": (lambda: rotary.rotary_qkv(packed, cos, sin, HEADS, None, 0.0), 8 * WIDTH),
        "z_H + x": (lambda: x + f, 6 * WIDTH),
    }
    for name, (work, per_row) in works.items():
        bound = rows * per_row / BYTES_PER_SECOND * 1e3
        yield name, f"{milliseconds(work):.3f}", f"{bound:.3f}"


class Case(NamedTuple):
    """One thing to compute, three ways."""

    ours: Callable[..., Any]  # may take the product's tiles
    fp8: Callable[..., Any]  # the same with a product in FP8
    apart: Callable[[], Any]  # the product by cuBLAS or cuDNN, and the pass after it
    exact: Callable[[int], torch.Tensor]  # some rows of it in float32
    flops: int


SCALE = 8.0  # of the FP8 operands that have one


def _matrix(w: torch.Tensor, given: float = 1.0) -> epilogues.Matrix:
    """In FP8, for an operand that was multiplied by `given`."""
    of_weights = 4.0 / w.float().square().mean().sqrt().item()
    inverse = torch.tensor(1 / (of_weights * given), device="cuda")
    return epilogues.Matrix(in_e4m3(of_weights * w), inverse=inverse)


def without_gradient(batch: int, length: int) -> dict[str, Case]:
    """The parts of a block without a gradient."""
    n, eps = batch * length, 1e-5
    rows = _normal(n, WIDTH)
    state = epilogues.State(rows, rows.float().square().view(n, 2, -1).sum(-1))
    state_fp8, scale = state._replace(fp8=in_e4m3(rows)), torch.tensor(SCALE, device="cuda")
    x3 = rows.view(batch, length, WIDTH)
    angles = tuple(table.cuda() for table in rotary_table(length, HEAD))
    q, k, v, o = (_normal(WIDTH, WIDTH) * WIDTH**-0.5 for _ in range(4))
    gate, up = (_normal(HIDDEN, WIDTH) * WIDTH**-0.5 for _ in range(2))
    down = _normal(WIDTH, HIDDEN) * HIDDEN**-0.5
    qkv = torch.cat((q, k, v))
    paired_qkv = torch.cat((epilogues.paired(q, HEAD), epilogues.paired(k, HEAD), v))
    sides, both = torch.cat((gate, up)), epilogues.interleaved(gate, up)
    packed, hidden, mixed = _normal(n, 3 * WIDTH), _normal(n, HIDDEN), _normal(n, WIDTH)

    def unit(count: int) -> torch.Tensor:
        return F.rms_norm(rows[:count].float(), (WIDTH,), None, eps)

    def by_hand(count: int) -> torch.Tensor:  # the values alone are in their own order
        return unit(count) @ v.float().T

    def heads(count: int) -> list[torch.Tensor]:
        parts = packed[:count].float().view(-1, length, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        return [parts[0] * (1 / epilogues.LOG2_E), parts[1], parts[2]]  # queries come scaled by log₂e

    def attended(count: int) -> torch.Tensor:
        y = F.scaled_dot_product_attention(*heads(count), scale=1.0)
        return y.transpose(1, 2).reshape(-1, WIDTH)

    def attend_by_cudnn() -> torch.Tensor:
        three = packed.view(batch, length, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(three[0], three[1], three[2])

    return {
        "gate": Case(
            partial(epilogues.gate, state, epilogues.Matrix(both), eps),
            partial(epilogues.gate, state_fp8, _matrix(both), eps, scale=scale),
            lambda: swiglu.swiglu(rows @ sides.T),
            lambda count: F.silu(unit(count) @ gate.float().T) * (unit(count) @ up.float().T),
            2 * n * WIDTH * 2 * HIDDEN,
        ),
        "rotate": Case(
            partial(epilogues.rotate, state, epilogues.Matrix(paired_qkv), angles, HEAD, eps),
            partial(epilogues.rotate, state_fp8, _matrix(paired_qkv), angles, HEAD, eps),
            lambda: rotary.rotary_qkv((rows @ qkv.T).view(batch, length, -1), *angles, HEADS, None, 0.0),
            by_hand,
            2 * n * WIDTH * 3 * WIDTH,
        ),
        "join after attention": Case(
            partial(epilogues.join, state, mixed, epilogues.Matrix(o), 1.0, eps),
            partial(epilogues.join, state_fp8, in_e4m3(SCALE * mixed), _matrix(o, SCALE), 1.0, eps),
            lambda: norms.residual(x3, (mixed @ o.T).view_as(x3), eps=eps),
            lambda count: unit(count) + mixed[:count].float() @ o.float().T,
            2 * n * WIDTH * WIDTH,
        ),
        "join after SwiGLU": Case(
            partial(epilogues.join, state, hidden, epilogues.Matrix(down), 1.0, eps),
            partial(epilogues.join, state_fp8, in_e4m3(SCALE * hidden), _matrix(down, SCALE), 1.0, eps),
            lambda: norms.residual(x3, (hidden @ down.T).view_as(x3), eps=eps),
            lambda count: unit(count) + hidden[:count].float() @ down.float().T,
            2 * n * WIDTH * HIDDEN,
        ),
        "attention": Case(
            partial(attention.attend, packed, length, HEADS),
            partial(attention.attend, packed, length, HEADS, scale=scale),
            attend_by_cudnn,
            attended,
            4 * batch * length**2 * WIDTH,
        ),
    }


def without_gradient_rows(batch: int, length: int) -> Rows:
    few = 2 * length  # rows that are checked
    for name, case in without_gradient(batch, length).items():
        apart, exact = milliseconds(case.apart), case.exact(few)
        yield name, "cuBLAS or cuDNN, bf16", f"{apart:.3f}", f"{case.flops / apart / 1e9:.0f}", "", ""
        for precision, work in {"bf16": case.ours, "FP8": case.fp8}.items():
            ms, found = milliseconds(work), work()
            found = found.rows if isinstance(found, epilogues.State) else found
            found = found[:few, -exact.shape[1] :].float() / (SCALE if found.element_size() == 1 else 1)
            error = (found - exact).norm() / exact.norm()
            yield (
                "",
                f"ours, {precision}",
                f"{ms:.3f}",
                f"{case.flops / ms / 1e9:.0f}",
                f"{apart / ms:.2f}",
                f"{error:.1e}",
            )


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=768)
    parser.add_argument("--steps", type=int, default=2, help="of each recipe, after the first three")
    parser.add_argument("--longest", type=int, default=8, help="kernels to list")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp8"), default=("bf16", "fp8"))
    parts = ("steps", "attention", "products", "passes", "without-gradient")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    options = parser.parse_args()
    batch = options.batch
    ceiling = matmul_ceiling(torch.device("cuda"))
    print(
        f"{torch.cuda.get_device_name()}: bf16 products of 8192 at {ceiling / 1e12:.0f} TFLOP/s", flush=True
    )
    if "steps" in options.only:
        with tempfile.TemporaryDirectory() as folder:
            data = draw_boards(Path(folder) / "boards")
            for recipe, precision in product(LENGTHS, options.precision):
                base = get_recipe(recipe)
                config = replace(
                    base,
                    out=Path(folder) / f"{recipe}-{precision}",
                    data=replace(base.data, path=data),
                    optim=replace(base.optim, batch=batch),
                    device=replace(base.device, precision=precision),
                )
                steps(recipe, config, options)
    if "attention" in options.only:
        print(f"\nattention of {batch} sequences, 8 heads of 64, every position sees all")
        head = ("", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s")
        print(text_table(head, list(attention_rows(batch))), flush=True)
    if "products" in options.only:
        print(f"\nproducts of {batch} × 901 rows")
        rows = list(product_rows(batch * 901, ceiling))
        print(text_table(("cuBLAS", "ms", "TFLOP/s", "at the ceiling"), rows), flush=True)
    if "passes" in options.only:
        print(f"\npasses over {batch} × 901 rows")
        print(text_table(("", "ms", "of its bytes"), list(pass_rows(batch, 901))), flush=True)
    if "without-gradient" in options.only:
        print(f"\nproducts with the pass after them, and attention, without a gradient; {batch} × 901 rows")
        head = ("", "", "ms", "TFLOP/s", "times as fast", "error")
        print(text_table(head, list(without_gradient_rows(batch, 901))), flush=True)


if __name__ == "__main__":
    main()
