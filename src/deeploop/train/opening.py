"""Everything up to the first step: folder, task, model, optimizer, execution, and what a checkpoint says."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from deeploop.files import lock_folder
from deeploop.models.exit_gate import GATE
from deeploop.models.gpt_config import GPTConfig
from deeploop.nn.residual import ALPHA
from deeploop.train.active import ActiveRun
from deeploop.train.chat import ChatTask
from deeploop.train.checkpoint import (
    last_checkpoint,
    last_good_checkpoint,
    load_checkpoint,
    load_tensors,
    load_weights,
    read_state,
    read_whole_state,
)
from deeploop.train.checks import NotFinite, ShapeMismatch
from deeploop.train.config import (
    AnyTrainConfig,
    ChatTrainConfig,
    CustomTrainConfig,
    IterateTrainConfig,
    ReasonerTrainConfig,
    TrainConfig,
    to_dict,
)
from deeploop.train.custom import CustomTask, TaskFactory
from deeploop.train.distributed import World, wrap
from deeploop.train.execution import Execution, choose_execution
from deeploop.train.exported import is_export, load_export, read_export
from deeploop.train.header import Facts, bytes_text, header, legend
from deeploop.train.iterate import IterateTask
from deeploop.train.language import LanguageTask
from deeploop.train.memory import memory_of
from deeploop.train.metrics import MetricsWriter, last_lines, rewind_metrics
from deeploop.train.progress import Display, device_name
from deeploop.train.puzzle import PuzzleTask
from deeploop.train.rundir import (
    changes_since,
    check_folder,
    check_kind,
    create_run,
    load_any_config,
    read_ending,
    read_stamp,
    record_execution,
    require_checkpoint,
    write_config,
)
from deeploop.train.task import Task

# Fields of a looped GPT that names and shapes of its weights depend on.
SHAPING = (
    *("blocks", "prelude", "coda", "injection", "exit_gate", "width", "heads", "kv_heads", "head_width"),
    *("qk_norm", "attention_bias", "mlp_bias", "hidden", "vocabulary", "block", "outer_gain", "inner_norm"),
    *("input_norm", "final_norm", "tied_head", "unigram_bias"),
)
MANY_EPOCHS = 10
# What to do about a run that ends inside its warm-up.
SHORTER_WARMUP = "; raise --optim.steps or lower --optim.warmup-steps"
MAY_COLLAPSE = (
    ", and a collapse says little yet; raise --optim.steps (with fewer --optim.warmup-steps this block "
    "collapses more easily)"
)


def open_run(
    config: AnyTrainConfig,
    world: World,
    *,
    task: TaskFactory | None = None,
    source: str | None = None,
    quiet: bool = False,
) -> ActiveRun:
    """A run ready for its next step, made in an order in which a mistake shows before anything is written.

    With the `source` of its config it is introduced by a header; `quiet`: it says nothing.
    """
    has_run = check_folder(config) is not None
    lock = lock_folder(config.out) if has_run and world.is_main else None  # before anything in it is touched
    own, model, optimizer, execution = _build(config, world, task)
    state, damaged = _load(config, world, own, model, optimizer) if has_run else ({}, [])
    if not has_run and config.init_from is not None:
        _init_from(config, config.init_from, own, model)
    display = Display(
        total=config.optim.steps,
        done=state.get("step", 0),
        shown=world.is_main and not quiet,
        title=config.out.name,
    )
    run = ActiveRun(config, world, own, model, optimizer, execution, display, lock=lock)
    run.load_state(state)
    run.ended_before = world.gather(read_ending(config.out) if has_run else None)[0]
    if run.last_evaluated_step < run.step and run.has_ended:  # after a stop left its last validation out
        run.last_evaluated_step = run.step
        last = last_lines(config.out)[1]
        run.last_validation = {key: last[key] for key in last if key not in ("kind", "step")}
    for line in (*damaged, *_introduction(run, source)):
        display.say(line)
    if world.is_main:
        run.lock = lock or lock_folder(config.out)
        if not has_run and last_checkpoint(config.out) is not None:
            raise ValueError(f"out={config.out}: another run has been there meanwhile; choose another --out")
        run.writer = _open_folder(run, state)
    return run


def preview_run(config: AnyTrainConfig, world: World, source: str) -> list[str]:
    """What a run would be introduced with; nothing is written, and no weights of a checkpoint are read."""
    task, model, optimizer, execution = _build(config, world)
    checkpoint = check_folder(config)  # last: a taken folder must not hide another mistake
    if checkpoint is None and config.init_from is not None:
        _init_from(config, config.init_from, task, model)
    display = Display(total=config.optim.steps, done=0, shown=False, title="")
    run = ActiveRun(config, world, task, model, optimizer, execution, display)
    run.load_state(read_state(checkpoint, []) if checkpoint else {})
    return _introduction(run, source)


def _build(
    config: AnyTrainConfig, world: World, factory: TaskFactory | None = None
) -> tuple[Task, nn.Module, torch.optim.Optimizer, Execution]:
    """The parts of a run, freshly drawn."""
    config.log.require_extras()
    task = make_task(config, world, factory)
    torch.manual_seed(config.seed + world.rank)  # the weights have a generator of their own
    model = task.build()
    check_recompute(task, model)
    model = wrap(model, config.device, world)
    optimizer = task.make_optimizer(model)
    execution = choose_execution(
        config.device,
        world,
        model,
        optimizer,
        recordable=task.can_be_recorded,
        queueable=task.can_be_queued,
        draws_rounds=task.draws_rounds,
        tokens=tokens_at_once(task),
    )
    execution.apply(model)
    return task, model, optimizer, execution


def tokens_at_once(task: Task) -> int:
    """Tokens of every micro-batch, where they can be known before the first step; else 0."""
    if isinstance(task, LanguageTask):
        return task.micro_batch * task.config.model.context
    if isinstance(task, IterateTask):
        return task.micro_batch * task.shown.tokens
    if isinstance(task, PuzzleTask):
        return task.micro_batch * task.positions
    # Making a batch can be slow, and FP8 alone asks for its tokens.
    if isinstance(task, CustomTask) and task.config.device.precision == "fp8":
        return task.tokens_at_once()
    return 0


def check_recompute(task: Task, model: nn.Module) -> None:
    """Raises where the model of a task of somebody's own does not recompute what the config asks for."""
    recompute = task.fit.recompute
    if recompute != "off" and recompute != getattr(model, "recompute", "off"):
        raise ValueError(
            f"device.recompute={recompute}: the {type(model).__name__} of {type(task).__name__}.build has "
            "no such `recompute`; leave it off, or set it there"
        )


def make_task(config: AnyTrainConfig, world: World, factory: TaskFactory | None = None) -> Task:
    """The task that the class of a config stands for; of a custom one what `factory` makes."""
    if isinstance(config, CustomTrainConfig) and factory is None:
        raise ValueError("task: must be given for a CustomTrainConfig: train(config, task=YourTask)")
    if factory is not None:
        if not isinstance(config, CustomTrainConfig):
            raise ValueError(f"task: is for a CustomTrainConfig, not for a {type(config).__name__}")
        return factory(config, world)
    if isinstance(config, ChatTrainConfig):
        return ChatTask(config, world)
    if isinstance(config, TrainConfig):
        return LanguageTask(config, world)
    if isinstance(config, ReasonerTrainConfig):
        return PuzzleTask(config, world)
    if isinstance(config, IterateTrainConfig):
        return IterateTask(config, world)
    raise TypeError(f"{type(config).__name__}: no task is known for it")


def _load(
    config: AnyTrainConfig, world: World, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[str]]:
    """Puts the last whole checkpoint into the parts of a run: its JSON, and what to say of damaged ones."""
    checkpoint, state, damaged = last_good_checkpoint(config.out, world)
    if checkpoint is not None:
        task.load_state(state, load_tensors(checkpoint))  # other data are named as such, before shapes differ
        try:
            load_checkpoint(checkpoint, model=model, optimizer=optimizer, world=world)
        except NotFinite as error:
            advice = "the run had diverged; move that folder away to go on from the checkpoint before it"
            raise ValueError(f"{error}; {advice}") from None
    start = checkpoint.name if checkpoint else "the start"
    return state, [f"{what}: put aside; going on from {start}" for what in damaged]


def _init_from(config: AnyTrainConfig, source: Path, task: Task, model: nn.Module) -> None:
    """Starts from the weights of another run, or of an export."""
    try:
        _load_initial(config, source, task, model)
    except ShapeMismatch as error:
        raise _other_model(config, source) or error from None


def _other_model(config: AnyTrainConfig, source: Path) -> ValueError | None:
    """What to add to the command where the model of `source` has other weights; None if no field tells."""
    ours = getattr(config, "model", None)
    if not isinstance(ours, GPTConfig):
        return None
    theirs = read_export(source) if is_export(source) else getattr(load_any_config(source), "model", None)
    told, options = [], []
    for name in SHAPING:
        old, new = getattr(theirs, name, None), getattr(ours, name)
        # A source without a gate is taken: this run's is drawn anew.
        if old != new and (name, old) != ("exit_gate", False):
            told.append(f"model.{name}={old} (this run {new})")
            word = name.replace("_", "-")
            options.append(f"--model.{word} {old}" if type(old) is not bool else _switch(word, old))
    if not told:
        return None
    return ValueError(f"init_from={source}: has {', '.join(told)}; add {' '.join(options)}")


def _switch(word: str, on: bool) -> str:
    return f"--model.{word}" if on else f"--model.no-{word}"


def _load_initial(config: AnyTrainConfig, source: Path, task: Task, model: nn.Module) -> None:
    if is_export(source):
        load_export(model, source, task.tokenizer if isinstance(task, LanguageTask) else None)
        return
    checkpoint = require_checkpoint(source)
    check_kind(config, source, "init_from")
    if isinstance(task, LanguageTask):
        task.check_tokenizer(read_stamp(source).get("tokenizer"), source)
    read_whole_state(checkpoint)
    load_weights(model, checkpoint, may_lack=GATE)


def _origin(init_from: Path | None) -> dict[str, Any]:
    """What a retrofit says of its source: the runs that start from it say so too."""
    stamp = {} if init_from is None or is_export(init_from) else read_stamp(init_from)
    return {"retrofit": stamp["retrofit"]} if "retrofit" in stamp else {}


def _introduction(run: ActiveRun, source: str | None) -> list[str]:
    """The header, for whoever asked for it, and the notes below it."""
    if source is None:
        return _notes(run)
    task = run.task
    facts = Facts(
        source,
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        examples=task.examples,
        flops_per_step=task.flops_per_step,
        step_bytes=task.step_bytes,
        device=device_name(run.world.device),
        ranks=run.world.size,
        step=run.step,
        seconds=run.clock.total,
        validation_steps=task.validation_steps if isinstance(task, LanguageTask) else 0.0,
    )
    return [*header(run.config, facts), *_notes(run), *legend(run.config)]


def _notes(run: ActiveRun) -> list[str]:
    """What a person should know before the first step."""
    config, fit = run.config, run.task.fit
    notes = [f"execution: {run.execution.describe()}"]
    if run.world.device.type == "cuda":
        notes[0] += f"; micro-batch {fit.micro_batch}, recompute {fit.recompute}"
    if run.step < config.optim.steps < config.optim.warmup_steps:
        can_collapse = getattr(config.model, "block", None) in ALPHA
        notes.append(
            f"ends at step {config.optim.steps}, inside its warm-up of {config.optim.warmup_steps}: "
            f"the learning rate only rises{MAY_COLLAPSE if can_collapse else SHORTER_WARMUP}"
        )
    if run.step < config.optim.steps:
        notes += [f"warning: {text}" for text in _warnings(run)]
    return notes


def _warnings(run: ActiveRun) -> list[str]:
    """What makes little sense about the plan, and the option that changes it."""
    config, task, found = run.config, run.task, []
    if isinstance(task, LanguageTask):
        epochs = config.optim.steps * task.targets_per_step / task.examples
        if epochs > MANY_EPOCHS:
            fewer = max(1, MANY_EPOCHS * task.examples // task.targets_per_step)
            found.append(
                f"the corpus is repeated {epochs:,.0f} times; {MANY_EPOCHS} times are --optim.steps {fewer}"
            )
        every = config.data.validate_every
        if task.validation_steps > every:
            found.append(
                f"a validation costs {task.validation_steps:,.0f} steps, and there is one every {every}; "
                "set a larger --data.validate-every or fewer --data.validation-rounds"
            )
    if isinstance(task, PuzzleTask):
        found += task.differences_from_published()
    memory, whose = memory_of(run.world.device)
    if task.step_bytes > memory:
        found.append(
            f"a step needs about {bytes_text(task.step_bytes)}, {whose} has {bytes_text(memory)}; "
            f"set a smaller --device.micro-batch (now {task.fit.micro_batch}), or --device.recompute block"
        )
    return found


def _open_folder(run: ActiveRun, state: dict[str, Any]) -> MetricsWriter:
    """The run folder, new or gone on with, and the file of its metrics."""
    config = run.config
    if not state:
        stamp = {**run.task.stamp(), "execution": run.execution.to_json(), **_origin(config.init_from)}
        create_run(config, stamp, run.task.files())
        return MetricsWriter(config.out, config.log, to_dict(config))
    # A run that has no step left keeps the settings it was trained with.
    going_on = run.step < config.optim.steps
    changes = {name: [old, new] for name, old, new in changes_since(config) if going_on}
    for name, (old, new) in changes.items():
        run.display.say(f"resuming with {name}={new} (was {old})")
    if going_on:
        record_execution(config.out, run.execution.to_json())
    rewind_metrics(config.out, run.step, run.last_evaluated_step)
    writer = MetricsWriter(config.out, config.log, to_dict(config))
    if changes:
        writer.write("resume", run.step, {"changes": changes})
        write_config(config)
    return writer
