"""The only training loop.

A batch's way: loader → R rounds → loss → backward → clip → step (`steps.py`) → one JSON line. The task says
what is built, what the loss is and how it is evaluated; everything else is the same for every task.
"""

import math
import shlex
from functools import partial
from typing import Any, Literal

from deeploop.tasks.custom.task import TaskFactory
from deeploop.train.active import ActiveRun
from deeploop.train.checkpoint import last_checkpoint
from deeploop.train.config import AnyTrainConfig
from deeploop.train.distributed import World, is_sharded, open_world
from deeploop.train.metrics import as_read_back
from deeploop.train.opening import open_run
from deeploop.train.progress import StopRequest, peak_flops
from deeploop.train.steps import StepQueue, StepResult, non_finite_report
from deeploop.train.task import EvaluationStopped


def train(
    config: AnyTrainConfig,
    *,
    task: TaskFactory | None = None,
    source: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Runs `config` to its last step; returns the last validation and how the run ended.

    A `CustomTrainConfig` needs its `task`: a subclass of `CustomTask`. With the `source` of the config a
    header comes first; `quiet`: nothing is printed.
    """
    with open_world(config.device) as world, StopRequest() as stop:
        return train_in(world, config, stop, task=task, source=source, quiet=quiet)


def train_in(
    world: World,
    config: AnyTrainConfig,
    stop: StopRequest,
    *,
    task: TaskFactory | None = None,
    source: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """The same among ranks that are already there."""
    run = open_run(config, world, task=task, source=source, quiet=quiet)
    try:
        ended = run_steps(run, stop)
    except FloatingPointError:
        run.record_ending("failed")
        raise
    except (ValueError, OSError) as error:  # a shard that is gone, a disk that is full
        saved = last_checkpoint(config.out) or "none was saved yet"
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"step {run.step + 1}: {error}; last good checkpoint: {saved}") from error
    finally:
        run.close()
    return {"step": run.step, "ended": ended, "seconds": run.clock.total, **run.last_validation}


def run_steps(run: ActiveRun, stop: StopRequest) -> str:
    """Steps, and between them what is due: a line, a validation, a diagnosis, a checkpoint."""
    config = run.config
    if (ended := already_ended(run)) is not None:
        return ended
    run.record_ending(None)  # until it ends again
    run.task.on_batch = partial(before_batch, run, stop)
    # A run that was told to stop left what was due at its last step.
    if run.last_evaluated_step < run.step or run.step == 0:
        match run_due_evaluations(run):
            case "stopped":
                return save_and_stop(run)
            case "collapsed":
                return run.record_ending("collapsed")
    queue = StepQueue(run, stop)
    while run.step < config.optim.steps:
        run.clock.start()
        queue.submit()
        # Whatever is logged, measured or saved after a step must know it.
        results = queue.settle(everything=_anything_due(run))
        run.clock.stop()
        for result in results:
            report_step(run, result)

        stopping = any(result.stop_requested for result in results)
        # Who asks to stop does not want to wait for a validation: the resumed run does it first.
        ended = run_due_evaluations(run) if run.is_last_step or not stopping else "stopped"
        if ended == "stopped":
            return save_and_stop(run)
        if ended == "collapsed":
            run.record_ending("collapsed")  # before the save: who is killed in between collapses again
        if stopping or ended == "collapsed" or run.is_due(config.checkpoint.every):
            run.save()
        if ended == "collapsed":
            return "collapsed"
    return run.record_ending("finished")


def save_and_stop(run: ActiveRun) -> str:
    """Ends a run that was asked to stop; what was due at its step is left to the resumed run."""
    if run.step == 0:  # a start from the beginning is the same
        run.display.say("stopped in the first validation, before any training; the same command starts again")
        return run.record_ending("stopped")
    saved = run.save()
    command = f"deeploop train --resume {shlex.quote(str(run.config.out))}"
    run.display.say(f"stopped at step {run.step}; saved {saved}; continue with: {command}")
    return run.record_ending("stopped")


def already_ended(run: ActiveRun) -> str | None:
    """How a run ended that has no step left, or that the guard ended; None where it goes on."""
    config, monitor = run.config, run.task.monitor
    left_out = run.is_last_step and run.last_evaluated_step < run.step  # its last validation
    if run.step >= config.optim.steps and not left_out:
        more = f", more than the {config.optim.steps} asked for" if run.step > config.optim.steps else ""
        run.display.say(
            f"{config.out} already finished its {run.step} steps{more}; train on with a larger --optim.steps"
        )
        return "finished"
    guarded = monitor is not None and monitor.stops_when_collapsed
    if guarded and run.ended_before == {"how": "collapsed", "step": run.step}:
        run.display.say(
            f"{config.out} ended at step {run.step}: collapsed; start anew with another --out, "
            "or train on with --guard.no-stop"
        )
        return "collapsed"
    return None


def _anything_due(run: ActiveRun) -> bool:
    config, monitor = run.config, run.task.monitor
    every = [config.log.every, config.data.validate_every, config.checkpoint.every]
    return any(map(run.is_due, [*every, monitor.diagnose_every] if monitor else every))


def run_due_evaluations(run: ActiveRun) -> Literal["stopped", "collapsed"] | None:
    """The validation and the diagnosis that are due at this step; how they end the run, if they do."""
    monitor = run.task.monitor
    try:
        collapsed = run.is_due(run.config.data.validate_every) and validate(run)
    except EvaluationStopped:
        return "stopped"
    run.last_evaluated_step = run.step
    if monitor is not None and run.is_due(monitor.diagnose_every):
        diagnose(run)
    return "collapsed" if collapsed and monitor is not None and monitor.stops_when_collapsed else None


def before_batch(run: ActiveRun, stop: StopRequest, share: float) -> None:
    """Shows how much of a validation is done; abandons it if some rank was asked to stop."""
    run.display.validating(share)
    if run.world.any(stop.requested):
        raise EvaluationStopped


def report_step(run: ActiveRun, result: StepResult) -> None:
    """The progress bar, and a line of metrics where one is due."""
    tokens_per_s = None
    if result.step % run.config.log.every == 0 or result.step == run.config.optim.steps:
        steps_per_s = run.clock.read()
        tokens_per_s = steps_per_s * run.task.targets_per_step
        peak = peak_flops(run.world.device)
        values = {
            "loss": result.loss,
            "lr": result.lr,
            **result.drawn,
            "grad_norm": result.grad_norm,
            "tokens": run.tokens,
            "tokens_per_s": tokens_per_s,
            "mfu": steps_per_s * run.task.flops_per_step / (peak * run.world.size) if peak else None,
            "seconds": run.clock.total,
        }
        run.log("train", values)
    run.display.step(result.loss, result.lr, tokens_per_s)


def validate(run: ActiveRun) -> bool:
    """Evaluates, logs and prints; whether the model is collapsed although warm-up is over."""
    run.display.validating(0.0)
    try:
        result = run.task.evaluate(run.model)
    finally:
        if is_sharded(run.model):
            from deeploop.train.sharding import reshard_after_eval  # now, as in `wrap`

            reshard_after_eval(run.model)
        run.display.validating(1.0)
    # Before anything is saved: a checkpoint with other values could not be resumed.
    try:
        recorded = as_read_back(result)
    except ValueError as error:
        raise ValueError(f"{type(run.task).__name__}.evaluate: returned {error}") from None
    if not math.isfinite(result["loss"]):
        batches = run.task.micro_batches()
        raise FloatingPointError(non_finite_report(run, run.step + 1, batches, result["loss"], math.nan))
    run.last_validation = recorded
    run.log("validation", result)
    run.display.say(f"step {run.step:>6}  {run.task.describe(result)}")
    warm = run.step - run.task.held >= run.config.optim.warmup_steps
    collapsed = warm and result.get("verdict") == "collapsed"
    if collapsed and run.task.monitor is not None and not run.warned:
        run.warned = True
        advice = run.task.monitor.collapse_advice()
        run.log("collapse", {"advice": advice, **result})
        run.display.say(advice)
    return collapsed


def diagnose(run: ActiveRun) -> None:
    """Measures the loop on the main rank alone: replicas are the same, and nothing here talks to a rank."""
    assert run.task.monitor is not None
    if not run.world.is_main or run.skipped_in_a_row:  # a skipped step has no effect to look at
        return
    if run.config.device.parallel == "fsdp" and run.world.size > 1:
        if run.step == 0:
            run.display.say(
                "diagnose: κ_R is not recorded under FSDP, a sharded parameter has no alias per visit; "
                f"run `deeploop diagnose {run.config.out}` on its checkpoints"
            )
        return
    record = run.task.monitor.diagnose(run.model, run.optimizer)
    run.log("diagnose", record)
    run.display.say(
        f"step {run.step:>6}  κ_R {record['kappa']:.2f} of at most {record['rounds']} "
        f"({record['updates']} updates)  {record['seconds']:.1f} s"
    )
