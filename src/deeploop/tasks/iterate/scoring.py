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
FIGURES = 5


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
    """Turn sums over examples of all ranks into means."""
    found = {}
    for cell, own in sums.items():
        loss, right, counted, exact, examples = own.tolist()
        # Accuracy is undefined if no instance has an answer.
        found[cell] = IteratedScore(
            *(
                part / whole if whole else math.nan
                for part, whole in ((loss, counted), (right, counted), (exact, examples))
            )
        )
    return found


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
    """Sums of loss, right cells, counted cells, right answers and answers, for each (rounds, steps).

    Unless the number of steps is part of the input, one pass with the most rounds gives all of them.
    `before_batch` is called with the batch's first row and the share of all passes done.
    """
    wanted = sorted(set(cells))
    sums = {cell: torch.zeros(FIGURES, dtype=torch.float64, device=device) for cell in wanted}
    truth = solve(examples.task, instances, {steps for _, steps in wanted})
    passes = [wanted]
    if examples.tells_steps:  # the input differs
        passes = [[cell for cell in wanted if cell[1] == steps] for steps in sorted(truth)]
    was_training = model.training
    model.eval()
    for number, own in enumerate(passes):
        for start in range(0, len(instances), batch):
            before_batch(start, (number + start / len(instances)) / len(passes))
            rows = slice(start, start + batch)
            inputs = torch.from_numpy(examples.inputs(instances[rows], own[0][1])).to(device)
            targets = {h: torch.from_numpy(examples.targets(truth[h][rows])).to(device) for _, h in own}
            with arithmetic():
                for rounds, logits in read_outs(
                    model, inputs, {R for R, _ in own}, recompute_alpha=recompute_alpha
                ):
                    for cell in own:
                        if cell[0] == rounds:
                            sums[cell] += _figures(logits, targets[cell[1]])
    model.train(was_training)
    return sums


def _figures(logits: Tensor, targets: Tensor) -> Tensor:
    kept = targets >= 0
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    # argmax of NaN logits would be token 0, which is often right.
    wrong = ((logits.argmax(-1) != targets) | ~logits.isfinite().all(-1)) & kept
    right = kept.sum() - wrong.sum()
    exact = (~wrong.any(1) & kept.any(1)).sum()
    figures = (loss, right, kept.sum(), exact, kept.any(1).sum())
    return torch.stack([figure.double() for figure in figures])


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
        found = [
            logits.argmax(-1)[:, task.answers].cpu()
            for _, logits in read_outs(model, inputs, range(1, steps + 1), recompute_alpha=recompute_alpha)
        ]
    return torch.stack(found).numpy()


def copying(
    task: IteratedTask, instances: np.ndarray, steps: Sequence[int], trained: int
) -> dict[int, float]:
    """The best accuracy of copying the start or one of its first `trained` states.

    This is the score of a model that does not continue; it is high for a step that repeats after a while.
    """

    truth = solve(task, instances, {*steps, *range(trained + 1)})
    found = {}
    for h in steps:
        if h <= trained:  # one of them is the answer
            continue
        kept = truth[h] >= 0
        if not kept.any():
            continue
        shares = [float((truth[h] == truth[early])[kept].mean()) for early in range(trained + 1)]
        found[h] = max(shares)
    return found
