"""Effect of a real optimizer step on the output, compared with its first-order prediction.

Adam's last step can be undone exactly from its state, so a checkpoint suffices to compare F(θ) with F(θ − δ),
where δ is the step of the matrices in all residual branches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from deeploop.diagnose.visit_grads import Sublayer, Values, probing, separate_visits


@dataclass(frozen=True)
class AdamState:
    """AdamW's state after `step` steps, with the settings of its last step. Moments by parameter name."""

    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]
    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def before_last_step(self, name: str, value: Tensor) -> Tensor:
        """p ← p(1 − lr·wd) − lr·m̂/(√v̂ + ε), solved for the old p."""
        if name not in self.exp_avg:
            raise ValueError(f"{name}: the optimizer's state has no moments for it")
        m = self.exp_avg[name].to(value) / (1 - self.betas[0] ** self.step)
        v = self.exp_avg_sq[name].to(value) / (1 - self.betas[1] ** self.step)
        return (value + self.lr * m / (v.sqrt() + self.eps)) / (1 - self.lr * self.weight_decay)


@dataclass(frozen=True)
class StepEffect:
    """‖ΔF‖ / ‖F‖ of a step, and the size of the step in each sublayer."""

    measured: float
    first_order: float
    error: float  # ‖ΔF − first order‖ / ‖ΔF‖: the nonlinear part
    output_norm: float  # ‖F‖
    update_norms: dict[str, float]  # ‖δ_j‖
    update_to_weight: dict[str, float]  # ‖δ_j‖ / ‖φ_j‖


def step_effect(sublayers: Sequence[Sublayer], output: Callable[[], Tensor], state: AdamState) -> StepEffect:
    """Compare the output before and after the last step of these sublayers' matrices."""
    after = {sublayer.name: tuple(v.detach() for v in sublayer.values()) for sublayer in sublayers}
    before = {s.name: _undone(s, state) for s in sublayers}
    step = {name: tuple(a - b for a, b in zip(after[name], before[name], strict=True)) for name in after}
    with _full_fp32():
        old, linear = _output_and_product(sublayers, output, before, step)
        with torch.no_grad(), separate_visits(sublayers, lambda s, _: after[s.name]):
            change = output() - old
    norms = {name: _norm(values) for name, values in step.items()}
    size = float(old.norm())
    return StepEffect(
        measured=float(change.norm()) / size,
        first_order=float(linear.norm()) / size,
        error=float((change - linear).norm() / change.norm().clamp(min=1e-30)),
        output_norm=size,
        update_norms=norms,
        update_to_weight={name: norm / _norm(before[name]) for name, norm in norms.items()},
    )


def _undone(sublayer: Sublayer, state: AdamState) -> Values:
    return tuple(
        state.before_last_step(f"{sublayer.name}.{name}", value.detach())
        for name, value in zip(sublayer.parameters, sublayer.values(), strict=True)
    )


def _output_and_product(
    sublayers: Sequence[Sublayer],
    output: Callable[[], Tensor],
    at: Mapping[str, Values],
    direction: Mapping[str, Values],
) -> tuple[Tensor, Tensor]:
    """F, and Σ_j (Σ_r U_{r,j}) δ_j by transposing twice, as in `sensitivity.OutputMap`."""
    leaves = {name: tuple(v.requires_grad_() for v in values) for name, values in at.items()}
    with separate_visits(sublayers, lambda s, _: leaves[s.name]):
        value = output()
    w = torch.zeros_like(value, requires_grad=True)
    flat_leaves = [leaf for s in sublayers for leaf in leaves[s.name]]
    tangents = [d for s in sublayers for d in direction[s.name]]
    with probing():
        rows = torch.autograd.grad(value, flat_leaves, w, create_graph=True, materialize_grads=True)
        (product,) = torch.autograd.grad(rows, w, tangents, materialize_grads=True)
    return value.detach(), product


@contextmanager
def _full_fp32() -> Iterator[None]:
    """Disable TF32, whose rounding is as large as the effect of a step."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _norm(values: Values) -> float:
    return float(torch.stack([value.detach().norm() for value in values]).norm())
