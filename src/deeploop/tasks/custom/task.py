"""A base class for your own task: your data, your loss, your evaluation.

    class Reverse(CustomTask):
        def batch(self, step): ...                    # (inputs, targets) of a whole step
        def batch_loss(self, model, inputs, targets): ...
        def evaluate(self, model): ...                # {"loss": …}

    deeploop.train.train(CustomTrainConfig(…), task=Reverse)

The loop does the schedule, clipping, micro-batches, ranks, checkpoints, resume and metrics.
examples/own_task.py is a complete example.
"""

from functools import cached_property
from inspect import signature
from typing import Any

from torch import Tensor, nn

from deeploop.data.loader_state import check_position
from deeploop.models.gpt import LoopedGPT
from deeploop.tasks.custom.config import CustomTrainConfig
from deeploop.train.distributed import World
from deeploop.train.execution import Capabilities
from deeploop.train.memory import Fit, even_splits
from deeploop.train.task import OnBatch, StepData, Task, ignore_batch


class CustomTask(Task):
    """A base class: implement `batch`, `batch_loss` and `evaluate`; everything else has defaults.

    `build` makes a LoopedGPT from `config.model`; override it for another module. The memory of a step is not
    estimated: `device.micro_batch=0` takes a rank's whole share at once, and `device.recompute=auto` is off.
    """

    is_given = True
    config: CustomTrainConfig
    targets_per_step = 0  # known after the first batch

    def __init__(self, config: CustomTrainConfig, world: World) -> None:
        super().__init__(config, world)
        recompute = "off" if config.device.recompute == "auto" else config.device.recompute
        self.fit = Fit(even_splits(config.optim.batch, config.device, world)[0], recompute)
        self.examples = config.optim.steps * config.optim.batch
        self.step = 0  # the step whose batch comes next
        if "on_batch" not in signature(self.evaluate).parameters:  # without progress
            short: Any = self.evaluate
            self.evaluate = lambda model, on_batch=ignore_batch: short(model)  # type: ignore[method-assign]

    # ── To implement ────────────────────────────────────────────────────────────────────────────────────────
    def batch(self, step: int) -> tuple[Tensor, ...]:
        """The tensors of step number `step` (from 0), each of `optim.batch` rows, the targets last.

        Compute them from `config.seed` and `step` alone, so that a resumed run gets the same batches.
        """
        raise NotImplementedError(f"{type(self).__name__}.batch: must return the tensors of a step")

    def batch_loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """The mean loss over the rows of a micro-batch, whose tensors are on the device."""
        raise NotImplementedError(f"{type(self).__name__}.batch_loss: must return the mean loss of a batch")

    def evaluate(self, model: nn.Module, on_batch: OnBatch = ignore_batch) -> dict[str, Any]:
        """Metrics on held-out data, including `loss`; the same on every rank.

        `evaluate(self, model)` is enough. If it takes long, accept `on_batch` too and call it before each
        batch with the share done, equally often on every rank: the loop shows progress, and can stop there.
        """
        raise NotImplementedError(f"{type(self).__name__}.evaluate: must return a dict with a loss")

    def build(self) -> nn.Module:
        """Build the model with freshly drawn weights."""
        model = LoopedGPT(self.config.model, seed=self.config.seed)
        model.recompute = self.fit.recompute
        return model

    def describe(self, result: dict[str, Any]) -> str:
        """Format an evaluation in one line."""
        numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
        return "validation  " + "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())

    # ── Called by the loop ──────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def capabilities(self) -> Capabilities:
        """Steps can't be captured or queued, as `batch_loss` may do anything."""
        # Making a batch can be slow, and only FP8 needs its number of tokens.
        tokens = self.tokens_at_once() if self.config.device.precision == "fp8" else 0
        return Capabilities(skippable=self.config.optim.non_finite == "skip", tokens=tokens)

    def batches(self, step: int) -> StepData:
        """This rank's rows of the step, split into micro-batches."""
        parts, rows = self.batch(step), self.config.optim.batch
        if any(len(part) != rows for part in parts):
            raise ValueError(
                f"{type(self).__name__}.batch: returned {[len(part) for part in parts]} rows, "
                f"must be optim.batch={rows} each"
            )
        self.step = step + 1
        self.targets_per_step = parts[-1].numel()
        mine = self.world.rows(rows)
        return StepData([*zip(*(part[mine].split(self.fit.micro_batch) for part in parts), strict=True)])

    def tokens_at_once(self) -> int:
        """Tokens of a micro-batch, from the batch of step 0; 0 unless all tensors have one shape (B, T)."""
        first, *others = (part.shape for part in self.batch(0))
        return self.fit.micro_batch * first[1] if len(first) == 2 and {*others} <= {first} else 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return this micro-batch's share of the step's mean loss."""
        parts = [part.to(self.world.device, non_blocking=True) for part in batch]
        return self.batch_loss(model, *parts) * (len(parts[0]) / self.config.optim.batch)

    def stamp(self) -> dict[str, Any]:
        """Fields of run.json that describe the task."""
        return {**super().stamp(), "class": type(self).__name__}

    def state(self) -> dict[str, Any]:
        """The loader's state in a checkpoint: only the step."""
        return {"loader": {"task": type(self).__name__, "position": self.step}}

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        identity = {"task": type(self).__name__}
        _, self.step = check_position({"epoch": 0, **state.get("loader", {})}, identity)
