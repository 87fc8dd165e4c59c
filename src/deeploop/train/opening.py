"""Set up a run up to its first step: folder, task, model, optimizer, execution and checkpoint."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from deeploop.config.json import to_dict
from deeploop.config.run import RunConfig
from deeploop.files import lock_folder
from deeploop.runs.folder import (
    changes_since,
    check_folder,
    last_checkpoint,
    read_ending,
    record_execution,
    write_config,
)
from deeploop.tasks import task_class
from deeploop.train.active import ActiveRun
from deeploop.train.checkpoint import (
    last_good_checkpoint,
    load_checkpoint,
    load_tensors,
    read_state,
)
from deeploop.train.checks import NotFinite
from deeploop.train.distributed import World, wrap
from deeploop.train.execution import Execution, choose_execution
from deeploop.train.header import introduction
from deeploop.train.initial import origin, start_from
from deeploop.train.metrics import MetricsWriter, last_lines, rewind_metrics
from deeploop.train.progress import Display
from deeploop.train.rundir import create_run
from deeploop.train.task import Task, TaskFactory


def open_run(
    config: RunConfig,
    world: World,
    *,
    task: TaskFactory | None = None,
    source: str | None = None,
    quiet: bool = False,
    named: Collection[str] = (),
) -> ActiveRun:
    """Open a run for its next step. Mistakes are found before anything is written.

    `source` names where the config came from, and prints a header; `quiet` prints nothing. The fields `named`
    may differ from the model whose weights the run starts from.
    """
    has_run = check_folder(config) is not None
    # Locked before anything in the folder is read or moved.
    lock = lock_folder(config.out) if has_run and world.is_main else None
    built, model, optimizer, execution = _build(config, world, task)
    state, damaged = _load(config, world, built, model, optimizer) if has_run else ({}, [])
    changed: list[str] = []
    if not has_run and config.init_from is not None:
        changed = start_from(config, config.init_from, built, model, named)
    display = Display(
        total=config.optim.steps,
        done=state.get("step", 0),
        shown=world.is_main and not quiet,
        title=config.out.name,
    )
    run = ActiveRun(config, world, built, model, optimizer, execution, display, lock=lock)
    run.load_state(state)
    if has_run:
        _load_ending(run)
    for line in (*damaged, *changed, *introduction(run, source)):
        display.say(line)
    if world.is_main:
        run.lock = lock or lock_folder(config.out)
        if not has_run and last_checkpoint(config.out) is not None:
            raise ValueError(f"out={config.out}: another run began there meanwhile; choose another --out")
        run.writer = _open_folder(run, state)
    return run


def preview_run(config: RunConfig, world: World, source: str, named: Collection[str] = ()) -> list[str]:
    """Return the header of a run without writing anything or reading a checkpoint's weights."""
    task, model, optimizer, execution = _build(config, world)
    checkpoint = check_folder(config)  # last: a folder in use must not hide other mistakes
    changed: list[str] = []
    if checkpoint is None and config.init_from is not None:
        changed = start_from(config, config.init_from, task, model, named)
    display = Display(total=config.optim.steps, done=0, shown=False, title="")
    run = ActiveRun(config, world, task, model, optimizer, execution, display)
    run.load_state(read_state(checkpoint, []) if checkpoint else {})
    return [*changed, *introduction(run, source)]


def _build(
    config: RunConfig, world: World, factory: TaskFactory | None = None
) -> tuple[Task, nn.Module, torch.optim.Optimizer, Execution]:
    """Build task, model, optimizer and execution, with freshly drawn weights."""
    config.log.require_extras()
    task = make_task(config, world, factory)
    torch.manual_seed(config.seed + world.rank)  # weights are drawn from another generator
    model = task.build()
    check_recompute(task, model)
    model = wrap(model, config.device, world)
    optimizer = task.make_optimizer(model)
    execution = choose_execution(config.device, world, model, optimizer, task.capabilities)
    execution.apply(model)
    return task, model, optimizer, execution


def make_task(config: RunConfig, world: World, given: TaskFactory | None) -> Task:
    """Make the task that a config names, or the one `given`: a subclass of it, or a custom task."""
    kind = task_class(config.task)
    if given is None and kind.is_given:
        raise ValueError(f"task: must be given for a {type(config).__name__}: train(config, task=YourTask)")
    if not (given is None or kind.is_given or (isinstance(given, type) and issubclass(given, kind))):
        raise ValueError(
            f"task: is for a CustomTrainConfig, not for a {type(config).__name__}, "
            f"which takes a subclass of {kind.__name__}"
        )
    return (given or kind)(config, world)


def check_recompute(task: Task, model: nn.Module) -> None:
    """Raise ValueError if a custom model does not recompute what the config sets."""
    recompute = task.fit.recompute
    if recompute != "off" and recompute != getattr(model, "recompute", "off"):
        raise ValueError(
            f"device.recompute={recompute}: the {type(model).__name__} of {type(task).__name__}.build "
            "does not set this `recompute`; set it there, or leave it off"
        )


def _load(
    config: RunConfig, world: World, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[str]]:
    """Load the last intact checkpoint; return its JSON and a line for each damaged one."""
    checkpoint, state, damaged = last_good_checkpoint(config.out, world)
    if checkpoint is not None:
        # First: if the data changed, this error says so, and a mismatch of shapes would not.
        task.load_state(state, load_tensors(checkpoint))
        try:
            load_checkpoint(checkpoint, model=model, optimizer=optimizer, world=world)
        except NotFinite as error:
            advice = "the run had diverged; move that folder away to resume from the checkpoint before it"
            raise ValueError(f"{error}; {advice}") from None
    start = checkpoint.name if checkpoint else "the start"
    return state, [f"{what}: moved aside; resuming from {start}" for what in damaged]


def _load_ending(run: ActiveRun) -> None:
    """Set how the run had ended, and its last validation if that was made after the checkpoint."""
    run.ended_before = run.world.gather(read_ending(run.config.out))[0]
    if run.last_evaluated_step < run.step and run.has_ended:
        run.last_evaluated_step = run.step
        last = last_lines(run.config.out)[1]
        run.last_validation = {key: last[key] for key in last if key not in ("kind", "step")}


def _open_folder(run: ActiveRun, state: dict[str, Any]) -> MetricsWriter:
    """Create or continue the run folder and its metrics."""
    config = run.config
    if not state:
        stamp = {**run.task.stamp(), "execution": run.execution.to_json(), **origin(config.init_from)}
        create_run(config, stamp, run.task.files())
        return MetricsWriter(config.out, config.log, to_dict(config))
    # A finished run keeps the settings that it was trained with.
    has_steps_left = run.step < config.optim.steps
    changes = {name: [old, new] for name, old, new in changes_since(config) if has_steps_left}
    for name, (old, new) in changes.items():
        run.display.say(f"resuming with {name}={new} (was {old})")
    if has_steps_left:
        record_execution(config.out, run.execution.to_json())
    rewind_metrics(config.out, run.step, run.last_evaluated_step)
    writer = MetricsWriter(config.out, config.log, to_dict(config))
    if changes:
        writer.write("resume", run.step, {"changes": changes})
        write_config(config)
    return writer
