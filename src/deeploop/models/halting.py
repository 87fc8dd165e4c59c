"""Adaptive computation time: the sequence of segments, halting, and the losses.

A slot of the batch holds one puzzle for as many segments as it needs. Every segment has its own loss and step
(deep supervision), and passes its detached carry to the next. After each, a head predicts whether to halt
(q_halt: the answer is right) or to continue (q_continue: the best value still to come).
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

PAD = 0  # label of a cell that is not scored
Model = Callable[..., Segment]  # (carry, tokens, puzzle), and q_only if nothing else is needed


@dataclass(frozen=True)
class Slots:
    """The current puzzles, one per row; `halted` rows wait for a new one."""

    inputs: Tensor  # (B, length)
    labels: Tensor  # (B, length)
    ids: Tensor  # (B,)
    high: Tensor  # (B, T, width)
    low: Tensor
    steps: Tensor  # (B,) segments done
    halted: Tensor  # (B,)

    @classmethod
    def waiting(cls, count: int, length: int, carry: Carry) -> "Slots":
        """Slots that are all empty."""
        device = carry.high.device
        board = torch.zeros(count, length, dtype=torch.long, device=device)
        none = torch.zeros(count, dtype=torch.long, device=device)
        high, low = (state.clone() for state in carry)  # copies, as they are refilled in place
        waits = torch.ones(count, dtype=torch.bool, device=device)
        return cls(board, board, none, high, low, none, waits)

    def refill_(self, inputs: Tensor, labels: Tensor, ids: Tensor, carry: Carry) -> "Slots":
        """Put new puzzles with an initial carry into the rows that halted; the others continue.

        There is a new puzzle for every row: only the device knows which are used, and nothing waits for it.
        The states are changed in place, so no backward pass may still need them; copies would take a gigabyte
        or more.
        """
        halted = self.halted.unsqueeze(1)
        for was, now in ((self.high, carry.high), (self.low, carry.low)):
            # States computed in bf16 stay in bf16.
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
        """Split the rows into pieces of `size`."""
        pieces = zip(*(tensor.split(size) for tensor in self.tensors().values()), strict=True)
        return [Slots(*piece) for piece in pieces]

    @staticmethod
    def joined(pieces: Sequence["Slots"]) -> "Slots":
        if len(pieces) == 1:  # avoids a copy
            return pieces[0]
        columns = zip(*(piece.tensors().values() for piece in pieces), strict=True)
        return Slots(*(torch.cat(column) for column in columns))


def wants_to_halt(q: Tensor, config: HaltingConfig) -> Tensor:
    """True for puzzles (B,) that the model would halt at, given q (B, 2)."""
    q_halt, q_continue = q.unbind(-1)
    return q_halt > q_continue if config.learn_continue else q_halt > 0


def halts(q: Tensor, steps: Tensor, minimum: Tensor, config: HaltingConfig) -> Tensor:
    """True where training halts after `steps` segments: at the last, or by q from `minimum` segments on."""
    return (steps >= config.segments) | (wants_to_halt(q, config) & (steps >= minimum))


def minimum_segments(explore: Tensor, draw: Tensor, config: HaltingConfig) -> Tensor:
    """The fewest segments (B,) before a halt; explore and draw (B,) are uniform in [0, 1)."""
    if config.segments < 2:
        return torch.zeros_like(draw, dtype=torch.long)
    minimum = 2 + (draw * (config.segments - 1)).long()  # 2 … segments
    return torch.where(explore < config.exploration, minimum, 0)


def continue_target(q_next: Tensor, steps: Tensor, config: HaltingConfig) -> Tensor:
    """The target of q_continue after `steps` segments: the best value of the next one, as a probability.

    `q_next` (B, 2) are the values after one more segment; after the last one, halting is the only choice.
    """
    best = torch.where(steps >= config.segments, q_next[:, 0], q_next.amax(-1))
    return best.sigmoid()


def answers_right(answers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Scored cells that are right, (B, length), and True for puzzles that are completely right, (B,)."""
    scored = labels != PAD
    right = (answers == labels) & scored
    return right, (right | ~scored).all(-1)


def puzzle_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean stablemax cross-entropy of each puzzle's scored cells, (B,) in float64."""
    targets = labels.masked_fill(labels == PAD, -1)
    count = (targets >= 0).sum(-1).clamp(min=1)
    return stablemax_cross_entropy(logits, targets).sum(-1) / count


def act_loss(segment: Segment, labels: Tensor, target: Tensor | None) -> Tensor:
    """A segment's loss summed over its puzzles: that of the answers, and half of the halting head's."""
    _, solved = answers_right(segment.logits.argmax(-1), labels)
    q_halt, q_continue = segment.q.unbind(-1)
    q_loss = F.binary_cross_entropy_with_logits(q_halt, solved.to(q_halt.dtype), reduction="sum")
    if target is not None:
        q_loss = q_loss + F.binary_cross_entropy_with_logits(q_continue, target, reduction="sum")
    return puzzle_loss(segment.logits, labels).sum() + 0.5 * q_loss


def supervise(
    model: Model, slots: Slots, puzzle: Tensor, minimum: Tensor, config: HaltingConfig
) -> tuple[Tensor, Slots]:
    """Train one segment: return its loss summed over the slots, and the slots after it."""
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
    """Answers to some puzzles, with the outputs that they were read from."""

    tokens: Tensor  # (B, length)
    logits: Tensor  # (B, length, V)
    q: Tensor  # (B, 2)
    segments: Tensor  # (B,) until the model would halt


@torch.no_grad()
def solve(
    model: Model,
    carry: Carry,
    inputs: Tensor,
    puzzle: Tensor,
    config: HaltingConfig,
    counts: Sequence[int],
    *,
    adaptive: bool = False,
) -> list[Answers]:
    """The answers after each of these ascending numbers of segments, which may exceed that of training.

    Every puzzle gets all segments, as in the published evaluation; if `adaptive`, it leaves the batch when it
    halts, so that an answer costs as much as its segments.
    """
    going = torch.arange(len(inputs), device=inputs.device)
    segments = torch.full_like(going, counts[-1])
    logits = q = None
    answers = []
    for done in range(1, counts[-1] + 1):
        if len(going) or logits is None:
            segment = model(carry, inputs[going], puzzle[going])
            if logits is None or q is None:  # shape and dtype are known only now
                logits, q = torch.empty_like(segment.logits), torch.empty_like(segment.q)
            logits[going], q[going] = segment.logits, segment.q
            carry, wants = segment.carry, wants_to_halt(segment.q, config)
            segments[going[wants]] = segments[going[wants]].clamp(max=done)
            if adaptive:
                going, carry = going[~wants], Carry(carry.high[~wants], carry.low[~wants])
        if done in counts:
            assert logits is not None
            assert q is not None
            answers.append(Answers(logits.argmax(-1), logits.clone(), q.clone(), segments.clamp(max=done)))
    return answers
