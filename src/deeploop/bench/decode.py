"""`deeploop bench --decode`: decoding speed, compared with the memory bandwidth and with transformers.

A step must read every matrix of every visit, the head, and the keys and values of all positions so far. The
bandwidth of a copy in the same process gives the least time that this takes. Weights are fresh: the work does
not depend on them.
"""

import copy
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from deeploop.bench import collect
from deeploop.bench.options import UNTIMED, BenchArgs
from deeploop.bench.timing import time_steps
from deeploop.eval.decoding import describe, fits_kernels
from deeploop.eval.generation import generate_batch
from deeploop.models.accounting import block_matrix_count
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.report.tables import Table
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.recipes import get_recipe
from deeploop.train.device import device_name
from deeploop.train.distributed import open_world

CACHES = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
"""transformers' caches: its default, and one of fixed size. Compiled, the second takes minutes per depth."""


def run(args: BenchArgs) -> str:
    """Time every cell and return the table to print."""
    for recipe in args.recipes:
        checked_model(recipe, args)  # all of them before the first is timed
    with open_world(replace(get_recipe(args.recipes[0]).device, kind=args.device)) as world:
        bandwidth = copy_bandwidth(world.device)
        facts = {
            "device": device_name(world.device),
            "copy_bytes_per_s": bandwidth,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
        }
        bar = tqdm(args.recipes, desc="bench", disable=None, leave=False)
        rows = (row for name in bar for row in measure(name, world.device, args, bandwidth))
        return report(collect(rows, facts, args))


def checked_model(recipe: str, args: BenchArgs) -> GPTConfig:
    config = get_recipe(recipe)
    if not isinstance(config, TrainConfig):
        raise ValueError(f"recipes={recipe}: is no language model's; --decode needs one")
    context = config.model.context
    if args.prompt_tokens + args.new_tokens - 1 > context:
        raise ValueError(
            f"prompt_tokens={args.prompt_tokens}, new_tokens={args.new_tokens}: must fit the context "
            f"{context} of {recipe}"
        )
    return config.model


def measure(recipe: str, device: torch.device, args: BenchArgs, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Measure the cells of a recipe; with transformers installed, also its `generate`."""
    with device:
        model = LoopedGPT(checked_model(recipe, args)).eval()
    theirs = exported(model) if importlib.util.find_spec("transformers") is not None else None
    generator = torch.Generator().manual_seed(0)
    for rounds, batch in product(args.rounds, args.batch):
        model.set_rounds(rounds)
        config = replace(model.config, rounds=rounds)
        prompts = torch.randint(config.vocabulary, (batch, args.prompt_tokens), generator=generator)
        first, seconds = time_decoding(model, prompts, args.new_tokens)
        size = 2 if fits_kernels(model) else 4
        needed = step_bytes(config, batch, args.prompt_tokens + (UNTIMED + args.new_tokens) // 2, size)
        row = {
            "cell": f"{recipe} R={rounds}",
            "batch": batch,
            "execution": describe(model),
            "tokens_per_s": batch / seconds,
            "step_s": seconds,
            "first_token_s": first,
            "step_bytes": needed,
            "share_of_bandwidth": needed / bandwidth / seconds,
        }
        if theirs is not None:
            theirs.set_rounds(rounds)
            steps = {
                cache: time_transformers(theirs, prompts.to(device), args.new_tokens, settings)
                for cache, settings in CACHES.items()
            }
            row |= {f"transformers_{cache}_tokens_per_s": batch / step for cache, step in steps.items()}
            row["ratio"] = min(steps.values()) / seconds
        yield row


def time_decoding(model: LoopedGPT, prompts: Tensor, count: int) -> tuple[float, float]:
    """Measure the seconds to the first token, and per step after the first few; the best of two runs."""
    rows = prompts.tolist()
    for _ in generate_batch(model, rows, max_tokens=UNTIMED):  # compiles
        pass
    firsts, steps = [], []
    for _ in range(2):
        times = [time.perf_counter()]
        for _ in generate_batch(model, rows, max_tokens=count):
            times.append(time.perf_counter())
        firsts.append(times[1] - times[0])
        steps.append((times[-1] - times[UNTIMED]) / (count - UNTIMED))
    return min(firsts), min(steps)


def exported(model: LoopedGPT) -> Any:
    """Export the model as `deeploop export` does, and load it with transformers on a GPU in bf16."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from deeploop.models.hf import DeepLoopForCausalLM

    device = model.cos.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        DeepLoopForCausalLM.from_gpt(copy.deepcopy(model).to(dtype)).save_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return loaded.to(device).eval()


def time_transformers(model: Any, prompts: Tensor, count: int, settings: dict[str, Any]) -> float:
    """Measure the seconds per step of `generate` as `time_decoding` does.

    The first call is not timed, as attention kernels may be chosen anew for every number of keys.
    """

    def step() -> float:
        times: list[float] = []

        def stamp(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[stamp],
            **settings,
        )
        out.tolist()  # waits for the device
        assert len(times) == count
        return (time.perf_counter() - times[UNTIMED - 1]) / (count - UNTIMED)

    step()
    return min(step() for _ in range(2))


def step_bytes(config: GPTConfig, batch: int, positions: int, size: int) -> int:
    """Count the bytes that a step must read: all matrices visited, the head's, keys and values."""
    visits = config.prelude + config.depth + config.coda
    matrices = visits * block_matrix_count(config) + config.vocabulary * config.width
    cache = visits * batch * positions * 2 * config.grouped_heads * config.head_size
    return size * (matrices + cache)


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second, read and written, of a large copy."""
    count = 2**31 if device.type == "cuda" else 2**26
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / time_steps(lambda: target.copy_(source), device, 10).seconds


def report(record: dict[str, Any]) -> str:
    """Format the table, and explain its columns."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "recipe": lambda row: row["cell"],
        "batch": lambda row: str(row["batch"]),
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "ms/step": lambda row: f"{row['step_s'] * 1e3:.3f}",
        "MB/step": lambda row: f"{row['step_bytes'] / 1e6:,.0f}",
        "of bandwidth": lambda row: f"{row['share_of_bandwidth']:.0%}",
        "first token, ms": lambda row: f"{row['first_token_s'] * 1e3:.1f}",
    }
    if "ratio" in record["cells"][0]:
        columns |= {
            "transformers": lambda row: f"{row['transformers_dynamic_tokens_per_s']:,.0f}",
            "static cache": lambda row: f"{row['transformers_static_tokens_per_s']:,.0f}",
            "ratio": lambda row: f"{row['ratio']:.2f}×",
        }
    table = Table.of("decoding", "", record["cells"], columns)
    return (
        f"{record['device']}: copies {record['copy_bytes_per_s'] / 1e12:.3g} TB/s; prompts of "
        f"{record['prompt_tokens']} tokens, {record['new_tokens']} new ones, greedy; MB/step is what a step "
        f"must read; the ratio is to the faster of transformers' caches\n\n{table.text()}"
    )
