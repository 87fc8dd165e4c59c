"""HRM and TRM on 9 × 9 Sudoku at their published settings, timed beside the public code in one process.

    python benchmarks/small_boards.py --public FOLDER          losses, speed
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from profile_step import take_apart
from reasoner_step import draw_boards

from deeploop.bench.timing import time_steps
from deeploop.config.run import RunConfig
from deeploop.report.tables import text_table
from deeploop.tasks.recipes import get_recipe
from deeploop.train.adam_atan2 import AdamATan2
from deeploop.train.distributed import open_world
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

RECIPES = {"hrm": "hrm-sudoku", "trm": "trm-sudoku"}
GPU = torch.device("cuda")


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


# ── Losses ──────────────────────────────────────────────────────────────────────────────────────────────────
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
    boards = draw_boards(folder / "arc")
    for recipe in ("hrm-arc1", "trm-arc1"):
        for graph in (True, False):
            ms, _ = time_ours(recipe, boards, 6, False, device={"graph": graph})
            yield recipe, "graph" if graph else "no graph", f"{ms:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--public", type=Path, help="folder of the public code")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--profile", action="store_true", help="say where the time of a step goes")
    parser.add_argument("--models", nargs="*", choices=[*RECIPES], default=[*RECIPES])
    parts = ("losses", "speed", "arc")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts[:2])
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    tables: list[str] = []
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        boards = draw_boards(folder / "sudoku", 1000, 81, "sudoku")
        if "losses" in options.only:
            head = ("50 losses", "graph to eager", "graph to fp32", "kernels to fp32", "eager to fp32")
            rows = [compare_losses(name, boards, 50, 96) for name in options.models]
            tables.append(text_table(head, rows))
        if "speed" in options.only:
            head = ("recipe", "precision", "ms", "public ms", "times as fast")
            tables.append(text_table(head, list(speed_rows(options, boards))))
        if "arc" in options.only:
            tables.append(text_table(("recipe", "", "ms"), list(arc_rows(options, folder))))
    print("\n" + "\n\n".join(tables), flush=True)


if __name__ == "__main__":
    main()
