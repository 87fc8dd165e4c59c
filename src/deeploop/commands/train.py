"""`deeploop train`: one run of a recipe, with any field overridden."""

import os
from dataclasses import replace
from typing import Any

from deeploop.commands.memory import memory_advice
from deeploop.commands.parsing import choose, parse, summary
from deeploop.recipes import RECIPES, get_recipe
from deeploop.recipes.reasoners import require_puzzles
from deeploop.report.recommend import recommend
from deeploop.report.runs import flatten
from deeploop.train.config import TrainConfig, to_dict
from deeploop.train.loop import train
from deeploop.train.puzzle import PuzzleDataConfig

# What other trainers call a field of ours. tyro goes by letters alone: to it, lr is --optim.branch-lr.
TRAIN_WORDS = {
    **dict.fromkeys(("lr", "learning-rate", "learning-rates"), "--optim.peak-lr"),
    "warmup": "--optim.warmup-steps",
    "steps": "--optim.steps",
    **dict.fromkeys(("batch", "batch-size"), "--optim.batch"),
}

AUTO_LR = "--auto-lr"
HELP = (
    f"{AUTO_LR}: peak rate and warm-up as `deeploop recommend` has them for this rule and shape (language "
    "models only), in place of --optim.peak-lr and --optim.warmup-steps."
)


def main(arguments: list[str]) -> int:
    choice, rest = choose("recipe", arguments, {name: summary(make) for name, make in RECIPES.items()})
    if choice is None:
        return 0
    recipe = get_recipe(choice)
    prog = f"deeploop train {choice}"
    automatic, rest = AUTO_LR in rest, [word for word in rest if word != AUTO_LR]
    config = parse(type(recipe), rest, prog=prog, default=recipe, words=TRAIN_WORDS, description=HELP)
    is_first_rank = int(os.environ.get("RANK", 0)) == 0
    if automatic:
        config, told = with_measured_rate(config, rest)
        if is_first_rank:
            print(told)
    if isinstance(config.data, PuzzleDataConfig):
        require_puzzles(config.data.path)
    size = config.device.micro_batch
    smaller = str(max(1, size // 2)) if size else "N with an N below the one printed at the start"
    with memory_advice(f"--device.no-graph, --device.recompute block, or --device.micro-batch {smaller}"):
        result = train(config)
    if is_first_rank:
        print(
            f"{result['ended']} at step {result['step']}: {config.out}, last validation {result['loss']:.4f}"
        )
    return 0


def with_measured_rate(config: Any, words: list[str]) -> tuple[TrainConfig, str]:
    """The config at the peak rate and warm-up that our runs have for its rule, and a line that says so."""
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{AUTO_LR}: is for language models; give --optim.peak-lr")
    for word in words:
        if word.replace("_", "-").startswith(("--optim.peak-lr", "--optim.warmup-steps")):
            raise ValueError(f"{word}: settles what {AUTO_LR} would; give one of the two")
    model, optim = config.model, config.optim
    found = recommend(
        model.blocks,
        model.rounds,
        model.width,
        optim.steps * optim.batch * model.context,
        settings=flatten(to_dict(config)),
        optimizer=getattr(optim, "kind", "adamw"),
    )
    peak, warm = found.peak_lr, round(found.warmup * optim.steps)
    rate = replace(optim, peak_lr=peak, warmup_steps=warm, floor_lr=min(optim.floor_lr, peak))
    beyond = "".join(f"; {text}" for text in found.extrapolated)
    told = f"{AUTO_LR}: peak rate {peak:g}, {warm:,} steps of warm-up, by {found.folder}{beyond}"
    return replace(config, optim=rate), told
