"""The only training loop.

The path of a batch: loader → R rounds → loss → backward → clip → step (`steps.py`) → one JSON line. The task
says what is built, what the loss is and how it is evaluated; everything else is the same for every task.
"""

import math
import shlex
from collections.abc import Collection
from functools import partial
from typing import Any, Literal

from deeploop.config.run import RunConfig
from deeploop.runs.folder import last_checkpoint
from deeploop.train.active import ActiveRun
from deeploop.train.device import peak_flops
from deeploop.train.distributed import is_sharded, open_world
from deeploop.train.metrics import as_read_back
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue, StepResult, non_finite_report
from deeploop.train.stop import StopRequest
from deeploop.train.task import EvaluationStopped, TaskFactory


def train(
    config: RunConfig,
    *,
    task: TaskFactory | None = None,
    source: str | None = None,
    quiet: bool = False,
    stop: StopRequest | None = None,
    named: Collection[str] = (),
) -> dict[str, Any]:
    """Train to the last step; return the last validation and how the run ended.

    A `CustomTrainConfig` needs its `task`, a subclass of `CustomTask`; any other config accepts a subclass of
    its own task. With `source`, the words the config came from, a header is printed first; with `quiet`
    nothing is. With `init_from` the model must be the one that the weights were trained in, except for the
    fields `named`, such as `model.rotary_base`.
    """
    with open_world(config.device) as world, stop or StopRequest() as asked:
        run = open_run(config, world, task=task, source=source, quiet=quiet, named=named)
        try:
            ended = run_steps(run, asked)
        except FloatingPointError:
            run.record_ending("failed")
            raise
        except (ValueError, OSError) as error:  # a shard that is gone, a disk that is full
            saved = last_checkpoint(config.out) or "none was saved yet"
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"step {run.step + 1}: {error}; last good checkpoint: {saved}") from error
        finally:
            run.close()
        result = {"step": run.step, "ended": ended, "seconds": run.clock.total, **run.last_validation}
        del run  # its model holds the process group, which is destroyed now
        return result


def run_steps(run: ActiveRun, stop: StopRequest) -> str:
    """Take the steps; between them log, validate, diagnose and save where due."""
    config = run.config
    if (ended := already_ended(run)) is not None:
        return ended
    run.record_ending(None)  # until it ends again
    # A run that was asked to stop skipped what was due at its last step.
    if run.last_evaluated_step < run.step or run.step == 0:
        match run_due_evaluations(run, stop):
            case "stopped":
                return save_and_stop(run)
            case "collapsed":
                return run.record_ending("collapsed")
    queue = StepQueue(run, stop)
    while run.step < config.optim.steps:
        run.clock.start()
        queue.submit()
        run.count_step()
        # Read back the step if something is to be logged, measured or saved after it.
        results = queue.settle(everything=_anything_due(run))
        run.clock.stop()
        for result in results:
            report_step(run, result)

        stopping = any(result.stop_requested for result in results)
        # A stop does not wait for a due validation; the resumed run does it first.
        ended = run_due_evaluations(run, stop) if run.is_last_step or not stopping else "stopped"
        if ended == "stopped":
            return save_and_stop(run)
        if ended == "collapsed":
            run.record_ending(
                "collapsed"
            )  # before the save: if killed in between, the resumed run collapses again
        if stopping or ended == "collapsed" or run.is_due(config.checkpoint.every):
            run.save()
        if ended == "collapsed":
            return "collapsed"
    return run.record_ending("finished")


def save_and_stop(run: ActiveRun) -> str:
    """Save and end a run that was asked to stop; the resumed run does what was due at this step."""
    if run.step == 0:  # a start from the beginning is the same
        run.display.say("stopped in the first validation, before any training; the same command starts again")
        return run.record_ending("stopped")
    saved = run.save()
    command = f"deeploop train --resume {shlex.quote(str(run.config.out))}"
    run.display.say(f"stopped at step {run.step}; saved {saved}; continue with: {command}")
    return run.record_ending("stopped")


def already_ended(run: ActiveRun) -> str | None:
    """Return how the run had ended: no step is left, or the guard stopped it; None if it continues."""
    config = run.config
    left_out = run.is_last_step and run.last_evaluated_step < run.step  # its last validation
    if run.step >= config.optim.steps and not left_out:
        more = f", more than the {config.optim.steps} asked for" if run.step > config.optim.steps else ""
        run.display.say(
            f"{config.out} already finished its {run.step} steps{more}; train on with a larger --steps"
        )
        return "finished"
    if config.stops_when_collapsed and run.ended_before == {"how": "collapsed", "step": run.step}:
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


def run_due_evaluations(run: ActiveRun, stop: StopRequest) -> Literal["stopped", "collapsed"] | None:
    """Validate and diagnose if due at this step; return how that ends the run, if it does."""
    monitor = run.task.monitor
    try:
        collapsed = run.is_due(run.config.data.validate_every) and validate(run, stop)
    except EvaluationStopped:
        return "stopped"
    run.last_evaluated_step = run.step
    if monitor is not None and run.is_due(monitor.diagnose_every):
        diagnose(run)
    return "collapsed" if collapsed and run.config.stops_when_collapsed else None


def before_batch(run: ActiveRun, stop: StopRequest, share: float) -> None:
    """Show the progress of a validation; abandon it if some rank was asked to stop."""
    run.display.validating(share)
    if run.world.any(stop.requested):
        raise EvaluationStopped


def report_step(run: ActiveRun, result: StepResult) -> None:
    """Update the progress bar, and log a line of metrics if due."""
    tokens_per_s = None
    if result.step % run.config.log.every == 0 or result.step == run.config.optim.steps:
        steps_per_s = run.clock.read()
        tokens_per_s = steps_per_s * run.task.targets_per_step
        peak = peak_flops(run.world.device)
        values = {
            "loss": result.loss,
            "lr": result.lr,
            **({"rounds": result.rounds} if run.task.capabilities.draws_rounds else {}),
            "grad_norm": result.grad_norm,
            "tokens": run.tokens,
            "tokens_per_s": tokens_per_s,
            "mfu": steps_per_s * run.task.flops_per_step / (peak * run.world.size) if peak else None,
            "seconds": run.clock.total,
        }
        run.log("train", values | recorded(run, "metrics", run.task.metrics(run.model)))
    run.display.step(result.loss, result.lr, tokens_per_s)


def recorded(run: ActiveRun, method: str, values: dict[str, Any]) -> dict[str, Any]:
    """Check the result of a task's method: numbers that a checkpoint and the metrics can hold."""
    try:
        return as_read_back(values)
    except ValueError as error:
        raise ValueError(f"{type(run.task).__name__}.{method}: returned {error}") from None


def validate(run: ActiveRun, stop: StopRequest) -> bool:
    """Evaluate, log and print; return True if the model is collapsed after warm-up."""
    run.display.validating(0.0)
    try:
        result = run.task.evaluate(run.model, partial(before_batch, run, stop))
    finally:
        if is_sharded(run.model):
            from deeploop.train.sharding import reshard_after_eval  # now, as in `wrap`

            reshard_after_eval(run.model)
        run.display.validating(1.0)
    # Before anything is saved: a checkpoint with other values could not be resumed.
    kept = recorded(run, "evaluate", result)
    if not math.isfinite(result["loss"]):
        data = run.task.batches(run.step)
        raise FloatingPointError(non_finite_report(run, run.step + 1, data, result["loss"], math.nan))
    run.last_validation = kept
    run.log("validation", result)
    run.display.say(f"step {run.step:>6}  {run.task.describe(result)}")
    warm = run.step >= run.config.optim.warmup_steps
    collapsed = warm and result.get("verdict") == "collapsed"
    if collapsed and run.task.monitor is not None and not run.warned:
        run.warned = True
        advice = run.task.monitor.collapse_advice()
        run.log("collapse", {"advice": advice, **result})
        run.display.say(advice)
    return collapsed


def diagnose(run: ActiveRun) -> None:
    """Measure the loop on the main rank; replicas are identical, so no communication is needed."""
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
