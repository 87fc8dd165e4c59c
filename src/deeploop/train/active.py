"""A run while it goes on: what it is made of, everything about it that changes, and how that is saved."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from deeploop.train.checkpoint import save_checkpoint
from deeploop.train.config import AnyTrainConfig, to_dict
from deeploop.train.distributed import World
from deeploop.train.execution import Execution
from deeploop.train.metrics import MetricsWriter
from deeploop.train.progress import Clock, Display
from deeploop.train.rundir import provenance
from deeploop.train.task import Task


@dataclass
class ActiveRun:
    """One run of this process; `open_run` makes it, the loop takes it to its last step."""

    config: AnyTrainConfig
    world: World
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    execution: Execution
    display: Display
    lock: TextIO | None = None
    writer: MetricsWriter | None = None
    step: int = 0
    tokens: int = 0
    clock: Clock = field(default_factory=Clock)
    warned: bool = False
    """The collapse was already told."""
    skipped: int = 0
    """Steps left out because they were not finite."""
    skipped_in_a_row: int = 0
    last_evaluated_step: int = 0
    """The last step after which what was due of validation and diagnosis has been done."""
    last_validation: dict[str, Any] = field(default_factory=dict)

    @property
    def is_last_step(self) -> bool:
        return self.step == self.config.optim.steps

    def is_due(self, every: int) -> bool:
        """Whether what is done every so many steps (0: never), and at the last one, is due now."""
        return every > 0 and (self.is_last_step or self.step % every == 0)

    def log(self, kind: str, values: dict[str, Any], step: int | None = None) -> None:
        """One line of metrics, on the main rank."""
        if self.writer is not None:
            self.writer.write(kind, self.step if step is None else step, values)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps as JSON."""
        return {
            **self.task.state(),
            "tokens": self.tokens,
            "seconds": self.clock.total,
            "lr": self.optimizer.param_groups[0]["lr"],
            "warned": self.warned,
            "skipped": self.skipped,
            "looked_at": self.last_evaluated_step,  # under the name that older checkpoints have
            "validation": self.last_validation,
            "config": to_dict(self.config),
            **provenance(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint's JSON."""
        self.step = state.get("step", 0)
        self.tokens = state.get("tokens", 0)
        self.clock.total = state.get("seconds", 0.0)
        self.warned = state.get("warned", False)
        self.skipped = state.get("skipped", 0)
        self.last_evaluated_step = state.get("looked_at", self.step)
        self.last_validation = state.get("validation", {})

    def save(self) -> Path:
        """Writes a checkpoint of all ranks."""
        return save_checkpoint(
            self.config.out,
            step=self.step,
            model=self.model,
            optimizer=self.optimizer,
            state=self.state(),
            keep=self.config.checkpoint.keep,
            world=self.world,
            tensors=self.task.tensors(),
        )

    def close(self) -> None:
        for thing in (self.display, self.writer, self.lock):
            if thing is not None:
                thing.close()
