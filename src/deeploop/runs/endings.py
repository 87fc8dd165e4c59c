"""The state, the end and the outcome of a run, for sweeps, lists and reports.

<run>/.lock       held while `deeploop train` writes into the run folder
<run>.log         of a sweep's cell: the output of its processes; locked while one of them runs
<run>.exit.json   the exit of the last of these processes: {"code", "failed", "error"}
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from deeploop.files import is_locked, open_regular, read_json

Ending = Literal["finished", "collapsed"]
State = Literal["absent", "untrained", "started", "stopped", "running", "finished", "collapsed", "failed"]
ENDED: tuple[State, ...] = ("finished", "collapsed")
DROPPED = "weights-dropped"  # marks a run whose checkpoints were deleted on purpose
ERROR = re.compile(r"deeploop (?:train|eval|sweep): error: (.*)")
TAIL = 4096  # bytes at the end of a log that are searched


def log_file(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def exit_file(run: Path) -> Path:
    return run.with_name(f"{run.name}.exit.json")


def run_state(run: Path, over: Ending | None, *, left: bool = False) -> State:
    """The state of a run: `over` says how its last validation ended it, unless its sweep has work `left`."""
    if is_locked(log_file(run)) or is_locked(run / ".lock"):
        return "running"
    if over is not None and not left:
        return over
    stamp = read_json(run / "run.json")
    if has_failed(run) or _ended(stamp, "failed") is not None:
        return "failed"
    if not (run / "run.json").is_file():
        return "absent"
    # `deeploop retrofit` wrote the folder; the run that starts from it trains in another one.
    if "retrofit" in stamp and not (run / "metrics.jsonl").exists():
        return "untrained"
    return "started" if stopped_at(stamp) is None else "stopped"


def stopped_at(stamp: Mapping[str, Any]) -> int | None:
    """The step at which a signal stopped the run, from its run.json; None if none did."""
    return _ended(stamp, "stopped")


def _ended(stamp: Mapping[str, Any], how: str) -> int | None:
    match stamp.get("ended"):
        case {"how": own, "step": int(step)} if own == how:
            return step
    return None


def ending(validation: Mapping[str, Any], *, steps: int | None, since: int, stops: bool) -> Ending | None:
    """The ending of a run by its last validation; None if it has not ended.

    A guard that `stops` a run ends it when it is collapsed at step `since` (the end of warm-up) or later.
    """
    step = validation.get("step", -1)
    if steps is not None and step >= steps:
        return "finished"
    return "collapsed" if stops and step >= since and validation.get("verdict") == "collapsed" else None


def outcome(validation: Mapping[str, Any]) -> str | None:
    """The verdict of a language model, the share of solved puzzles, or of correct cells at the most steps."""
    match validation:
        case {"cells_by_steps": [*_, float(share)], "steps": [*_, int(steps)]}:
            return f"{share:.1%} after {steps} steps"
    exact = validation.get("exact")
    return validation.get("verdict") or (None if exact is None else f"{exact:.1%} exact")


def has_failed(run: Path) -> bool:
    """True if the last process of a sweep's cell failed."""
    if noted := read_json(exit_file(run)):
        return bool(noted.get("failed"))
    # The folder has no exit code: it is older than those, or its sweep was killed.
    return log_error(log_file(run)) is not None


def log_error(log: Path) -> str | None:
    """The error message of the last process in a log, if there is one.

    Under torchrun a summary of the ranks follows it.
    """
    try:
        with open_regular(log) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return None
    for line in reversed(lines):
        if match := ERROR.search(line):
            return match.group(1)
        if line.startswith(("$ ", "step ")):  # the command of another attempt, or a run that continued
            break
    return None
