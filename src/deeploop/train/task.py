"""What the training loop asks of a task; `language.py`, `puzzle.py` and `iterate.py` answer."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deeploop.train.memory import Fit

OnBatch = Callable[[float], None]


class EvaluationStopped(Exception):
    """An evaluation was abandoned, because the run was asked to stop."""


def ignore_batch(share: float) -> None:
    """For an evaluation that nobody watches."""


class Monitor(Protocol):
    """The loop of a model, watched: its diagnosis, and a guard against collapse."""

    diagnose_every: int
    """Steps between two diagnoses; 0 is never."""
    stops_when_collapsed: bool
    """Whether an evaluation with the verdict `collapsed` ends the run, once warm-up is over."""

    def diagnose(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Numbers about the loop itself."""

    def collapse_advice(self) -> str:
        """What to tell whose evaluation had the verdict `collapsed`."""


class Task(Protocol):
    """A model, its data, its loss and its evaluation."""

    fit: Fit
    step_bytes: int
    """Memory of a step on a rank, estimated."""
    examples: int
    """Tokens, or examples, that there are to train on."""
    targets_per_step: int
    flops_per_step: int
    monitor: Monitor | None
    """What is watched of the loop itself while it trains; a task need not have it."""
    held: int
    """Steps for which the warm-up of the learning rate was held."""
    skips_non_finite: bool
    """Whether a step whose loss or gradient is not finite is left out; else it ends the run."""

    can_be_recorded: bool
    """Whether `loss` is the same work for batches alike in rounds, and nothing in it waits for the device."""
    can_be_queued: bool
    """Whether the next step can be queued before the loss of this one is known, without a CUDA graph too."""
    draws_rounds: bool
    """Whether steps differ in their number of rounds."""

    on_batch: OnBatch
    """Set by the loop; `evaluate` calls it before each batch, on all ranks alike, with the share done."""

    def build(self) -> nn.Module:
        """The model with freshly drawn weights."""

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the wrapped model; a group may carry `lr_multiplier`."""

    def stamp(self) -> dict[str, Any]:
        """What a run folder says of its task; `task` is a key of `config.KINDS`."""

    def files(self) -> dict[str, str]:
        """What else a run folder keeps of its task: names and text."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps as JSON."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps as tensors, of all ranks together."""

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Goes on from there."""

    def micro_batches(self) -> list[Any]:
        """This rank's share of the next step, in pieces that fit the device."""

    def drawn(self) -> dict[str, int]:
        """What was drawn for the step whose batches came last, for its line of metrics."""

    def redraw(self, drawn: dict[str, int]) -> None:
        """Goes back to what `drawn` said of an earlier step, whose batches are to be repeated."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A micro-batch's share of the step's mean loss."""

    def update(self, step: int, only_if: Tensor | None) -> None:
        """The task's own part of the optimizer's step number `step` (from 0), queued right behind it.

        With `only_if`, nobody has looked at the loss yet: what is trained may change only where that is true.
        """

    def after_step(self, step: int) -> None:
        """What follows the optimizer's step number `step` (from 0), once its loss is known to be finite."""

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """Numbers on held-out data, `loss` among them; the same on every rank."""

    def describe(self, result: dict[str, Any]) -> str:
        """An evaluation in one line."""
