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
from deeploop.train.memory import Fit
from deeploop.train.optim import make_optimizer

OnBatch = Callable[[float], None]
"""Called before each batch of an evaluation, on all ranks alike, with the share that is done."""


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
    """Rounds of the model in this step; None: as it is."""


def set_rounds(model: Any, rounds: int | None) -> None:
    """Give a model its rounds of a step; None leaves it as it is."""
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

    With a config that names it, these make a kind of run. `__init__` sets `fit`, `examples` and
    `targets_per_step`; everything else has a default.
    """

    is_given: ClassVar[bool] = False
    """The config leaves it to its user, who gives a task beside it: `train(config, task=YourTask)`."""
    legend: ClassVar[dict[str, str]] = {}
    """Meaning of an evaluation's numbers, for the header."""

    fit: Fit
    """The micro-batch of a rank, and what is recomputed."""
    examples: int
    """Tokens, or examples, that there are to train on."""
    targets_per_step: int
    flops_per_step: int = 0
    """0: not known, as of the memory and the validation."""
    step_bytes: int = 0
    """Memory of a step on a rank, estimated."""
    validation_steps: float = 0.0
    """Cost of one validation, in steps."""
    monitor: Monitor | None = None
    """Monitor of the loop during training."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of a task on text, to refuse weights that were trained on another one's tokens."""
    ahead: int = 0
    """Sequences drawn beyond step × batch, in a run that had another batch before."""
    begun_with: int = 0
    """Steps that the run was begun with, over a share of which rounds rise."""

    def __init__(self, config: Any, world: World) -> None:
        self.config, self.world = config, world
        self.begun_with = config.optim.steps

    def drawn(self, step: int) -> int:
        """Sequences drawn in the first `step` steps: the number of the next one."""
        return self.ahead + step * int(self.config.optim.batch)

    @property
    def capabilities(self) -> Capabilities:
        """Properties of the steps that the executor may use."""
        return Capabilities()

    @classmethod
    def tokens_and_flops(cls, config: Any) -> tuple[int, float] | None:
        """Tokens of a whole run, and FLOPs of each; None where they are not known without its data."""
        return None

    # ── Required ────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def build(self) -> nn.Module:
        """The model with freshly drawn weights, the same on every machine."""

    @abstractmethod
    def batches(self, step: int) -> StepData:
        """The data of step number `step` (from 0); asked for once for each step, in order."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A micro-batch's share of the step's mean loss."""

    @abstractmethod
    def evaluate(self, model: nn.Module, on_batch: OnBatch = ignore_batch) -> dict[str, Any]:
        """Numbers on held-out data, `loss` among them; the same on every rank."""

    @abstractmethod
    def describe(self, result: dict[str, Any]) -> str:
        """An evaluation in one line."""

    # ── With defaults ───────────────────────────────────────────────────────────────────────────────────
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW or Muon over the wrapped model.

        The schedule sets the rate of every group, times its `lr_multiplier` where it has one.
        """
        fused, multiplier = self.world.device.type == "cuda", self.config.model.matrix_lr_multiplier
        return make_optimizer(model, self.config.optim, fused=fused, matrix_lr_multiplier=multiplier)

    def metrics(self, model: nn.Module) -> dict[str, Any]:
        """More numbers, or lists of them, for the line of training metrics that is due after a step."""
        return {}

    def leave(self) -> tuple[Tensor, ...]:
        """Return the tensors that `receive` needs of the last `loss` and its backward pass.

        They are part of the CUDA graph: a replay calls neither method and refills them.
        """
        return ()

    def receive(self, batch: Any, left: tuple[Tensor, ...]) -> None:  # noqa: B027
        """Use what a micro-batch left."""

    def update(self, step: int, only_if: Tensor | None) -> None:  # noqa: B027
        """Update what the optimizer does not hold, after its step number `step` (from 0).

        With `only_if` the loss is not known yet: nothing may change if that tensor is false.
        """

    def stamp(self) -> dict[str, Any]:
        """Fields of run.json that describe the task; `task` is a key of `deeploop.tasks.KINDS`."""
        return {"task": self.config.task}

    def files(self) -> dict[str, str]:
        """Other files of the run folder: names and text."""
        return {}

    def state(self) -> dict[str, Any]:
        """State for a checkpoint's JSON file."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint's tensor file, gathered over the ranks."""
        return {}

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:  # noqa: B027
        """Continue from what a checkpoint kept."""

    def check_source(self, stamp: dict[str, Any], run: Path) -> None:  # noqa: B027
        """Raise for a run of this kind whose weights can't be started from; `stamp` is its run.json."""

    def warnings(self) -> list[str]:
        """Warnings about the plan, each with the option that changes it."""
        return []


TaskFactory = Callable[[Any, World], Task]
"""Argument `task` of `train`: a subclass of `CustomTask`, or a function that returns a task."""
