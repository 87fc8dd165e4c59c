"""Optimizer steps: queued on the device, and read back when their values are known.

Where the device can skip an update whose loss or gradient is not finite, the whole step is queued; the loss
is read back one step behind, and the device does not wait for the host. Elsewhere the host reads the loss
first and takes the optimizer's step itself. The task's own part of the update follows the optimizer's.
"""

import math
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deeploop.runs.folder import last_checkpoint
from deeploop.train.active import ActiveRun
from deeploop.train.distributed import arithmetic, begin_micro_batch
from deeploop.train.gradients import GradientMemory
from deeploop.train.non_finite import first_non_finite
from deeploop.train.optim import clipped_step, learning_rate, supports_conditional_step
from deeploop.train.replay import GraphReplay
from deeploop.train.stop import StopRequest
from deeploop.train.task import StepData, set_rounds
from deeploop.train.transfer import OnHost, copy_to_host

MOST_SKIPPED = 20  # skipped steps in a row before the run ends


class StepResult(NamedTuple):
    """Values of a step that was read back."""

    step: int
    """Its number, from 1."""
    loss: float
    grad_norm: float
    lr: float
    rounds: int | None
    """Rounds of the model, if the task sets them."""
    stop_requested: bool
    """Some rank was asked to stop when the step was queued."""


@dataclass(frozen=True)
class _Queued:
    """A queued step, and the memory in which its values arrive."""

    step: int
    lr: float
    data: StepData
    values: OnHost
    """Mean loss, how many ranks were asked to stop, gradient norm."""
    norm: Tensor
    updated: bool
    """The optimizer's step was queued too; the device takes it if the values are finite."""

    def read(self) -> tuple[float, float, float]:
        """Wait for this step, and not for steps queued after it."""
        loss, stopping, norm = self.values.read().tolist()
        return loss, stopping, norm


class StepQueue:
    """Steps of a run in flight: at most `execution.lag` of them after `settle`."""

    def __init__(self, run: ActiveRun, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._queue: deque[_Queued] = deque()
        self._shards = run.world.is_sharded(run.config.device)
        self._replicates = run.world.size > 1 and not self._shards
        self._checked = False
        self._skips = run.task.capabilities.skippable
        self._all_finite: Tensor | None = None
        self._replay: GraphReplay | None = None
        self._memory: GradientMemory | None = None
        if run.execution.graph or self._replicates:
            self._memory = GradientMemory(run.model)
        if run.execution.graph:
            self._replay = GraphReplay(self._backward, run.model, run.display.say)

    def take(self) -> StepResult:
        """Take one step and wait for it, outside the training loop."""
        return self.advance(everything=True)[-1]

    def advance(self, *, everything: bool = False) -> list[StepResult]:
        """Queue and count the next step, and read back those that are due, as the loop does."""
        self.submit()
        self._run.count_step()
        return self.settle(everything=everything)

    def submit(self) -> None:
        """Queue step `run.step` (from 0), with its update if the device can skip it."""
        run = self._run
        lr = self._set_rate()
        data = run.task.batches(run.step)
        loss = self._gradients(data)
        norm = nn.utils.get_total_norm([p.grad for p in run.model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 keeps it sharded
        # One exchange between the ranks per step: the loss, and who was asked to stop.
        shared = run.world.sum(torch.stack([loss, torch.full_like(loss, float(self._stop.requested))]))
        values = torch.cat([shared, norm[None]])
        on_host = copy_to_host(values)
        updated = supports_conditional_step(run.optimizer)
        if updated:
            only_if = self._may_update(values)
            clipped_step(run.optimizer, norm, run.config.optim.clip, only_if=only_if)
            run.task.update(run.step, only_if)
        self._queue.append(_Queued(run.step + 1, lr, data, on_host, norm, updated))

    def settle(self, *, everything: bool = False) -> list[StepResult]:
        """Read back the steps that are due, in order: all but the last `lag`, or all of them.

        All are read back as well if one of them shows that the run was asked to stop.
        """
        results: list[StepResult] = []
        lag = 0 if everything else self._run.execution.lag
        while len(self._queue) > lag:
            results.append(self._finish(self._queue.popleft()))
            lag = 0 if results[-1].stop_requested else lag
        return results

    def _may_update(self, values: Tensor) -> Tensor:
        """Return a tensor that is true if the device should take the step with these values.

        If a bad step ends the run, the report repeats it with the weights it had, so no step queued after it
        may be taken.
        """
        finite = values.isfinite().all()
        if self._skips:
            return finite
        self._all_finite = finite if self._all_finite is None else finite & self._all_finite
        return self._all_finite

    def _set_rate(self) -> float:
        run = self._run
        lr = learning_rate(run.step, run.config.optim)
        run.set_rate(lr)
        return lr

    def _gradients(self, data: StepData) -> Tensor:
        """Accumulate the gradients of all micro-batches; return this rank's share of the mean loss."""
        run = self._run
        run.model.train()
        set_rounds(run.model, data.rounds)
        total = torch.zeros((), device=run.world.device)
        if self._memory is not None:
            self._memory.begin_step()
        elif self._queue:  # still those of a step that was not read back
            run.optimizer.zero_grad(set_to_none=True)
        with self._checked_once():
            for index, batch in enumerate(data.batches):
                begin_micro_batch(run.model, last=index == len(data.batches) - 1)
                loss, *left = (self._replay or self._backward)(batch)
                total += loss
                run.task.receive(batch, tuple(left))
        if self._memory is not None and self._replicates:
            self._memory.sum_over_ranks()
        return total

    def _checked_once(self) -> AbstractContextManager[None]:
        """Check in the first step of replicas that every parameter takes part."""
        checked, self._checked = self._checked, True
        if checked or self._memory is None or not self._replicates:
            return nullcontext()
        return self._memory.all_used(self._run.world)

    def _backward(self, batch: Any) -> tuple[Tensor, ...]:
        """Run a micro-batch forward and backward; return its loss and what the task left."""
        run = self._run
        with arithmetic(run.config.device, run.world.device):
            loss = run.task.loss(run.model, batch)
        # FSDP averages gradients over ranks; the loss is a share of the global sum.
        (loss * run.world.size if self._shards else loss).backward()
        return loss.detach(), *run.task.leave()

    def _finish(self, queued: _Queued) -> StepResult:
        """Wait for a step and do what remains of it on the host."""
        run = self._run
        loss, stopping, norm = queued.read()
        if math.isfinite(loss) and math.isfinite(norm):
            run.skipped_in_a_row = 0
            if not queued.updated:
                clipped_step(run.optimizer, queued.norm, run.config.optim.clip)
                run.task.update(queued.step - 1, None)
            self._clear_gradients()
        elif self._skips and run.skipped_in_a_row < MOST_SKIPPED:
            self._skip(queued, loss, norm)
        else:
            if self._queue:  # the next step, already queued, has its own rounds and gradients
                self._gradients(queued.data)
            raise FloatingPointError(non_finite_report(run, queued.step, queued.data, loss, norm))
        return StepResult(queued.step, loss, norm, queued.lr, queued.data.rounds, stopping > 0)

    def _clear_gradients(self) -> None:
        """Clear the gradients, unless a step is still queued, whose report would read them."""
        if not self._queue:
            self._run.optimizer.zero_grad(set_to_none=True)

    def _skip(self, queued: _Queued, loss: float, norm: float) -> None:
        """Skip an update: weights and moments stay as they are, and the batch is used up."""
        run = self._run
        self._clear_gradients()
        run.skipped += 1
        run.skipped_in_a_row += 1
        run.log("skipped", {"loss": loss, "grad_norm": norm, "so_far": run.skipped}, queued.step)
        run.display.say(
            f"step {queued.step}: loss {loss}, gradient norm {norm}: skipped ({run.skipped} so far)"
        )


def non_finite_report(run: ActiveRun, step: int, data: StepData, loss: float, norm: float) -> str:
    """Describe a bad step: its first non-finite tensor, and the checkpoint to continue from."""
    set_rounds(run.model, data.rounds)

    def forward() -> None:
        for batch in data.batches:
            with arithmetic(run.config.device, run.world.device):
                run.task.loss(run.model, batch)

    return (
        f"step {step}: loss {loss}, gradient norm {norm}; first non-finite tensor: "
        f"{first_non_finite(run.model, forward, run.world)}; "
        f"last good checkpoint: {last_checkpoint(run.config.out) or 'none was saved yet'}"
    )
