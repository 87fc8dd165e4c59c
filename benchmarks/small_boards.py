"""HRM and TRM on 9 × 9 Sudoku at their published settings, timed beside the public code in one process.

    python benchmarks/small_boards.py --public FOLDER          checks, losses, speed
    python benchmarks/small_boards.py --only arc               steps of hrm-arc1 and trm-arc1

FOLDER holds `models/` of sapientinc/HRM in `hrm`, that of SamsungSAILMontreal/TinyRecursiveModels in `trm`,
and in `stubs` what they import and this machine lacks. The public code is compiled as it compiles itself,
attention is torch's. Its optimizer for CUDA is not on PyPI as a wheel: both sides have ours. Its batches are
on the device already, and its metrics are not read back.

Boards are drawn at random: the work does not depend on what is on them.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from profile_step import take_apart
from reasoner_step import without_gradient

from deeploop.bench.timing import time_steps
from deeploop.config.run import RunConfig
from deeploop.nn.kernels import mixer as mixing
from deeploop.nn.kernels.attention import AttentionTiles
from deeploop.nn.kernels.epilogues import ProductTiles
from deeploop.report.tables import text_table
from deeploop.tasks.puzzles.data.sets import write_puzzles
from deeploop.tasks.recipes import get_recipe
from deeploop.train.adam_atan2 import AdamATan2
from deeploop.train.distributed import open_world
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

RECIPES = {"hrm": "hrm-sudoku", "trm": "trm-sudoku"}
GPU = torch.device("cuda")


def draw_boards(folder: Path, length: int = 81, kind: str = "sudoku", count: int = 1000) -> Path:
    draw = np.random.default_rng(0)
    symbols = (2, 11) if kind == "sudoku" else (1, 12)
    boards = {name: draw.integers(*symbols, (count, length), dtype=np.uint8) for name in ("inputs", "labels")}
    splits = {name: {**boards, "groups": np.array([[1, 1, 0]] * count)} for name in ("train", "test")}
    write_puzzles(folder, kind=kind, vocabulary=symbols[1], splits=splits, build={})
    return folder


@contextmanager
def opened(recipe: str, boards: Path, **changes: dict[str, Any]) -> Iterator[tuple[Any, StepQueue]]:
    """A run of a recipe on random boards, and its queue of steps; its memory is given back."""
    base = get_recipe(recipe)
    parts = {name: replace(getattr(base, name), **change) for name, change in changes.items()}
    with tempfile.TemporaryDirectory() as folder:
        config: RunConfig = replace(
            base, **parts, out=Path(folder) / "run", data=replace(base.data, path=boards, test_examples=8)
        )
        with open_world(config.device) as world:
            run = open_run(config, world)
            try:
                yield run, StepQueue(run, StopRequest())
            finally:
                run.close()
                run.model.to("meta")
                run.optimizer.state.clear()
                gc.collect()
                torch.cuda.empty_cache()


# ── What must hold before anything is timed ─────────────────────────────────────────────────────────────────
def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def check_mixer(boards: int = 8, positions: int = 97, width: int = 512, hidden: int = 512) -> None:
    """The mixer's kernels in bf16 against float64."""
    draw = partial(torch.randn, device=GPU)
    x, dy = (draw(boards, positions, width).bfloat16() for _ in range(2))
    gate, up = (draw(hidden, positions) * positions**-0.5 for _ in range(2))
    down, alpha, eps = draw(positions, hidden) * hidden**-0.5, 1.7, 1e-5
    sides = F.pad(torch.cat((gate, up)).bfloat16(), (0, 128 - positions)).contiguous()
    own = mixing.Mixer(sides, F.pad(down.bfloat16().T, (0, 128 - positions)).contiguous())

    def exact(x: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        g, u, d = matrices
        columns = x.transpose(1, 2)
        f = (F.silu(columns @ g.T) * (columns @ u.T)) @ d.T
        return F.rms_norm(alpha * columns + f, (positions,), None, eps).transpose(1, 2)

    wide = [t.double().requires_grad_() for t in (x, gate, up, down)]
    expected = exact(*wide)
    expected.backward(dy.double())
    r = torch.empty(boards, width, device=GPU)
    y = mixing.mix(x, own, alpha, eps, r=r)
    errors = {"y": error(y, expected)}
    squares = x.float().square().sum(-1).view(-1, 1)
    normed = exact(F.rms_norm(x.double(), (width,), None, eps), *wide[1:])
    errors["y of a state"] = error(mixing.mix(x, own, alpha, eps, squares=squares), normed)
    found = mixing.mix_backward(x, y, r, dy, own, alpha, torch.float32)
    names = ("dx", "dgate", "dup", "ddown")
    for name, gradient, leaf in zip(names, found, wide, strict=True):
        assert leaf.grad is not None
        errors[name] = error(gradient, leaf.grad)
    print("mixer against float64:", {name: f"{value:.1e}" for name, value in errors.items()})
    assert max(errors.values()) < 2e-2, errors


def check_optimizer() -> None:
    """The optimizer's kernel against the same step on the CPU."""
    draw = torch.Generator().manual_seed(0)
    here, there = (torch.nn.Parameter(torch.ones(333, 7, device=d)) for d in (GPU, "cpu"))
    ours, plain = (AdamATan2([p], lr=0.1, weight_decay=0.3, ema=0.9) for p in (here, there))
    for _ in range(5):
        there.grad = torch.randn(333, 7, generator=draw) ** 5
        here.grad = there.grad.to(GPU)
        ours.step()
        plain.step()
    for name, own in ours.state[here].items():
        torch.testing.assert_close(own.cpu(), plain.state[there][name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(here.detach().cpu(), there.detach(), rtol=1e-5, atol=1e-5)
    print("optimizer's kernel: the step on the CPU")


LEARNS = {"warmup_steps": 10, "peak_lr": 1e-4, "puzzle_lr": 1e-4}


def losses(recipe: str, boards: Path, steps: int, batch: int, **device: Any) -> list[float]:
    with opened(recipe, boards, optim={"batch": batch, **LEARNS}, device=device) as (run, queue):
        print(f"  {recipe}, batch {batch}: {run.execution.describe()}", flush=True)
        return [result.loss for _ in range(steps) for result in queue.advance(everything=True)]


def compare_losses(name: str, boards: Path, steps: int, batch: int) -> tuple[str, ...]:
    """The losses as chosen, without a graph and of the eager modules, beside those of fp32."""
    recipe = RECIPES[name]
    ways: dict[str, dict[str, Any]] = {
        "graph": {},
        "kernels": {"graph": False},
        "eager": {"compile": "off"},
        "fp32": {"compile": "off", "precision": "fp32"},
    }
    found = {way: np.array(losses(recipe, boards, steps, batch, **how)) for way, how in ways.items()}
    apart = {way: np.abs(own / found["fp32"] - 1).max() for way, own in found.items()}
    pair = np.abs(found["graph"] / found["eager"] - 1).max()
    for way, own in found.items():
        print(f"  {way:8}", " ".join(f"{value:.4f}" for value in own[:: max(1, steps // 8)]), flush=True)
    assert np.isfinite(found["graph"]).all()
    assert pair < 3 * max(apart["eager"], 2e-3), (apart, pair)
    return name, *(f"{value:.2%}" for value in (pair, apart["graph"], apart["kernels"], apart["eager"]))


# ── The public code ─────────────────────────────────────────────────────────────────────────────────────────
def public_step(name: str, folder: Path, batch: int) -> Callable[[], None]:
    """A training step of the public code, compiled as published."""
    for module in [key for key in sys.modules if key.split(".")[0] == "models"]:
        del sys.modules[module]
    sys.path[:0] = [str(folder / name), str(folder / "stubs")]
    try:
        from models.losses import ACTLossHead
        from models.sparse_embedding import CastedSparseEmbeddingSignSGD_Distributed

        if name == "hrm":
            from models.hrm.hrm_act_v1 import HierarchicalReasoningModel_ACTV1 as Model
        else:
            from models.recursive_reasoning.trm import TinyRecursiveReasoningModel_ACTV1 as Model
    finally:
        del sys.path[:2]
    own: dict[str, Any] = {
        "hrm": {"H_cycles": 2, "L_cycles": 2, "H_layers": 4, "L_layers": 4, "pos_encodings": "rope"},
        "trm": {
            **{"H_cycles": 3, "L_cycles": 6, "H_layers": 0, "L_layers": 2, "pos_encodings": "none"},
            **{"mlp_t": True, "puzzle_emb_len": 16, "no_ACT_continue": True},
        },
    }[name]
    shared = {"hidden_size": 512, "num_heads": 8, "expansion": 4, "puzzle_emb_ndim": 512, "causal": False}
    sizes = {"batch_size": batch, "seq_len": 81, "vocab_size": 11, "num_puzzle_identifiers": 1}
    halting = {"halt_max_steps": 16, "halt_exploration_prob": 0.1}
    rate = 7e-5 if name == "hrm" else 1e-4
    with GPU:
        model = ACTLossHead(Model({**own, **shared, **sizes, **halting}), "stablemax_cross_entropy")
        compiled = torch.compile(model, dynamic=False) if name == "hrm" else torch.compile(model)
    compiled.train()
    table = CastedSparseEmbeddingSignSGD_Distributed(
        model.model.puzzle_emb.buffers(), lr=rate, weight_decay=1.0, world_size=1
    )
    optimizers = [table, AdamATan2(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=1.0)]
    shadow = {} if name == "hrm" else {key: p.data.clone() for key, p in model.named_parameters()}
    draw = torch.Generator(device=GPU).manual_seed(0)
    batches = [
        {
            key: torch.randint(low, 11, (batch, 81), generator=draw, device=GPU, dtype=torch.int32)
            for key, low in (("inputs", 1), ("labels", 2))
        }
        | {"puzzle_identifiers": torch.zeros(batch, dtype=torch.int32, device=GPU)}
        for _ in range(8)
    ]
    with GPU:
        carry = compiled.initial_carry(batches[0])
    done = 0

    def step() -> None:
        nonlocal carry, done
        carry, loss, *_ = compiled(carry=carry, batch=batches[done % 8], return_keys=[])
        (loss / batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for key, p in model.named_parameters() if shadow else ():  # its EMA
            shadow[key] = (1 - 0.999) * p.data + 0.999 * shadow[key]
        done += 1

    return step


# ── Times ───────────────────────────────────────────────────────────────────────────────────────────────────
def time_ours(recipe: str, boards: Path, steps: int, profiled: bool, **changes: Any) -> tuple[float, float]:
    """Milliseconds of a step, and seconds of the first."""
    with opened(recipe, boards, **changes) as (run, queue):
        timing = time_steps(queue.advance, GPU, steps)
        what = f"{recipe}, {run.execution.describe()}"
        peak = (timing.peak_memory or 0) / 2**30
        print(
            f"\n{what}: {timing.seconds * 1e3:.2f} ms, micro-batch {run.task.fit.micro_batch}, {peak:.1f} GiB"
        )
        host = time.perf_counter()
        queue.submit()
        run.count_step()
        print(f"  the host alone: {(time.perf_counter() - host) * 1e3:.1f} ms", flush=True)
        queue.settle(everything=True)
        if profiled:
            take_apart(recipe, queue.advance, 14, steps=3, warm_up=0)
    return timing.seconds * 1e3, timing.first


def speed_rows(options: argparse.Namespace, boards: Path) -> Iterator[tuple[str, ...]]:
    for name in options.models:
        recipe, found = RECIPES[name], dict[str, float]()
        for precision, graph in (("bf16", False), ("bf16", True), ("fp8", True)):
            changes = {"device": {"precision": precision, "graph": graph}}
            way = precision if graph else f"{precision}, no graph"
            try:
                profiled = options.profile and way != "bf16, no graph"
                found[way], first = time_ours(recipe, boards, options.steps, profiled, **changes)
                print(f"  first step {first:.1f} s", flush=True)
            except ValueError as refusal:
                print(f"{recipe}, {way}: refused: {refusal}", flush=True)
        public = float("nan")
        if options.public:
            step = public_step(name, options.public, get_recipe(recipe).optim.batch)
            timing = time_steps(step, GPU, options.steps)
            public = timing.seconds * 1e3
            print(f"public {name}: {public:.2f} ms, first step {timing.first:.1f} s", flush=True)
            if options.profile:
                take_apart(f"public {name}", step, 6, steps=3, warm_up=0)
            del step
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
        for way, ms in found.items():
            yield recipe, way, f"{ms:.2f}", f"{public:.2f}", f"{public / ms:.2f}"


def arc_rows(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, ...]]:
    boards = draw_boards(folder / "arc", 900, "maze", 2048)
    for recipe in ("hrm-arc1", "trm-arc1"):
        for graph in (True, False):
            ms, _ = time_ours(recipe, boards, 6, False, device={"graph": graph})
            yield recipe, "graph" if graph else "no graph", f"{ms:.1f}"


def product_rows(boards: int = 384, length: int = 82) -> Iterator[tuple[str, ...]]:
    """The kernels of calls without a gradient at HRM's size, by tiles; the first are those that are used."""
    cases = without_gradient(boards, length)
    joins = [
        (128, 256, 64, 3, 8, 1),
        (128, 128, 64, 3, 4, 2),
        (256, 128, 64, 3, 8, 1),
        (128, 128, 64, 4, 4, 2),
    ]
    cuts: dict[str, list[tuple[int, ...]]] = {
        "attention": [(64, 64, 3, 4), (128, 128, 1, 4), (128, 128, 1, 8), (64, 128, 1, 4), (128, 32, 3, 4)],
        "rotate": [*joins[:2], joins[3]],
        "join after attention": joins,
        "join after SwiGLU": joins,
        "gate": [(128, 256, 64, 4, 8, 1), (256, 128, 64, 4, 8, 1), (128, 128, 64, 3, 4, 2)],
    }
    for name, tiles in cuts.items():
        case, make = cases[name], AttentionTiles if name == "attention" else ProductTiles
        for cut in tiles:
            ms = attempt(partial(case.ours, cut=make(*cut)))
            rate = f"{case.flops / float(ms) / 1e9:.0f}" if ms[0].isdigit() else ""
            print(name, cut, ms, rate, flush=True)
            yield name, str(cut), ms, rate


def attempt(work: Callable[[], object]) -> str:
    """Milliseconds, or what failed: what does not fit is a result here."""
    try:
        return f"{time_steps(work, GPU, 5).seconds * 1e3:.3f}"
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:60]}"


def tile_rows(boards: int = 768, positions: int = 97, width: int = 512) -> Iterator[tuple[str, ...]]:
    """The mixer at the published size, by tiles."""
    draw = partial(torch.randn, device=GPU, dtype=torch.bfloat16)
    x, dy = draw(boards, positions, width), draw(boards, positions, width)
    own = mixing.Mixer(draw(1024, 128) * 0.1, draw(512, 128) * 0.05)
    r = torch.empty(boards, width, device=GPU)
    y = mixing.mix(x, own, 1.0, 1e-5, r=r)
    forward = [(128, 64, 3, 8), (64, 64, 3, 4), (128, 128, 2, 8), (64, 64, 2, 4), (128, 32, 4, 8)]
    backward = [(128, 32, 2, 8), (64, 32, 3, 4), (64, 64, 2, 8), (128, 64, 2, 8), (64, 32, 2, 8)]
    for kind, cuts in (("forward", forward), ("backward", backward)):
        for cut in cuts:
            tiles = mixing.MixerTiles(*cut)
            work = (
                partial(mixing.mix, x, own, 1.0, 1e-5, cut=tiles)
                if kind == "forward"
                else partial(mixing.mix_backward, x, y, r, dy, own, 1.0, torch.float32, cut=tiles)
            )
            ms = attempt(work)
            print(kind, cut, ms, flush=True)
            yield kind, str(cut), ms, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--public", type=Path, help="folder of the public code")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--profile", action="store_true", help="say where the time of a step goes")
    parser.add_argument("--models", nargs="*", choices=[*RECIPES], default=[*RECIPES])
    parts = ("checks", "losses", "speed", "tiles", "arc", "compile-public")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts[:3])
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    tables: list[str] = []
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        boards = draw_boards(folder / "sudoku")
        if "compile-public" in options.only:  # fills the compiler's cache on disk
            for name in options.models:
                public_step(name, options.public, get_recipe(RECIPES[name]).optim.batch)()
                torch._dynamo.reset()
        if "checks" in options.only:
            check_mixer()
            check_optimizer()
        if "losses" in options.only:
            head = ("50 losses", "graph to eager", "graph to fp32", "kernels to fp32", "eager to fp32")
            rows = [compare_losses(name, boards, 50, 96) for name in options.models]
            tables.append(text_table(head, rows))
        if "speed" in options.only:
            head = ("recipe", "precision", "ms", "public ms", "times as fast")
            tables.append(text_table(head, list(speed_rows(options, boards))))
        if "tiles" in options.only:
            head = ("", "tiles", "ms", "TFLOP/s")
            tables.append(text_table(head, [*tile_rows(), *product_rows()]))
        if "arc" in options.only:
            tables.append(text_table(("recipe", "", "ms"), list(arc_rows(options, folder))))
    print("\n" + "\n\n".join(tables), flush=True)


if __name__ == "__main__":
    main()
