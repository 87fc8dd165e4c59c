"""AdamATan2: Adam whose step is atan2(m, √v) instead of m / (√v + ε), with a running average of the weights.

    p ← p·(1 − lr·wd) − lr / (1 − β1^t) · atan2(m, √(v / (1 − β2^t)))

The first bias correction is outside atan2. There is no ε: the scale of the loss does not matter.

The device can skip a step by itself, through `found_inf` and `grad_scale` as in torch's fused AdamW.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deeploop.accelerate.known import HAS_TRITON


class AdamATan2(torch.optim.Optimizer):
    """AdamATan2 over any parameters; `ema` above 0 keeps ema·average + (1 − ema)·p beside the moments.

    The average is a part of the optimizer's state, so it is saved, sharded and resumed as the moments are.
    """

    found_inf: Tensor | None = None
    """Other than 0: parameters, moments and average keep their values, whatever the gradients are."""
    grad_scale: Tensor | None = None
    """Divisor of the gradients."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        ema: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "ema": ema})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "no loss is evaluated again"
        stays = None if self.found_inf is None else self.found_inf != 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group, stays)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any], stays: Tensor | None) -> None:
        state, lr, (beta1, beta2) = self.state[p], group["lr"], group["betas"]
        if not state:
            state["step"] = torch.zeros(())  # on the CPU, as AdamW's: it is read at every step
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            if group["ema"]:
                state["average"] = p.clone()
        # Counted on the host, so a step that the device leaves out counts too: it ends a reasoner's run.
        state["step"] += 1
        t = int(state["step"])
        values = [p, state["exp_avg"], state["exp_avg_sq"], *([state["average"]] if group["ema"] else [])]
        decay, rate, root = 1 - lr * group["weight_decay"], lr / (1 - beta1**t), math.sqrt(1 - beta2**t)
        if p.is_cuda and HAS_TRITON:
            from deeploop.nn.kernels.adam_atan2 import adam_atan2_, fits  # here there is Triton to import

            if fits(p, grad):
                adam_atan2_(
                    values, grad, decay=decay, rate=rate, root=root, betas=(beta1, beta2), ema=group["ema"],
                    skip=self.found_inf, divisor=self.grad_scale,
                )  # fmt: skip
                return
        if self.grad_scale is not None:
            grad = grad / self.grad_scale
        # Beside the old values: what a NaN has touched can't be undone.
        moved = values if stays is None else [value.clone() for value in values]
        p, m, v, *average = moved
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.mul_(decay).sub_(torch.atan2(m, v.sqrt().div_(root)), alpha=rate)
        if average:
            average[0].lerp_(p, 1 - group["ema"])
        if stays is not None:
            for old, new in zip(values, moved, strict=True):
                torch.where(stays, old, new, out=old)


@contextmanager
@torch.no_grad()
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which the parameters are their running averages, if there are any."""
    pairs = [(p, own["average"]) for p, own in optimizer.state.items() if "average" in own]
    kept = [p.clone() for p, _ in pairs]
    for p, average in pairs:
        p.copy_(average)
    try:
        yield
    finally:
        for (p, _), value in zip(pairs, kept, strict=True):
            p.copy_(value)
