"""`deeploop eval` for iterated tasks: accuracy against steps and rounds, far beyond the trained ones.

Writes eval.json to the run folder, the matrix of accuracies to steps.png, and the automaton's space-time
diagram to spacetime.png.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from deeploop.exits import memory_advice
from deeploop.models.gpt import LoopedGPT
from deeploop.report import plots, results
from deeploop.runs.folder import provenance, require_checkpoint
from deeploop.tasks.iterate import tables
from deeploop.tasks.iterate.config import IterateTrainConfig
from deeploop.tasks.iterate.load import load_iterate
from deeploop.tasks.iterate.problems.base import solve
from deeploop.tasks.iterate.problems.examples import Examples, held_out
from deeploop.tasks.iterate.scoring import copying, rollout, score_sums, scores
from deeploop.tasks.options import EvalArgs, IteratedOptions
from deeploop.train.distributed import arithmetic, how_computed, open_world, wrap
from deeploop.train.execution import choose_execution
from deeploop.train.metrics import finite

# A result that agrees in these replaces an earlier one in eval.json; others are kept.
IDENTITY = (
    *("kind", "rule", "length", "examples", "steps", "rounds"),
    *("recompute_alpha", "checkpoint", "precision"),
)
BATCH = 128


def run(args: EvalArgs) -> str:
    """Evaluate, write the result into the run folder, and return the text to print."""
    assert args.run is not None
    folder = args.run
    checkpoint = require_checkpoint(folder)
    results.check(folder)
    if args.rounds and min(args.rounds) < 1:
        raise ValueError(f"rounds={min(args.rounds)}: must be at least 1")
    model, config = load_iterate(folder, checkpoint=checkpoint)
    config = replace(config, device=replace(config.device, kind=args.device))
    examples = change_task(config, args.iterated)
    steps = chosen_steps(args.iterated, config, examples)
    instances = held_out(examples.task, args.limit or config.data.test_examples)
    with open_world(config.device) as world, memory_advice("a smaller --limit"):
        choose_execution(config.device, world, model).apply(wrap(model, config.device, world))
        computed = partial(arithmetic, config.device, world.device)
        record = evaluate(model, config, examples, instances, steps, args, world.device, computed)
        record |= {"checkpoint": checkpoint.name, **provenance()}
        files = [results.add(folder, record, IDENTITY), folder / "steps.png"]
        plots.save_png(tables.matrix_chart(record), files[1])
        if config.data.task == "automaton" and not examples.tells_steps:
            files.append(folder / "spacetime.png")
            with computed():
                states = diagram(model, examples, instances[:1], steps[-1], record["recompute_alpha"])
            plots.save_png(tables.space_time(*states, config.data.train_steps), files[-1])
    return results.printed(record, tables.report(str(folder), record), files, as_json=args.json)


def chosen_steps(options: IteratedOptions, config: IterateTrainConfig, examples: Examples) -> list[int]:
    """The numbers of steps to evaluate at, which the task must have at its size."""
    steps = sorted(set(options.steps or config.data.test_steps))
    if steps[-1] > examples.longest:
        raise ValueError(
            f"steps={steps[-1]}: must be at most {examples.longest} for {config.data.task} of this size"
        )
    return steps


def evaluate(
    model: LoopedGPT,
    config: IterateTrainConfig,
    examples: Examples,
    instances: np.ndarray,
    steps: list[int],
    args: EvalArgs,
    device: torch.device,
    computed: Callable[[], AbstractContextManager[object]],
) -> dict[str, Any]:
    """Score every number of rounds at every number of steps, as plain values."""
    rounds = sorted({*args.rounds} or {config.rounds.at_test(h, config.model.rounds) for h in steps})
    recompute_alpha = args.recompute_alpha or config.model.recompute_alpha
    began = time.perf_counter()
    sums = score_sums(
        model,
        examples,
        instances,
        [(R, h) for R in rounds for h in steps],
        batch=BATCH,
        device=device,
        arithmetic=computed,
        recompute_alpha=recompute_alpha,
    )
    means = scores(sums)
    copied = copying(examples.task, instances, steps, config.data.train_steps)
    return {
        "kind": "iterated",
        "task": config.data.task,
        "rule": config.data.rule if args.iterated.rule is None else args.iterated.rule,
        "length": examples.task.length,
        "trained_steps": config.data.train_steps,
        "trained_rounds": config.model.rounds,
        "sample": config.rounds.sample,
        "recompute_alpha": recompute_alpha,
        "examples": len(instances),
        "steps": steps,
        "rounds": rounds,
        **{
            name: finite([[getattr(means[R, h], name) for h in steps] for R in rounds])
            for name in ("cells", "exact", "loss")
        },
        "copying": {str(h): share for h, share in copied.items()},
        "seconds": round(time.perf_counter() - began, 3),
        **how_computed(device, computed),
    }


def change_task(config: IterateTrainConfig, options: IteratedOptions) -> Examples:
    """The task with the given options, which must have the same tokens as in training."""
    data = config.data
    if options.rule is not None and data.task != "automaton":
        raise ValueError(f"rule={options.rule}: for the automaton; the run's task is {data.task}")
    changes = {name: value for name in ("rule", "length") if (value := getattr(options, name)) is not None}
    examples = replace(data, **changes).examples(tells_steps=config.rounds.tells_steps)
    if examples.vocabulary != config.examples.vocabulary:
        raise ValueError(
            f"length={options.length}: {data.task} has other tokens there than at the trained length "
            f"{data.length}; leave it out"
        )
    return examples


def diagram(
    model: LoopedGPT, examples: Examples, row: np.ndarray, steps: int, recompute_alpha: bool
) -> tuple[np.ndarray, np.ndarray]:
    """One row's true and predicted states after 1, 2, … steps of one pass; (steps, cells) each."""
    truth = solve(examples.task, row, range(1, steps + 1))
    predicted = rollout(model, examples.task, row, steps, recompute_alpha=recompute_alpha)
    return np.stack([truth[h][0] for h in range(1, steps + 1)]), predicted[:, 0]
