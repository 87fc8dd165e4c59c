"""The only training loop.

A batch's way: loader → R rounds → loss → backward → clip → step → one JSON line. The task says what is
built, what the loss is and how it is evaluated; everything else is here and the same for every task.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from deeploop.files import lock_folder
from deeploop.nn import fused
from deeploop.train.checkpoint import (
    last_checkpoint,
    last_good_checkpoint,
    load_checkpoint,
    load_tensors,
    load_weights,
    read_state,
    save_checkpoint,
)
from deeploop.train.config import AnyTrainConfig, TrainConfig, to_dict
from deeploop.train.distributed import World, arithmetic, gradient_sync, open_world, unwrap, wrap
from deeploop.train.language import LanguageTask
from deeploop.train.metrics import MetricsWriter, rewind_metrics
from deeploop.train.non_finite import first_non_finite
from deeploop.train.optim import conditional_step, learning_rate, set_learning_rate, supports_conditional_step
from deeploop.train.progress import Clock, Display, StopRequest, peak_flops
from deeploop.train.puzzle import PuzzleTask
from deeploop.train.replay import GraphReplay
from deeploop.train.rundir import (
    changes_since,
    check_folder,
    check_kind,
    create_run,
    provenance,
    require_checkpoint,
    write_config,
)
from deeploop.train.sharding import reshard_after_eval
from deeploop.train.task import Task

MOST_SKIPPED = 20  # steps in a row: what is broken by then does not mend itself


@dataclass
class Run:
    """Everything that changes while a run goes on."""

    config: AnyTrainConfig
    world: World
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    display: Display
    lock: TextIO | None = None
    writer: MetricsWriter | None = None
    step: int = 0
    tokens: int = 0
    clock: Clock = field(default_factory=Clock)
    warned: bool = False
    skipped: int = 0
    skipped_in_a_row: int = 0
    looked_at: int = 0
    """The last step after which what was due of validation and diagnosis has been done."""
    last_validation: dict[str, Any] = field(default_factory=dict)
    replay: GraphReplay | None = None

    def gradients(self, batch: Any) -> Tensor:
        """The loss of a micro-batch, whose gradients are added to the parameters'."""
        with arithmetic(self.config.device, self.world.device):
            loss = self.task.loss(self.model, batch)
        # DDP and FSDP average gradients over ranks; the loss is a share of the global sum.
        (loss * self.world.size).backward()
        return loss.detach()

    def log(self, kind: str, values: dict[str, Any], step: int | None = None) -> None:
        if self.writer is not None:
            self.writer.write(kind, self.step if step is None else step, values)


@dataclass(frozen=True)
class Queued:
    """A step that the device was given, and what will be known of it."""

    step: int
    """Its number, from 1."""
    batches: list[Any]
    values: Tensor
    """Mean loss, how many ranks were asked to stop, gradient norm: on the host, once they are known."""
    norm: Tensor
    stepped: bool
    """The device takes the optimizer's step by itself, if the values are finite."""
    known: torch.cuda.Event | None = None

    def read(self) -> tuple[float, float, float]:
        """Waits for this step, and for none that was queued after it."""
        if self.known is not None:
            self.known.synchronize()
        loss, stopping, norm = self.values.tolist()
        return loss, stopping, norm


def train(config: AnyTrainConfig) -> dict[str, Any]:
    """Runs `config` to its last step; returns the last validation and how the run ended."""
    with open_world(config.device) as world, StopRequest() as stop:
        return _train(config, world, stop)


def _train(config: AnyTrainConfig, world: World, stop: StopRequest) -> dict[str, Any]:
    run = open_run(config, world)
    try:
        ended = _loop(run, stop)
    except (ValueError, OSError) as error:  # a shard that is gone, a disk that is full
        saved = last_checkpoint(config.out) or "none was saved yet"
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"step {run.step + 1}: {error}; last good checkpoint: {saved}") from error
    finally:
        for thing in (run.display, run.writer, run.lock):
            if thing is not None:
                thing.close()
    return {"step": run.step, "ended": ended, "seconds": run.clock.total, **run.last_validation}


def _loop(run: Run, stop: StopRequest) -> str:
    config = run.config
    if run.step >= config.optim.steps:
        more = f", more than the {config.optim.steps} asked for" if run.step > config.optim.steps else ""
        run.display.say(f"{config.out} already finished its {run.step} steps{more}")
    elif run.looked_at < run.step or run.step == 0:  # a run that was told to stop left this for later
        _look(run)
    ahead, lag = list[tuple[Queued, float]](), lag_of(run)
    while run.step < config.optim.steps:
        run.clock.start()
        rate = learning_rate(run.step, config.optim, run.task.held)
        set_learning_rate(run.optimizer, rate, config.optim.branch_multiplier(run.step - run.task.held))
        ahead.append((queue_step(run, stop), rate))
        run.step += 1
        run.tokens += run.task.targets_per_step
        stopping, settled = False, []
        while len(ahead) > (0 if stopping or _is_due(run) else lag):
            queued, its_rate = ahead.pop(0)
            loss, norm, asked = settle(run, queued)
            stopping = stopping or asked
            settled.append((queued.step, loss, norm, its_rate))
        run.clock.stop()
        for result in settled:
            _report_step(run, *result)

        last = run.step == config.optim.steps
        collapsed = _look(run) if last or not stopping else False
        if last or stopping or collapsed or run.step % config.checkpoint.every == 0:
            saved = _save(run)
        if stopping:
            run.display.say(f"stopped at step {run.step}; saved {saved}; continue with --resume")
            return "stopped"
        if collapsed:
            return "collapsed"
    return "finished"


def _look(run: Run) -> bool:
    """The validation and the diagnosis that are due at this step; whether the guard ends the run."""
    config, run.looked_at = run.config, run.step
    last, collapsed = run.step == config.optim.steps, False
    if last or run.step % config.data.validate_every == 0:
        collapsed = _validate(run) and run.task.stops_when_collapsed
    if (every := run.task.diagnose_every) and (last or run.step % every == 0):
        _diagnose(run)
    return collapsed


def lag_of(run: Run) -> int:
    """How many steps the host may be ahead of what it knows: one where the device needs it for nothing.

    Then the device does not wait for the host between two steps.
    """
    return int(run.replay is not None and supports_conditional_step(run.optimizer))


def _is_due(run: Run) -> bool:
    """Whether something is written, measured or saved after this step, for which all must be known."""
    config, step = run.config, run.step
    every = (config.log.every, config.data.validate_every, config.checkpoint.every, run.task.diagnose_every)
    return step == config.optim.steps or any(n and step % n == 0 for n in every)


def train_step(run: Run, stop: StopRequest) -> tuple[float, float, bool]:
    """One optimizer step over all micro-batches and ranks: mean loss, gradient norm, whether to stop."""
    return settle(run, queue_step(run, stop))


def queue_step(run: Run, stop: StopRequest) -> Queued:
    """Hands the device a step, down to the optimizer's where it can take that by itself."""
    config, world, model = run.config, run.world, run.model
    model.train()
    batches = run.task.micro_batches()
    total = torch.zeros((), device=world.device)
    if run.replay is not None:
        run.replay.begin_step()
    for index, batch in enumerate(batches):
        with gradient_sync(model, index == len(batches) - 1):
            total += (run.replay or run.gradients)(batch)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 keeps it sharded
    # One meeting of the ranks a step: the loss, and who was asked to stop.
    shared = world.sum(torch.stack([total, torch.full_like(total, float(stop.requested))]))
    values = torch.cat([shared, norm[None]])
    on_host, known = _sent_to_host(values)
    stepped = conditional_step(run.optimizer, values, norm, config.optim.clip)
    return Queued(run.step + 1, batches, on_host, norm, stepped, known)


def _sent_to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy that is under way, and the event that it has arrived."""
    if values.device.type != "cuda":
        return values, None
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    known = torch.cuda.Event()
    known.record()
    return on_host, known


def settle(run: Run, queued: Queued) -> tuple[float, float, bool]:
    """Waits for a step and does what is left of it: mean loss, gradient norm, whether to stop."""
    loss, stopping, norm = queued.read()
    if not math.isfinite(loss) or not math.isfinite(norm):
        if not run.task.skips_non_finite or run.skipped_in_a_row == MOST_SKIPPED:
            raise FloatingPointError(_non_finite_report(run, queued.step, queued.batches, loss, norm))
        _skip(run, queued, loss, norm)
        return loss, norm, stopping > 0
    run.skipped_in_a_row = 0
    if not queued.stepped:
        if run.config.optim.clip:
            nn.utils.clip_grads_with_norm_(run.model.parameters(), run.config.optim.clip, queued.norm)
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)  # a replay attaches its own anew
    run.task.after_step(queued.step - 1)
    return loss, norm, stopping > 0


def stepper(run: Run, stop: StopRequest) -> Callable[[], None]:
    """A function that takes the next step as the loop does, for those who time it."""
    ahead, lag = list[Queued](), lag_of(run)

    def step() -> None:
        ahead.append(queue_step(run, stop))
        while len(ahead) > lag:
            settle(run, ahead.pop(0))

    return step


def _skip(run: Run, queued: Queued, loss: float, norm: float) -> None:
    """Leaves weights and moments as they are; the batch is spent."""
    run.optimizer.zero_grad(set_to_none=True)
    run.skipped += 1
    run.skipped_in_a_row += 1
    run.log("skipped", {"loss": loss, "grad_norm": norm, "so_far": run.skipped}, queued.step - 1)
    run.display.say(f"step {queued.step}: loss {loss}, gradient norm {norm}: skipped ({run.skipped} so far)")


def open_run(config: AnyTrainConfig, world: World) -> Run:
    """Everything up to the first step, in an order in which a mistake shows before anything is written."""
    has_run = check_folder(config) is not None
    lock = lock_folder(config.out) if has_run and world.is_main else None  # before anything in it is touched
    task: Task = LanguageTask(config, world) if isinstance(config, TrainConfig) else PuzzleTask(config, world)
    torch.manual_seed(config.seed + world.rank)  # the weights have a generator of their own
    model = wrap(task.build(), config.device, world)
    optimizer = task.make_optimizer(model)
    checkpoint, state, damaged = None, {}, []  # type: ignore[var-annotated]
    if has_run:
        checkpoint, state, damaged = last_good_checkpoint(config.out, world)
    if checkpoint is not None:
        task.load_state(state, load_tensors(checkpoint))  # other data are named as such, before shapes differ
        load_checkpoint(checkpoint, model=model, optimizer=optimizer, world=world)
    elif config.init_from is not None:
        source = require_checkpoint(config.init_from)
        check_kind(config, config.init_from, "init_from")
        read_state(source)
        load_weights(model, source)
    display = Display(
        total=config.optim.steps, done=state.get("step", 0), shown=world.is_main, title=config.out.name
    )
    for what in damaged:
        display.say(f"{what}: put aside; going on from {checkpoint.name if checkpoint else 'the start'}")
    if state.get("step", 0) < config.optim.steps < config.optim.warmup_steps:
        display.say(
            f"ends at step {config.optim.steps}, inside its warm-up of {config.optim.warmup_steps}: "
            "the learning rate only rises, and a collapse says little yet; raise --optim.steps"
        )
    if world.device.type == "cuda":
        display.say(f"micro-batch {task.fit.micro_batch}, recompute {task.fit.recompute}")
    run = Run(config, world, task, model, optimizer, display, step=state.get("step", 0))
    if config.device.graph and task.can_be_recorded and world.size == 1 and fused.has_rounds(model):
        run.replay = GraphReplay(run.gradients, model, display.say)
    if world.is_main:
        run.lock = lock or lock_folder(config.out)
        if not has_run and last_checkpoint(config.out) is not None:
            raise ValueError(f"out={config.out}: another run has been there meanwhile; choose another --out")
        run.writer = _open_folder(config, task, state, display)
    run.tokens = state.get("tokens", 0)
    run.clock.total = state.get("seconds", 0.0)
    run.warned = state.get("warned", False)
    run.skipped = state.get("skipped", 0)
    run.looked_at = state.get("looked_at", run.step)
    run.last_validation = state.get("validation", {})
    return run


def _open_folder(
    config: AnyTrainConfig, task: Task, state: dict[str, Any], display: Display
) -> MetricsWriter:
    if not state:
        create_run(config, task.stamp())
        return MetricsWriter(config.out, config.log, to_dict(config))
    # A run that has no step left keeps the settings it was trained with.
    going_on = state["step"] < config.optim.steps
    changes = {name: [old, new] for name, old, new in changes_since(config) if going_on}
    for name, (old, new) in changes.items():
        display.say(f"resuming with {name}={new} (was {old})")
    rewind_metrics(config.out, state["step"])
    writer = MetricsWriter(config.out, config.log, to_dict(config))
    if changes:
        writer.write("resume", state["step"], {"changes": changes})
        write_config(config)
    return writer


def _report_step(run: Run, step: int, loss: float, norm: float, rate: float) -> None:
    due = step % run.config.log.every == 0 or step == run.config.optim.steps
    tokens_per_s = None
    if due:
        steps_per_s = run.clock.read()
        tokens_per_s = steps_per_s * run.task.targets_per_step
        peak = peak_flops(run.world.device)
        values = {
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "tokens": run.tokens,
            "tokens_per_s": tokens_per_s,
            "mfu": steps_per_s * run.task.flops_per_step / (peak * run.world.size) if peak else None,
            "seconds": run.clock.total,
        }
        run.log("train", values)
    run.display.step(loss, rate, tokens_per_s)


def _validate(run: Run) -> bool:
    """Evaluates, logs and prints; whether the model is collapsed although warm-up is over."""
    result = run.task.evaluate(run.model)
    reshard_after_eval(run.model)
    if not math.isfinite(result["loss"]):  # before anything is saved
        batches = run.task.micro_batches()
        raise FloatingPointError(_non_finite_report(run, run.step + 1, batches, result["loss"], math.nan))
    run.last_validation = result
    run.log("validation", result)
    run.display.say(f"step {run.step:>6}  {run.task.describe(result)}")
    warm = run.step - run.task.held >= run.config.optim.warmup_steps
    collapsed = warm and result.get("verdict") == "collapsed"
    if collapsed and not run.warned:
        run.warned = True
        advice = run.task.collapse_advice()
        run.log("collapse", {"advice": advice, **result})
        run.display.say(advice)
    return collapsed


def _diagnose(run: Run) -> None:
    """Measures the loop on the main rank alone: replicas are the same, and nothing here talks to a rank."""
    if not run.world.is_main or run.skipped_in_a_row:  # a skipped step has no effect to look at
        return
    if run.config.device.parallel == "fsdp" and run.world.size > 1:
        if run.step == 0:
            run.display.say(
                "diagnose: κ_R is not recorded under FSDP, a sharded parameter has no alias a visit; "
                f"run `deeploop diagnose {run.config.out}` on its checkpoints"
            )
        return
    record = run.task.diagnose(unwrap(run.model), run.optimizer)
    run.log("diagnose", record)
    run.display.say(
        f"step {run.step:>6}  κ_R {record['kappa']:.2f} of at most {record['rounds']} "
        f"({record['updates']} updates)  {record['seconds']:.1f} s"
    )


def _save(run: Run) -> Path:
    state = {
        **run.task.state(),
        "tokens": run.tokens,
        "seconds": run.clock.total,
        "lr": run.optimizer.param_groups[0]["lr"],
        "warned": run.warned,
        "skipped": run.skipped,
        "looked_at": run.looked_at,
        "validation": run.last_validation,
        "config": to_dict(run.config),
        **provenance(),
    }
    return save_checkpoint(
        run.config.out,
        step=run.step,
        model=run.model,
        optimizer=run.optimizer,
        state=state,
        keep=run.config.checkpoint.keep,
        world=run.world,
        tensors=run.task.tensors(),
    )


def _non_finite_report(run: Run, step: int, batches: list[Any], loss: float, norm: float) -> str:
    def forward() -> None:
        for batch in batches:
            with arithmetic(run.config.device, run.world.device):
                run.task.loss(run.model, batch)

    return (
        f"step {step}: loss {loss}, gradient norm {norm}; first non-finite tensor: "
        f"{first_non_finite(unwrap(run.model), forward, run.world)}; "
        f"last good checkpoint: {last_checkpoint(run.config.out) or 'none was saved yet'}"
    )
