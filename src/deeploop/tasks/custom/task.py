"""A task of your own for the training loop: your data, your loss, your evaluation.

    class Reverse(CustomTask):
        def batch(self, step): ...                    # (inputs, targets) of a whole step
        def batch_loss(self, model, inputs, targets): ...
        def evaluate(self, model): ...                # {"loss": …}

    deeploop.train.train(CustomTrainConfig(…), task=Reverse)

Schedule, clipping, micro-batches, ranks, checkpoints, resume and metrics are the loop's. A whole one:
examples/own_task.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deeploop.data.loader_state import check_position
from deeploop.models.gpt import LoopedGPT
from deeploop.train.distributed import World
from deeploop.train.memory import Fit, even_splits
from deeploop.train.optim import make_gpt_optimizer
from deeploop.train.task import Monitor, OnBatch, Task, ignore_batch

if TYPE_CHECKING:
    from deeploop.train.config import CustomTrainConfig


@dataclass(frozen=True)
class CustomDataConfig:
    """What the loop must know of the data."""

    validate_every: int = 500
    """Steps between validations; one more comes at the end."""

    def __post_init__(self) -> None:
        if self.validate_every < 1:
            raise ValueError(f"data.validate_every={self.validate_every}: must be at least 1")


class CustomTask:
    """A base class: `batch`, `batch_loss` and `evaluate` are yours, all else has defaults.

    `build` makes a LoopedGPT of `config.model`; return another module there if you like. The memory of a step
    is not estimated: `device.micro_batch=0` takes a rank's whole share at once, and `device.recompute=auto`
    is off.
    """

    monitor: Monitor | None = None
    can_be_recorded = False
    can_be_queued = False
    draws_rounds = False
    held = 0
    step_bytes = 0
    flops_per_step = 0
    targets_per_step = 0

    def __init__(self, config: "CustomTrainConfig", world: World) -> None:
        self.config, self.world = config, world
        recompute = "off" if config.device.recompute == "auto" else config.device.recompute
        self.fit = Fit(even_splits(config.optim.batch, config.device, world)[0], recompute)
        self.examples = config.optim.steps * config.optim.batch
        self.skips_non_finite = config.optim.non_finite == "skip"
        self.step = 0
        self.on_batch: OnBatch = ignore_batch

    # ── Yours ───────────────────────────────────────────────────────────────────────────────────────────
    def batch(self, step: int) -> tuple[Tensor, ...]:
        """The tensors of step number `step` (from 0), each of `optim.batch` rows, the targets last.

        Make it a function of `config.seed` and `step`: then a resumed run sees what it would have seen.
        """
        raise NotImplementedError(f"{type(self).__name__}.batch: must return the tensors of a step")

    def batch_loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """The mean loss over the rows of a micro-batch, whose tensors are on the device."""
        raise NotImplementedError(f"{type(self).__name__}.batch_loss: must return the mean loss of a batch")

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """Numbers on held-out data, `loss` among them; the same on every rank.

        If it takes long, call `self.on_batch(share)` before each batch, equally often on every rank, with the
        share that is done: the loop shows it, and can stop there.
        """
        raise NotImplementedError(f"{type(self).__name__}.evaluate: must return a dict with a loss")

    def build(self) -> nn.Module:
        """The model with freshly drawn weights."""
        model = LoopedGPT(self.config.model, seed=self.config.seed)
        model.recompute = self.fit.recompute
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW or Muon over the model; return another optimizer if you like.

        The schedule sets the rate of every group, times its `lr_multiplier` where it has one.
        """
        return make_gpt_optimizer(model, self.config.model, self.config.optim, self.world.device)

    def describe(self, result: dict[str, Any]) -> str:
        """An evaluation in one line."""
        numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
        return "validation  " + "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())

    # ── The loop's ──────────────────────────────────────────────────────────────────────────────────────
    def micro_batches(self) -> list[tuple[Tensor, ...]]:
        """This rank's rows of the next step, in pieces."""
        parts, rows = self.batch(self.step), self.config.optim.batch
        if any(len(part) != rows for part in parts):
            raise ValueError(
                f"{type(self).__name__}.batch: returned {[len(part) for part in parts]} rows, "
                f"must be optim.batch={rows} each"
            )
        self.step += 1
        self.targets_per_step = parts[-1].numel()
        own = rows // self.world.size
        mine = slice(self.world.rank * own, (self.world.rank + 1) * own)
        return [*zip(*(part[mine].split(self.fit.micro_batch) for part in parts), strict=True)]

    def tokens_at_once(self) -> int:
        """Tokens of a micro-batch by the batch of step 0; 0 unless its tensors all have one shape (B, T)."""
        first, *others = (part.shape for part in self.batch(0))
        return self.fit.micro_batch * first[1] if len(first) == 2 and {*others} <= {first} else 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """A micro-batch's share of the step's mean loss."""
        parts = [part.to(self.world.device, non_blocking=True) for part in batch]
        return self.batch_loss(model, *parts) * (len(parts[0]) / self.config.optim.batch)

    def drawn(self) -> dict[str, int]:
        """Nothing is drawn for a step."""
        return {}

    def redraw(self, drawn: dict[str, int]) -> None:
        """Nothing was drawn."""

    def update(self, step: int, only_if: Tensor | None) -> None:
        """Nothing is trained but what the optimizer holds."""

    def after_step(self, step: int) -> None:
        """Nothing is carried from step to step."""

    def stamp(self) -> dict[str, Any]:
        """What a run folder says of its task."""
        return {"task": "custom", "class": type(self).__name__}

    def files(self) -> dict[str, str]:
        """Files of the task's own in the run folder: none."""
        return {}

    def state(self) -> dict[str, Any]:
        """Where the data stand, for a checkpoint: nothing but the step."""
        return {"loader": {"task": type(self).__name__, "position": self.step}}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the task's own, for a checkpoint: none."""
        return {}

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Goes on from there."""
        identity = {"task": type(self).__name__}
        _, self.step = check_position({"epoch": 0, **state.get("loader", {})}, identity)


TaskFactory = Callable[["CustomTrainConfig", World], Task]
"""What `train(config, task=…)` takes: a subclass of CustomTask, or a function that returns a task."""

if TYPE_CHECKING:
    # Nothing here makes a CustomTask: without this line no type checker would see what it lacks.
    _complete: TaskFactory = CustomTask
