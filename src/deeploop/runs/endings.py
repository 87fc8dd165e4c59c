"""Where a run stands, when it is over and what it came to: one answer for sweeps, lists and reports.

<run>/.lock       held while `deeploop train` writes into the run folder
<run>.log         of a sweep's cell: what its processes printed; locked while one of them lives
<run>.exit.json   how the last of these processes ended, by its exit code: {"code", "failed", "error"}
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from deeploop.files import is_locked, open_regular, read_json

Ending = Literal["finished", "collapsed"]
State = Literal["absent", "untrained", "started", "stopped", "running", "finished", "collapsed", "failed"]
ENDED: tuple[State, ...] = ("finished", "collapsed")
DROPPED = "weights-dropped"  # a file of a run whose checkpoints were deleted on purpose
ERROR = re.compile(r"deeploop (?:train|eval|sweep): error: (.*)")
TAIL = 4096  # bytes of a log that its last line lies in


def log_file(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def exit_file(run: Path) -> Path:
    return run.with_name(f"{run.name}.exit.json")


def run_state(run: Path, over: Ending | None, *, left: bool = False) -> State:
    """Where a run stands: `over` by its last validation, with work `left` for its sweep even then."""
    if is_locked(log_file(run)) or is_locked(run / ".lock"):
        return "running"
    if over is not None and not left:
        return over
    stamp = read_json(run / "run.json")
    if has_failed(run) or _ended(stamp, "failed") is not None:
        return "failed"
    if not (run / "run.json").is_file():
        return "absent"
    # The folder that `deeploop retrofit` wrote: no step is taken in it, but in the run that starts from it.
    if "retrofit" in stamp and not (run / "metrics.jsonl").exists():
        return "untrained"
    return "started" if stopped_at(stamp) is None else "stopped"


def stopped_at(stamp: Mapping[str, Any]) -> int | None:
    """The step at which a run was stopped by a signal, as its run.json says; None of any other run."""
    return _ended(stamp, "stopped")


def _ended(stamp: Mapping[str, Any], how: str) -> int | None:
    match stamp.get("ended"):
        case {"how": own, "step": int(step)} if own == how:
            return step
    return None


def ending(validation: Mapping[str, Any], *, steps: int | None, since: int, stops: bool) -> Ending | None:
    """How a run ended, by its last validation; None if it did not.

    A guard that `stops` a run ends it at a collapse seen at step `since` (the end of warm-up) or later.
    """
    step = validation.get("step", -1)
    if steps is not None and step >= steps:
        return "finished"
    return "collapsed" if stops and step >= since and validation.get("verdict") == "collapsed" else None


def outcome(validation: Mapping[str, Any]) -> str | None:
    """The collapse verdict of a language model, the puzzles solved, or the cells right at the most steps."""
    if steps := validation.get("steps"):
        return f"{validation['cells_by_steps'][-1]:.1%} after {steps[-1]} steps"
    exact = validation.get("exact")
    return validation.get("verdict") or (None if exact is None else f"{exact:.1%} exact")


def has_failed(run: Path) -> bool:
    """Whether the last process of a sweep's cell failed."""
    if noted := read_json(exit_file(run)):
        return bool(noted.get("failed"))
    # A folder from before exit codes were kept, or one whose sweep was killed and could not keep it.
    return log_error(log_file(run)) is not None


def log_error(log: Path) -> str | None:
    """What the last process of a log says it died of, if it does, for a person to read.

    Under torchrun a summary of the ranks comes after it.
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
        if line.startswith(("$ ", "step ")):  # another attempt's command, a run that went on
            break
    return None
