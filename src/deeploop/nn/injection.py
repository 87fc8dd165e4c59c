"""How the prelude's output e enters every round of a loop, before its first block.

add      x ← x + e
linear   x ← W·[x; e], W = [I | 0] at the start
gated    x ← a ⊙ x + softplus(dt) ⊙ B·e, a = exp(−softplus(dt)·exp(A_log))

The gated carry contracts: a lies in (0, 1) whatever is learned. It starts at √(1/5), with A_log = 0 and B =
I. The part that is the same in every round is computed once, by `enter`.
"""

import math
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config.kinds import InjectionKind

FIRST_DECAY = math.sqrt(1 / 5)


class Injection(nn.Module):
    """x ← x + e; base class of the others, which compute in the stream's precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def init_weights_(self) -> None:
        """Set every parameter to its initial value, without random numbers."""

    def enter(self, e: Tensor) -> Tensor:
        """Return the tensor that `forward` adds in every round, (B, T, width)."""
        return e

    def forward(self, x: Tensor, entered: Tensor) -> Tensor:
        return x + entered


class LinearInjection(Injection):
    """x ← W·[x; e]."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight = nn.Parameter(torch.empty(width, 2 * width))
        self.init_weights_()

    @torch.no_grad()
    def init_weights_(self) -> None:
        self.weight.zero_()
        self.weight[:, : self.width].fill_diagonal_(1.0)

    def enter(self, e: Tensor) -> Tensor:
        return _linear(e, self.weight[:, self.width :])

    def forward(self, x: Tensor, entered: Tensor) -> Tensor:
        return _linear(x, self.weight[:, : self.width]) + entered


class GatedInjection(Injection):
    """x ← a ⊙ x + softplus(dt) ⊙ B·e."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.A_log = nn.Parameter(torch.empty(width))
        self.dt = nn.Parameter(torch.empty(width))
        self.B = nn.Parameter(torch.empty(width, width))
        self.init_weights_()

    @torch.no_grad()
    def init_weights_(self) -> None:
        self.A_log.zero_()
        self.dt.fill_(math.log(1 / FIRST_DECAY - 1))  # softplus(dt) = −ln of the decay
        self.B.zero_()
        self.B.fill_diagonal_(1.0)

    def enter(self, e: Tensor) -> Tensor:
        return F.softplus(self.dt) * _linear(e, self.B)

    def forward(self, x: Tensor, entered: Tensor) -> Tensor:
        decay = torch.exp(-F.softplus(self.dt) * torch.exp(self.A_log))
        return decay * x + entered


def make_injection(kind: InjectionKind, width: int) -> Injection | None:
    """Make the injection of that name; `none` has no module."""
    kinds = {"none": None, "add": Injection, "linear": LinearInjection, "gated": GatedInjection}
    if kind not in kinds:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(get_args(InjectionKind))}")
    made = kinds[kind]
    return None if made is None else made(width)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    # In bf16 the carry would lose digits of the stream in every round.
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(torch.promote_types(x.dtype, weight.dtype)), weight).to(x.dtype)
