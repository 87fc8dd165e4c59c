"""Rank the layers that tolerate a loop: the loss on a small text with each core looped, before training."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deeploop.models.gpt import LoopedGPT
from deeploop.retrofit.layers import shown

ROUNDS = (2, 4)


@dataclass(frozen=True)
class Candidate:
    """A core of consecutive layers, and the loss with it in nats per token."""

    core: range
    by_rounds: dict[int, float]
    left_out: float
    """The loss without these layers."""


@torch.inference_mode()
def rank_cores(
    model: LoopedGPT,
    inputs: Tensor,
    targets: Tensor,
    length: int,
    *,
    tell: Callable[[Candidate], object] = lambda _: None,
) -> tuple[float, list[Candidate]]:
    """Return the source's own loss, and all cores of that length, the best at the most rounds first.

    `model` is the source with every layer as a block at R = 1. The input of each layer is kept, so that a
    candidate computes only what it changes.
    """
    blocks = list(model.blocks)
    if not 1 <= length < len(blocks):
        raise ValueError(f"length={length}: must be 1 to {len(blocks) - 1}, with {len(blocks)} layers")
    context, _ = model.begin(inputs)

    def run(x: Tensor, layers: Iterable[nn.Module]) -> Tensor:
        for layer in layers:
            x = layer(x, context)
        return x

    def loss(x: Tensor) -> float:
        total = model.read_out(x, targets).loss
        assert total is not None
        return float(total) / targets.numel()

    states = [model.input_norm(model.embedding(inputs))]
    for block in blocks:
        states.append(run(states[-1], [block]))
    own, found = loss(states[-1]), []
    for start in range(len(blocks) - length + 1):
        core, coda = blocks[start : start + length], blocks[start + length :]
        x, by_rounds = states[start + length], {1: own}
        for rounds in range(2, max(ROUNDS) + 1):
            x = run(x, core)
            if rounds in ROUNDS:
                by_rounds[rounds] = loss(run(x, coda))
        left_out = loss(run(states[start], coda))
        found.append(Candidate(range(start, start + length), by_rounds, left_out))
        tell(found[-1])
    return own, sorted(found, key=lambda one: one.by_rounds[max(ROUNDS)])


def table(candidates: Sequence[Candidate]) -> list[str]:
    """Format the candidates as lines, best first."""
    lines = [f"{'core':>7} " + "".join(f"{f'R = {R}':>9}" for R in (1, *ROUNDS)) + f"{'left out':>10}"]
    for one in candidates:
        losses = "".join(f"{one.by_rounds[R]:9.3f}" for R in (1, *ROUNDS))
        lines.append(f"{shown(one.core):>7} {losses}{one.left_out:10.3f}")
    return lines
