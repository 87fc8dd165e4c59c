"""Adaptive computation time: how segments follow one another, when they stop, and what they learn from.

A slot of the batch holds one puzzle for as many segments as it needs. Every segment has a loss and a step of
its own (deep supervision), and hands the next one its carry, detached. A head says after each whether to halt
(q_halt: the answer is right) or to go on (q_continue: the best that can still come).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.config.loop import HaltingConfig
from deeploop.models.reasoner import Carry, Segment
from deeploop.nn.loss import stablemax_cross_entropy

PAD = 0  # a label that is not scored
Model = Callable[..., Segment]  # (carry, tokens, puzzle), and q_only where nothing else is read


@dataclass(frozen=True)
class Slots:
    """The puzzles being worked on, a row each; `halted` rows wait for a new one."""

    inputs: Tensor  # (B, length)
    labels: Tensor  # (B, length)
    ids: Tensor  # (B,)
    high: Tensor  # (B, T, width)
    low: Tensor
    steps: Tensor  # (B,) segments done
    halted: Tensor  # (B,)

    @classmethod
    def waiting(cls, count: int, length: int, carry: Carry) -> "Slots":
        """Slots that all wait."""
        device = carry.high.device
        board = torch.zeros(count, length, dtype=torch.long, device=device)
        none = torch.zeros(count, dtype=torch.long, device=device)
        high, low = (state.clone() for state in carry)  # memory of their own: they are refilled in place
        waits = torch.ones(count, dtype=torch.bool, device=device)
        return cls(board, board, none, high, low, none, waits)

    def refill_(self, inputs: Tensor, labels: Tensor, ids: Tensor, carry: Carry) -> "Slots":
        """New puzzles, with a fresh carry, in the rows that halted; the others go on.

        There is a new puzzle for every row: which of them are taken, the device alone knows, and nobody waits
        for it. The states are changed in place, so no backward pass may still need them: a copy of both would
        be a gigabyte and more.
        """
        halted = self.halted.unsqueeze(1)
        for was, now in ((self.high, carry.high), (self.low, carry.low)):
            # States that were computed in bf16 stay so.
            torch.where(halted.unsqueeze(2), now.to(was.dtype), was, out=was)
        return Slots(
            inputs=torch.where(halted, inputs, self.inputs),
            labels=torch.where(halted, labels, self.labels),
            ids=torch.where(self.halted, ids, self.ids),
            high=self.high,
            low=self.low,
            steps=self.steps.masked_fill(self.halted, 0),
            halted=torch.zeros_like(self.halted),
        )

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def split(self, size: int) -> list["Slots"]:
        """The same rows in pieces of `size`."""
        pieces = zip(*(tensor.split(size) for tensor in self.tensors().values()), strict=True)
        return [Slots(*piece) for piece in pieces]

    @staticmethod
    def joined(pieces: Sequence["Slots"]) -> "Slots":
        if len(pieces) == 1:  # nothing to copy
            return pieces[0]
        columns = zip(*(piece.tensors().values() for piece in pieces), strict=True)
        return Slots(*(torch.cat(column) for column in columns))


def wants_to_halt(q: Tensor, config: HaltingConfig) -> Tensor:
    """Where the model says that it is done (B,), of q (B, 2)."""
    q_halt, q_continue = q.unbind(-1)
    return q_halt > q_continue if config.learn_continue else q_halt > 0


def halts(q: Tensor, steps: Tensor, minimum: Tensor, config: HaltingConfig) -> Tensor:
    """Where training halts after `steps` segments: at the last, or at the model's wish from `minimum` on."""
    return (steps >= config.segments) | (wants_to_halt(q, config) & (steps >= minimum))


def minimum_segments(explore: Tensor, draw: Tensor, config: HaltingConfig) -> Tensor:
    """The fewest segments (B,) before a halt; explore and draw (B,) are uniform in [0, 1)."""
    if config.segments < 2:
        return torch.zeros_like(draw, dtype=torch.long)
    minimum = 2 + (draw * (config.segments - 1)).long()  # 2 … segments
    return torch.where(explore < config.exploration, minimum, 0)


def continue_target(q_next: Tensor, steps: Tensor, config: HaltingConfig) -> Tensor:
    """What q_continue should predict after `steps` segments: the best of the next one, as a probability.

    `q_next` (B, 2) are the values after one more segment; behind the last there is only halting.
    """
    best = torch.where(steps >= config.segments, q_next[:, 0], q_next.amax(-1))
    return best.sigmoid()


def answers_right(answers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Scored cells that are right, (B, length), and whether all of a puzzle's are, (B,)."""
    scored = labels != PAD
    right = (answers == labels) & scored
    return right, (right | ~scored).all(-1)


def puzzle_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean stablemax cross-entropy of each puzzle's scored cells, (B,) in float64."""
    targets = labels.masked_fill(labels == PAD, -1)
    count = (targets >= 0).sum(-1).clamp(min=1)
    return stablemax_cross_entropy(logits, targets).sum(-1) / count


def act_loss(segment: Segment, labels: Tensor, target: Tensor | None) -> Tensor:
    """A segment's loss, summed over its puzzles: the answer's, and half of the halting head's."""
    _, solved = answers_right(segment.logits.argmax(-1), labels)
    q_halt, q_continue = segment.q.unbind(-1)
    q_loss = F.binary_cross_entropy_with_logits(q_halt, solved.to(q_halt.dtype), reduction="sum")
    if target is not None:
        q_loss = q_loss + F.binary_cross_entropy_with_logits(q_continue, target, reduction="sum")
    return puzzle_loss(segment.logits, labels).sum() + 0.5 * q_loss


def supervise(
    model: Model, slots: Slots, puzzle: Tensor, minimum: Tensor, config: HaltingConfig
) -> tuple[Tensor, Slots]:
    """One segment of training: its loss, summed over the slots, and the slots after it."""
    segment = model(Carry(slots.high, slots.low), slots.inputs, puzzle)
    steps = slots.steps + 1
    target = None
    if config.bootstraps_continue:
        with torch.no_grad():
            following = model(segment.carry, slots.inputs, puzzle, q_only=True)
            target = continue_target(following.q, steps, config)
    after = replace(
        slots,
        high=segment.carry.high,
        low=segment.carry.low,
        steps=steps,
        halted=halts(segment.q.detach(), steps, minimum, config),
    )
    return act_loss(segment, slots.labels, target), after


class Answers(NamedTuple):
    """Answers to some puzzles, with what they were read from."""

    tokens: Tensor  # (B, length)
    logits: Tensor  # (B, length, V)
    q: Tensor  # (B, 2)
    segments: Tensor  # (B,) until the model wanted to halt


@torch.no_grad()
def solve(
    model: Model,
    carry: Carry,
    inputs: Tensor,
    puzzle: Tensor,
    config: HaltingConfig,
    *,
    adaptive: bool = False,
) -> Answers:
    """All segments, as the published evaluation does; or, `adaptive`, a puzzle's until it wants to halt."""
    counts = (config.segments,)
    return solve_after(model, carry, inputs, puzzle, config, counts, adaptive=adaptive)[-1]


@torch.no_grad()
def solve_after(
    model: Model,
    carry: Carry,
    inputs: Tensor,
    puzzle: Tensor,
    config: HaltingConfig,
    counts: Sequence[int],
    *,
    adaptive: bool = False,
) -> list[Answers]:
    """The answers after each of these numbers of segments, which rise; they may exceed those of training.

    Puzzles that have halted leave an `adaptive` batch, so that an answer costs what its segments cost.
    """
    going = torch.arange(len(inputs), device=inputs.device)
    segments = torch.full_like(going, counts[-1])
    logits = q = None
    found = []
    for done in range(1, counts[-1] + 1):
        if len(going) or logits is None:
            segment = model(carry, inputs[going], puzzle[going])
            if logits is None or q is None:  # nobody knows shape and dtype earlier
                logits, q = torch.empty_like(segment.logits), torch.empty_like(segment.q)
            logits[going], q[going] = segment.logits, segment.q
            carry, wants = segment.carry, wants_to_halt(segment.q, config)
            segments[going[wants]] = segments[going[wants]].clamp(max=done)
            if adaptive:
                going, carry = going[~wants], Carry(carry.high[~wants], carry.low[~wants])
        if done in counts:
            assert logits is not None
            assert q is not None
            found.append(Answers(logits.argmax(-1), logits.clone(), q.clone(), segments.clamp(max=done)))
    return found
