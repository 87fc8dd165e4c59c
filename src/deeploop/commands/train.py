"""`deeploop train`: one run of a recipe, with any field overridden."""

import os

from deeploop.commands.memory import memory_advice
from deeploop.commands.parsing import choose, parse, summary
from deeploop.recipes import RECIPES, get_recipe
from deeploop.recipes.reasoners import require_puzzles
from deeploop.train.loop import train
from deeploop.train.puzzle import PuzzleDataConfig

# What other trainers call a field of ours. tyro goes by letters alone: to it, lr is --optim.branch-lr.
TRAIN_WORDS = {
    **dict.fromkeys(("lr", "learning-rate", "learning-rates"), "--optim.peak-lr"),
    "warmup": "--optim.warmup-steps",
    "steps": "--optim.steps",
    **dict.fromkeys(("batch", "batch-size"), "--optim.batch"),
}


def main(arguments: list[str]) -> int:
    choice, rest = choose("recipe", arguments, {name: summary(make) for name, make in RECIPES.items()})
    if choice is None:
        return 0
    recipe = get_recipe(choice)
    prog = f"deeploop train {choice}"
    config = parse(type(recipe), rest, prog=prog, default=recipe, words=TRAIN_WORDS)
    if isinstance(config.data, PuzzleDataConfig):
        require_puzzles(config.data.path)
    size = config.device.micro_batch
    smaller = str(max(1, size // 2)) if size else "N with an N below the one printed at the start"
    with memory_advice(f"--device.no-graph, --device.recompute block, or --device.micro-batch {smaller}"):
        result = train(config)
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            f"{result['ended']} at step {result['step']}: {config.out}, last validation {result['loss']:.4f}"
        )
    return 0
