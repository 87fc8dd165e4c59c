"""Base class of the tasks that a run trains. The tasks themselves are in `deeploop.tasks`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from deeploop.data.tokenizers import Tokenizer
from deeploop.train.distributed import World
from deeploop.train.execution import Capabilities
from deeploop.train.memory import Fit, Needs, fit, needs_on
from deeploop.train.optim import make_optimizer

OnBatch = Callable[[float], None]
"""Called before each batch of an evaluation with the share done, equally often on all ranks."""


class EvaluationStopped(Exception):
    """An evaluation was abandoned, because the run was asked to stop."""


def ignore_batch(share: float) -> None:
    """Default of `on_batch`: do nothing."""


@dataclass(frozen=True)
class StepData:
    """Data of a step."""

    batches: list[Any]
    """This rank's share, in pieces that fit the device."""
    rounds: int | None = None
    """Rounds of the model in this step; None: unchanged."""


def set_rounds(model: Any, rounds: int | None) -> None:
    """Set a model's rounds for a step; None changes nothing."""
    if rounds is not None and rounds != model.rounds:
        model.set_rounds(rounds)


class Monitor(Protocol):
    """Monitoring of a model's loop: its diagnosis, and advice on a collapse."""

    diagnose_every: int
    """Steps between two diagnoses; 0 is never."""

    def diagnose(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Measure the loop."""

    def collapse_advice(self) -> str:
        """Advice for a run whose evaluation had the verdict `collapsed`."""


class Task(ABC):
    """A model, its data, its loss and its evaluation: `build`, `batches`, `loss`, `evaluate`, `describe`.

    With a config that names it, these make a kind of run. `__init__` sets `fit` (by `fit_memory`), `examples`
    and `targets_per_step`; everything else has a default.
    """

    is_given: ClassVar[bool] = False
    """True if the user must pass the task: `train(config, task=YourTask)`."""
    legend: ClassVar[dict[str, str]] = {}
    """Meaning of an evaluation's numbers, for the header."""

    fit: Fit
    """The micro-batch of a rank, and what is recomputed."""
    examples: int
    """Training tokens or examples."""
    targets_per_step: int
    flops_per_step: int = 0
    """0: unknown, as for the next two."""
    step_bytes: int = 0
    """Memory of a step on a rank, estimated."""
    validation_steps: float = 0.0
    """Cost of one validation, in steps."""
    monitor: Monitor | None = None
    """Monitor of the loop during training."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of a task on text, to refuse weights that were trained on another one's tokens."""
    ahead: int = 0
    """Sequences drawn beyond step × batch, in a run whose batch was changed."""
    begun_with: int = 0
    """`optim.steps` when the run was started; rounds rise over a share of them."""

    def __init__(self, config: Any, world: World) -> None:
        self.config, self.world = config, world
        self.begun_with = config.optim.steps

    def fit_memory(self, needs: Needs, tokens: int) -> None:
        """Set `fit` and `step_bytes` from the bytes that a step `needs`; a sequence has `tokens`."""
        config, world = self.config, self.world
        self.fit = fit(config.optim.batch, config.device, world, needs, tokens=tokens)
        self.step_bytes = needs_on(world.device, config.device, needs)(*self.fit)

    def drawn(self, step: int) -> int:
        """Return the number of sequences drawn in the first `step` steps."""
        return self.ahead + step * int(self.config.optim.batch)

    @property
    def capabilities(self) -> Capabilities:
        """Properties of the steps that the executor may use."""
        return Capabilities()

    @classmethod
    def tokens_and_flops(cls, config: Any) -> tuple[int, float] | None:
        """Return the tokens of a whole run and the FLOPs per token; None if they depend on its data."""
        return None

    # ── Required ────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def build(self) -> nn.Module:
        """Build the model with freshly drawn weights, the same on every machine."""

    @abstractmethod
    def batches(self, step: int) -> StepData:
        """Return the data of step number `step` (from 0); called once per step, in order."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return a micro-batch's share of the step's mean loss."""

    @abstractmethod
    def evaluate(self, model: nn.Module, on_batch: OnBatch = ignore_batch) -> dict[str, Any]:
        """Return metrics on held-out data, including `loss`; the same on every rank."""

    @abstractmethod
    def describe(self, result: dict[str, Any]) -> str:
        """Format an evaluation in one line."""

    # ── With defaults ───────────────────────────────────────────────────────────────────────────────────
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make AdamW or Muon over the wrapped model.

        The schedule sets the rate of every group, times its `lr_multiplier` where it has one.
        """
        fused, multiplier = self.world.device.type == "cuda", self.config.model.matrix_lr_multiplier
        return make_optimizer(model, self.config.optim, fused=fused, matrix_lr_multiplier=multiplier)

    def metrics(self, model: nn.Module) -> dict[str, Any]:
        """Return more numbers, or lists of them, for a line of training metrics."""
        return {}

    def leave(self) -> tuple[Tensor, ...]:
        """Return the tensors that `receive` needs of the last `loss` and its backward pass.

        They are part of the CUDA graph: a replay calls neither method and refills them.
        """
        return ()

    def receive(self, batch: Any, left: tuple[Tensor, ...]) -> None:  # noqa: B027
        """Use what a micro-batch left."""

    def update(self, step: int, only_if: Tensor | None) -> None:  # noqa: B027
        """Update parameters outside the optimizer, after its step number `step` (from 0).

        With `only_if` the loss is not known yet: nothing may change if that tensor is false.
        """

    def stamp(self) -> dict[str, Any]:
        """Fields of run.json that describe the task; `task` is a key of `deeploop.tasks.KINDS`."""
        return {"task": self.config.task}

    def files(self) -> dict[str, str]:
        """Return further files of the run folder: name → text."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint's JSON file."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint's tensor file, gathered over the ranks."""
        return {}

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:  # noqa: B027
        """Load the state from a checkpoint."""

    def check_source(self, stamp: dict[str, Any], run: Path) -> None:  # noqa: B027
        """Raise for a run of this kind whose weights can't be started from; `stamp` is its run.json."""

    def warnings(self) -> list[str]:
        """Warnings about the plan, each with the option that changes it."""
        return []


TaskFactory = Callable[[Any, World], Task]
"""Argument `task` of `train`: a subclass of `CustomTask`, or a function that returns a task."""
