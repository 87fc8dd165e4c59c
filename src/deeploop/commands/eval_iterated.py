"""`deeploop eval` for iterated tasks: accuracy against steps and rounds, far beyond the trained ones.

The result goes to eval.json in the run folder, the matrix to steps.png, and the automaton's diagram to
spacetime.png.
"""

import json
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from deeploop.commands.memory import memory_advice
from deeploop.data.iterate.examples import Examples, held_out
from deeploop.data.iterate.task import solve
from deeploop.eval.iterated import copying, rollout, score_sums, scores
from deeploop.models.gpt import LoopedGPT
from deeploop.report import iterated, plots, scoreboard
from deeploop.train.config import IterateTrainConfig
from deeploop.train.distributed import arithmetic, open_world, uses_bf16, wrap
from deeploop.train.execution import choose_execution
from deeploop.train.rundir import load_iterate, provenance, require_checkpoint

# Results that agree in these replace one another; any other stays beside them in eval.json.
IDENTITY = (
    "kind",
    "rule",
    "length",
    "examples",
    "steps",
    "rounds",
    "recompute_alpha",
    "checkpoint",
    "precision",
)
BATCH = 128


@dataclass(frozen=True, kw_only=True)
class IteratedOptions:
    """Options for the run of an iterated task."""

    steps: tuple[int, ...] = ()
    """Steps to ask for, also more than were trained; unset: those of the run's validation."""
    rule: int | None = None
    """Another rule of the automaton than the trained one."""
    length: int | None = None
    """Another size than the trained one, such as longer rows."""

    def __post_init__(self) -> None:
        if self.steps and min(self.steps) < 1:
            raise ValueError(f"steps={min(self.steps)}: must be at least 1")


def run(
    folder: Path,
    options: IteratedOptions,
    *,
    rounds: tuple[int, ...] = (),
    recompute_alpha: bool = False,
    limit: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: bool = False,
) -> str:
    """Evaluates, writes the result into the run folder, and returns what to print."""
    checkpoint = require_checkpoint(folder)
    scoreboard.check(folder)
    if rounds and min(rounds) < 1:
        raise ValueError(f"rounds={min(rounds)}: must be at least 1")
    model, config = load_iterate(folder)
    examples = shown(config, options)
    steps = sorted(set(options.steps or config.data.test_steps))
    if steps[-1] > examples.longest:
        raise ValueError(
            f"steps={steps[-1]}: must be at most {examples.longest} for {config.data.task} of this size"
        )
    depths = sorted({*rounds} or {config.rounds.at_test(h, config.model.rounds) for h in steps})
    instances = held_out(examples.task, limit or config.data.test_examples)
    device_config = replace(config.device, kind=device)
    with open_world(device_config) as world, memory_advice("a smaller --limit"):
        choose_execution(device_config, world, model).apply(wrap(model, device_config, world))
        began = time.perf_counter()
        found = scores(
            score_sums(
                model,
                examples,
                instances,
                [(R, h) for R in depths for h in steps],
                batch=BATCH,
                device=world.device,
                arithmetic=partial(arithmetic, device_config, world.device),
                recompute_alpha=recompute_alpha,
            )
        )
        record: dict[str, Any] = {
            "kind": "iterated",
            "task": config.data.task,
            "rule": options.rule if options.rule is not None else config.data.rule,
            "length": examples.task.length,
            "trained_steps": config.data.train_steps,
            "trained_rounds": config.model.rounds,
            "sample": config.rounds.sample,
            "recompute_alpha": recompute_alpha,
            "examples": len(instances),
            "steps": steps,
            "rounds": depths,
            **{
                name: [[_finite(getattr(found[R, h], name)) for h in steps] for R in depths]
                for name in ("cells", "exact", "loss")
            },
            "copying": {
                str(h): share
                for h, share in copying(examples.task, instances, steps, config.data.train_steps).items()
            },
            "checkpoint": checkpoint.name,
            "seconds": round(time.perf_counter() - began, 3),
            "precision": "bf16" if uses_bf16(device_config, world.device) else "fp32",
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
            **provenance(),
        }
        files = [scoreboard.add(folder, record, IDENTITY), folder / "steps.png"]
        plots.save_png(iterated.accuracy_matrix(record), files[1])
        if config.data.task == "automaton" and not examples.tells_steps:
            files.append(folder / "spacetime.png")
            with arithmetic(device_config, world.device):
                plots.save_png(diagram(model, examples, instances[:1], steps[-1], config), files[-1])
    if as_json:
        return json.dumps(record, indent=1)
    return f"{iterated.report(str(folder), record)}\n\nwritten: {', '.join(map(str, files))}"


def shown(config: IterateTrainConfig, options: IteratedOptions) -> Examples:
    """The task that is asked for, which must have the trained one's tokens."""
    if options.rule is not None and config.data.task != "automaton":
        raise ValueError(f"rule={options.rule}: for the automaton; the run's task is {config.data.task}")
    changes = {name: value for name in ("rule", "length") if (value := getattr(options, name)) is not None}
    examples = replace(config.data, **changes).examples(tells_steps=config.rounds.tells_steps)
    if examples.vocabulary != config.examples.vocabulary:
        raise ValueError(
            f"length={options.length}: {config.data.task} has other tokens there than at the trained length "
            f"{config.data.length}; leave it out"
        )
    return examples


def diagram(
    model: LoopedGPT, examples: Examples, row: np.ndarray, steps: int, config: IterateTrainConfig
) -> Any:
    """The space–time diagram of one row."""
    truth = solve(examples.task, row, range(1, steps + 1))
    said = rollout(model, examples.task, row, steps)
    whole = np.stack([truth[h][0] for h in range(1, steps + 1)])
    return iterated.space_time(whole, said[:, 0], config.data.train_steps)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
