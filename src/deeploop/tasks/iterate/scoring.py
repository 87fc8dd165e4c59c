"""Score iterated tasks: accuracy against steps and rounds, and the readout after every round."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.models.gpt import LoopedGPT
from deeploop.nn.context import Context
from deeploop.nn.layers import Rotary, rotary_table
from deeploop.tasks.iterate.problems.base import IteratedTask, solve
from deeploop.tasks.iterate.problems.examples import Examples

Cell = tuple[int, int]  # rounds, steps


@dataclass(frozen=True)
class IteratedScore:
    """Scores at one number of rounds and steps."""

    loss: float
    """Nats per answered cell."""
    cells: float
    """Share of cells that are right."""
    exact: float
    """Share of answers that are right in every cell."""


def scores(sums: Mapping[Cell, Tensor]) -> dict[Cell, IteratedScore]:
    """Turn the sums of `score_sums` over all ranks into means; NaN if no instance has an answer."""
    return {cell: _mean(*own.tolist()) for cell, own in sums.items()}


def _mean(loss: float, right: float, cells: float, exact: float, answers: float) -> IteratedScore:
    cells, answers = cells or math.nan, answers or math.nan
    return IteratedScore(loss / cells, right / cells, exact / answers)


@torch.no_grad()
def score_sums(
    model: LoopedGPT,
    examples: Examples,
    instances: np.ndarray,
    cells: Iterable[Cell],
    *,
    batch: int = 128,
    device: torch.device | str = "cpu",
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext,
    recompute_alpha: bool | None = None,
    before_batch: Callable[[int, float], None] = lambda row, share: None,
) -> dict[Cell, Tensor]:
    """Sum loss, right cells, scored cells, right answers and answers, for each (rounds, steps).

    Unless the number of steps is part of the input, one pass with the most rounds gives all of them.
    `before_batch` is called with the batch's first row and the share of all passes done.
    """
    sums = {cell: torch.zeros(5, dtype=torch.float64, device=device) for cell in sorted(set(cells))}
    truth = solve(examples.task, instances, {steps for _, steps in sums})
    # The steps that share a pass: all, unless they change the input.
    passes = [[steps] for steps in sorted(truth)] if examples.tells_steps else [sorted(truth)]
    was_training = model.training
    model.eval()
    for number, group in enumerate(passes):
        rounds = {R for R, steps in sums if steps in group}
        for start in range(0, len(instances), batch):
            before_batch(start, (number + start / len(instances)) / len(passes))
            rows = slice(start, start + batch)
            inputs = torch.from_numpy(examples.inputs(instances[rows], group[0])).to(device)
            targets = {h: torch.from_numpy(examples.targets(truth[h][rows])).to(device) for h in group}
            with arithmetic():
                for R, logits in read_outs(model, inputs, rounds, recompute_alpha=recompute_alpha):
                    for h in group:
                        if (R, h) in sums:
                            sums[R, h] += _sums(logits, targets[h])
    model.train(was_training)
    return sums


def _sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum loss, right cells, scored cells, right answers and answers of a batch."""
    kept = targets >= 0
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    # argmax of NaN logits would be token 0, which is often right.
    wrong = ((logits.argmax(-1) != targets) | ~logits.isfinite().all(-1)) & kept
    right = kept.sum() - wrong.sum()
    exact = (~wrong.any(1) & kept.any(1)).sum()
    return torch.stack([one.double() for one in (loss, right, kept.sum(), exact, kept.any(1).sum())])


def read_outs(
    model: LoopedGPT, inputs: Tensor, rounds: Iterable[int], *, recompute_alpha: bool | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield rounds and logits (B, T, vocabulary) after each number of rounds, fewest first.

    The stream continues from one to the next, so all of them cost as much as the last one; only recomputing
    alpha or epsilon for the new depth needs a pass for each. Sequences may be longer than the model's
    context; then the rotary table is extended.
    """
    recompute = model.config.recompute_alpha if recompute_alpha is None else recompute_alpha
    context = Context(positions(model, inputs))
    first, entered = model.enter_loop(inputs, context)
    x, done = first, 0
    try:
        for R in sorted(set(rounds)):
            model.set_rounds(R, recompute_alpha=recompute)
            if recompute:
                x, done = first, 0
            x, done = model.loop(x, range(done, R), context, entered), R
            after = model.once("coda", x, context)
            yield R, model.logits(model.read_out(after).states)
    finally:
        model.set_rounds(model.config.rounds)


def positions(model: LoopedGPT, inputs: Tensor) -> Rotary:
    """The rotary table for a sequence of any length."""
    length = inputs.shape[1]
    if length <= model.config.context:
        return model.cos[:length], model.sin[:length]
    config = model.config
    cos, sin = rotary_table(length, config.head_size, config.rotary_base, config.rotary_scaling)
    return cos.to(inputs.device), sin.to(inputs.device)


def rollout(
    model: LoopedGPT,
    task: IteratedTask,
    instances: np.ndarray,
    steps: int,
    *,
    recompute_alpha: bool | None = None,
) -> np.ndarray:
    """The model's answers after 1, 2, … `steps` rounds of one pass: (steps, instances, answers)."""
    device = next(model.parameters()).device
    inputs = torch.from_numpy(task.inputs(instances)).to(device)
    with torch.no_grad():
        answers = [
            logits.argmax(-1)[:, task.answers].cpu()
            for _, logits in read_outs(model, inputs, range(1, steps + 1), recompute_alpha=recompute_alpha)
        ]
    return torch.stack(answers).numpy()


def copying(
    task: IteratedTask, instances: np.ndarray, steps: Sequence[int], trained: int
) -> dict[int, float]:
    """Return, by numbers of steps beyond `trained`, the best accuracy of copying an earlier state.

    The states to copy are the start and the first `trained`. This is the score of a model that does not
    continue; it is high if states repeat.
    """
    truth = solve(task, instances, {*steps, *range(trained + 1)})
    best = {}
    for h in steps:
        scored = truth[h] >= 0
        if h > trained and scored.any():
            best[h] = max(float((truth[h] == truth[t])[scored].mean()) for t in range(trained + 1))
    return best
