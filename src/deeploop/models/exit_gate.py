"""A trained exit gate: after every round it predicts whether a token needs another one (as in Ouro).

λ_t = σ(gate(x_t)) is the probability to exit after round t, given that the token got there, and
q(t) = λ_t · Π_{s<t} (1 − λ_s) that of exiting there; the last round takes the rest.

joint       loss = Σ_t q(t)·L_t − β·H(q): trains the model and its gate; β prevents that q has only one round
gate-only   the model is frozen, and the gate learns whether the next round still lowers a token's loss

At inference a token exits once the sum of its q reaches a threshold (`adaptive.py`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config.loop import GateConfig
from deeploop.nn.context import Context

if TYPE_CHECKING:
    from deeploop.models.gpt import LoopedGPT

GATE = "exit_gate."  # prefix of the gate's parameters
Rounds = Iterator[tuple[Tensor, Tensor]]  # the stream after a round, and after the coda


class ExitGate(nn.Module):
    """The logit of λ: a linear map of the normalized state. It starts at λ = 1/2 for every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(1))  # FSDP2 refuses a scalar
        self.init_weights_()

    @torch.no_grad()
    def init_weights_(self) -> None:
        """Set every parameter to its initial value, without random numbers."""
        self.weight.zero_()
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, T) of the states x (B, T, width), in fp32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Not a linear layer, which would give bf16 under autocast.
        return (F.rms_norm(wide, wide.shape[-1:]) * self.weight).sum(-1) + self.bias


def log_exits(logits: list[Tensor]) -> list[Tensor]:
    """log q(t) of every round from the gate's logits. Σ_t q(t) = 1: the last round takes the rest."""
    exits, left = [], torch.zeros_like(logits[0])
    for z in logits[:-1]:
        exits.append(left + F.logsigmoid(z))
        left = left + F.logsigmoid(-z)
    # The last logit has no effect, but sharded ranks need every parameter in the graph, even at one round.
    return [*exits, left + 0 * logits[-1]]


def exit_loss(
    model: "LoopedGPT",
    config: GateConfig,
    x: Tensor,
    entered: Tensor | None,
    context: Context,
    targets: Tensor,
) -> tuple[Tensor, Tensor]:
    """The last round's states after the coda, and the loss summed over the targets, of a loop from x."""
    rounds = _rounds(model, x, entered, context)
    if config.stage == "joint":
        return _joint_loss(model, config.entropy, rounds, targets)
    return _gate_loss(model, rounds, targets)


def _joint_loss(model: "LoopedGPT", beta: float, rounds: Rounds, targets: Tensor) -> tuple[Tensor, Tensor]:
    outputs = [(model.exit_logits(x), out) for x, out in rounds]
    log_q = log_exits([z for z, _ in outputs])
    kept = targets >= 0
    loss = torch.zeros((), device=targets.device)
    for (_, out), own in zip(outputs, log_q, strict=True):
        q = own.exp()
        loss = loss + model.head_loss(model.final_norm(out), targets, q)
        loss = loss + beta * (q * own * kept).sum()  # − β·H(q)
    return outputs[-1][1], loss


def _gate_loss(model: "LoopedGPT", rounds: Rounds, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of 1 − λ_t against whether round t + 1 lowers the loss, averaged over rounds."""
    with torch.no_grad():
        outputs = [*rounds]
        losses = [model.token_losses(model.final_norm(out), targets) for _, out in outputs]
    logits = [model.exit_logits(x) for x, _ in outputs]
    kept = (targets >= 0).float()
    total = 0 * logits[-1].sum()  # keeps the last logit in the graph, as above
    for z, now, after in zip(logits, losses, losses[1:], strict=False):
        goes_on = (after < now).float()
        total = total + F.binary_cross_entropy_with_logits(-z, goes_on, weight=kept, reduction="sum")
    return outputs[-1][1], total / max(1, model.rounds - 1)


def _rounds(model: "LoopedGPT", x: Tensor, entered: Tensor | None, context: Context) -> Rounds:
    """Yield the stream after every round, and its value after the coda, from which the loss is computed."""
    for index in range(model.rounds):
        x = model.loop(x, range(index, index + 1), context, entered)
        yield x, model.once("coda", x, context)
