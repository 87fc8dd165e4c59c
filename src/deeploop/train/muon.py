"""Muon for the matrices of the blocks and AdamW for everything else, as one optimizer.

Muon takes a matrix's momentum and steps along the nearest orthogonal matrix (Newton-Schulz iterations). Both
updates come from torch.optim; here they share parameter groups and state.
"""

from collections.abc import Callable
from typing import Any

import torch

ParamGroup = dict[str, Any]


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` on `matrices`, which are groups of 2D parameters, and `torch.optim.AdamW` on `rest`.

    One learning rate serves both: Muon's is scaled so that its update has the RMS of AdamW's. Schedules and
    checkpoints see the groups and the state of this object alone.
    """

    def __init__(
        self,
        matrices: list[ParamGroup],
        rest: list[ParamGroup],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        super().__init__([*matrices, *rest], {"lr": lr})
        self._muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "no loss is evaluated again"
        count = len(self._muon.param_groups)
        # Handed over at every step: load_state_dict replaces both lists and state.
        self._muon.param_groups = self.param_groups[:count]
        self._adamw.param_groups = self.param_groups[count:]
        for inner in (self._muon, self._adamw):
            inner.state = self.state
            inner.step()
