"""Which layers bear a loop: the loss on a small text with each run of layers looped, before any training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from deeploop.eval.depth import Windows
from deeploop.models.gpt import LoopedGPT
from deeploop.retrofit.layers import shown, split

ROUNDS = (2, 4)


@dataclass(frozen=True)
class Candidate:
    """Consecutive layers, and the loss in nats per token with them."""

    core: range
    by_rounds: dict[int, float]
    left_out: float
    """Loss without these layers: what they are worth."""


def rank_cores(
    model: LoopedGPT,
    windows: Windows,
    length: int,
    *,
    tell: Callable[[Candidate], None] = lambda _: None,
) -> tuple[float, list[Candidate]]:
    """The source's own loss, and all cores of that length, best first at the most rounds.

    `model` is the source, every layer a block at R = 1; it is left as it was.
    """
    blocks = list(model.blocks)
    if not 1 <= length < len(blocks):
        raise ValueError(
            f"length={length}: must be 1 to {len(blocks) - 1}, the source has {len(blocks)} layers"
        )
    found = []
    try:
        own = windows.score(model).loss
        for start in range(len(blocks) - length + 1):
            core = range(start, start + length)
            by_rounds = {1: own}
            for rounds in ROUNDS:
                split(model, blocks, core, rounds)
                by_rounds[rounds] = windows.score(model).loss
            candidate = Candidate(core, by_rounds, _left_out(model, windows, blocks, core))
            tell(candidate)
            found.append(candidate)
    finally:
        split(model, blocks, range(len(blocks)), 1)
    return own, sorted(found, key=lambda one: one.by_rounds[max(ROUNDS)])


def _left_out(model: LoopedGPT, windows: Windows, blocks: list[nn.Module], core: range) -> float:
    rest = [block for index, block in enumerate(blocks) if index not in core]
    split(model, rest, range(len(rest)), 1)
    return windows.score(model).loss


def table(candidates: Sequence[Candidate]) -> list[str]:
    """The candidates as lines, best first."""
    lines = [f"{'core':>7} " + "".join(f"{f'R = {R}':>9}" for R in (1, *ROUNDS)) + f"{'left out':>10}"]
    for one in candidates:
        losses = "".join(f"{one.by_rounds[R]:9.3f}" for R in (1, *ROUNDS))
        lines.append(f"{shown(one.core):>7} {losses}{one.left_out:10.3f}")
    return lines
