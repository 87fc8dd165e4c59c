"""Diagnoses during training on a fixed probe, and advice for a collapsed run."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.config.loop import DiagnoseConfig
from deeploop.diagnose.examine import Effort, examine, pick_sublayers
from deeploop.diagnose.perturbation import AdamState
from deeploop.models.gpt import LoopedGPT
from deeploop.nn.documents import document_bounds
from deeploop.tasks.language.config import TrainConfig

Probe = tuple[Tensor, Tensor, Tensor | None]  # inputs, targets, starts of documents if masked


def check_sublayers(config: DiagnoseConfig, model: LoopedGPT) -> None:
    """Raise ValueError for an unknown sublayer before training rather than at the first diagnosis."""
    if config.every:
        try:
            pick_sublayers(model, config.sublayers)
        except ValueError as error:
            raise ValueError(f"diagnose.sublayers: {error}") from None


class LoopMonitor:
    """Diagnose the loop every `diagnose.every` steps, and advise on a collapse."""

    def __init__(self, config: TrainConfig, probe: Probe) -> None:
        self._config, self._probe = config, probe
        self.diagnose_every = config.diagnose.every

    def diagnose(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Diagnose the model on the first validation sequences of this rank.

        Leaves parameters, optimizer and random generators unchanged.
        """
        assert isinstance(model, LoopedGPT)
        began = time.perf_counter()
        config, device = self._config.diagnose, next(model.parameters()).device
        model.set_rounds(self._config.model.rounds)  # the last step may have had another number
        inputs, targets, starts = self._probe
        cut = slice(config.sequences), slice(config.tokens or None)
        # Recomputation would count each visit twice.
        recompute, model.recompute = model.recompute, "off"
        try:
            record = examine(
                model,
                inputs[cut].to(device),
                targets[cut].to(device),
                documents=None if starts is None else document_bounds(starts[cut]).to(device),
                sublayers=config.sublayers,
                state=state_of(model, optimizer),
                effort=Effort(iterations=config.iterations),
            )
        finally:
            model.recompute = recompute
        return record | {"seconds": time.perf_counter() - began}

    def collapse_advice(self) -> str:
        """Advice for a run that is still collapsed after warm-up."""
        config = self._config
        ramp = config.optim.peak_lr / max(1, config.optim.warmup_steps)
        changes = [f"--warmup {4 * max(1, config.optim.warmup_steps)}"]
        rule = config.model.residual
        if rule.alpha == "flat":
            # Its highest stable rate is proportional to the square root of the gain
            # (docs/results/flat-cures).
            changes.insert(0, f"--rule {rule.vary(gain=4 * rule.gain)}")
        if not config.model.unigram_bias:
            changes.insert(0, "--model.unigram-bias")
        if rule.law and rule.p < 1:
            changes.append(f"--rule {rule.vary(p=min(1.0, 2 * rule.p))}")
        return (
            "COLLAPSED: after warm-up every position still carries the same state, and the loss is no better "
            f"than the unigram floor. The rate rose by {ramp:.1e} per step, too fast for this block; "
            f"try {' or '.join(changes)}, or a lower --lr."
        )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> AdamState | None:
    """AdamW's state of the blocks' matrices after its last step."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices = optimizer.param_groups[0]  # make_optimizer puts the matrices first
    moments = {names[parameter]: optimizer.state[parameter] for parameter in matrices["params"]}
    return adam_state(moments, matrices)


def adam_state(moments: Mapping[str, Mapping[str, Tensor]], settings: Mapping[str, Any]) -> AdamState | None:
    """AdamW's state from the moments of its matrices; None before the first step, and for Muon.

    Muon's step is not linear in a visit's gradient, and can't be recovered from its momentum.
    """
    if not moments or not all("exp_avg" in state for state in moments.values()):
        return None
    return AdamState(
        exp_avg={name: state["exp_avg"] for name, state in moments.items()},
        exp_avg_sq={name: state["exp_avg_sq"] for name, state in moments.items()},
        step=int(next(iter(moments.values()))["step"]),  # Adam's moments count, without skipped steps
        **{name: settings[name] for name in ("lr", "betas", "eps", "weight_decay")},
    )
