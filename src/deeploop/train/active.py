"""A run in progress: its parts, its state, and how that state is saved."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from torch import nn

from deeploop.config.json import to_dict
from deeploop.config.run import RunConfig
from deeploop.runs.folder import provenance, record_ending
from deeploop.train.checkpoint import save_checkpoint
from deeploop.train.distributed import World
from deeploop.train.execution import Execution
from deeploop.train.metrics import MetricsWriter
from deeploop.train.optim import learning_rate, set_learning_rate
from deeploop.train.progress import Clock, Display
from deeploop.train.task import Task

Ending = TypeVar("Ending", str, None)


@dataclass
class ActiveRun:
    """A run of this process, made by `open_run` and advanced by the training loop."""

    config: RunConfig
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
    """The collapse was already reported."""
    skipped: int = 0
    """Skipped steps, whose loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    last_evaluated_step: int = 0
    """The last step at which the due validation and diagnosis are done."""
    last_validation: dict[str, Any] = field(default_factory=dict)
    ended_before: dict[str, Any] | None = None
    """How the run had ended when it was opened: `how` and `step`."""
    lr: float | None = None
    """The schedule's rate in the last step."""

    @property
    def is_last_step(self) -> bool:
        return self.step == self.config.optim.steps

    @property
    def has_ended(self) -> bool:
        """Return True if the run had finished, or the guard had ended it, at this step when it was opened."""
        ended = self.ended_before or {}
        return ended.get("how") in ("finished", "collapsed") and ended["step"] == self.step

    def count_step(self) -> None:
        """Count a step that was queued."""
        self.step += 1
        self.tokens += self.task.targets_per_step

    def is_due(self, every: int) -> bool:
        """Return True if an action taken every `every` steps (0: never) and at the last one is due now."""
        return every > 0 and (self.is_last_step or self.step % every == 0)

    def log(self, kind: str, values: dict[str, Any], step: int | None = None) -> None:
        """Write a line of metrics, on the main rank."""
        if self.writer is not None:
            self.writer.write(kind, self.step if step is None else step, values)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint's JSON file."""
        return {
            **self.task.state(),
            "tokens": self.tokens,
            "drawn": self.task.drawn(self.step),
            "begun_with": self.task.begun_with,
            "seconds": self.clock.total,
            "lr": self.optimizer.param_groups[0]["lr"],
            "schedule_lr": self.lr,
            "warned": self.warned,
            "skipped": self.skipped,
            "looked_at": self.last_evaluated_step,  # the name in older checkpoints
            "validation": self.last_validation,
            "config": to_dict(self.config),
            **provenance(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's JSON."""
        self.step = state.get("step", 0)
        self.tokens = state.get("tokens", 0)
        self._load_counts(state)
        self.clock.total = state.get("seconds", 0.0)
        self.warned = state.get("warned", False)
        self.skipped = state.get("skipped", 0)
        self.last_evaluated_step = state.get("looked_at", self.step)
        self.last_validation = state.get("validation", {})
        if self.step:  # for callers that read the last step before the next one
            self.set_rate(state.get("schedule_lr") or learning_rate(self.step - 1, self.config.optim))

    def _load_counts(self, state: dict[str, Any]) -> None:
        """Fill in what version 0.2.0 did not save: batch and steps were those of its config throughout."""

        optim = state.get("config", {}).get("optim")

        def before(name: str) -> int:
            value = optim.get(name) if isinstance(optim, dict) else None
            return value if type(value) is int and 0 < value < 2**31 else getattr(self.config.optim, name)

        drawn = state.get("drawn", self.step * before("batch"))
        self.task.ahead = drawn - self.step * self.config.optim.batch
        self.task.begun_with = state.get("begun_with") or before("steps")

    def set_rate(self, lr: float) -> None:
        """Set the schedule's rate in every group of the optimizer."""
        self.lr = lr
        set_learning_rate(self.optimizer, lr)

    def check_folder(self) -> None:
        """Raise if the run folder was moved or removed."""
        if self.lock is None:
            return
        ours = os.fstat(self.lock.fileno())
        try:
            there = (self.config.out / ".lock").stat()
        except OSError:
            there = None
        if there is None or (there.st_ino, there.st_dev) != (ours.st_ino, ours.st_dev):
            raise OSError(f"out={self.config.out}: the run folder was moved or removed while the run went on")

    def record_ending(self, how: Ending) -> Ending:
        """Record in run.json how the run ended; None for a run in progress."""
        if self.world.is_main:
            record_ending(self.config.out, how, self.step)
        return how

    def save(self) -> Path:
        """Save a checkpoint of all ranks."""
        self.check_folder()
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
