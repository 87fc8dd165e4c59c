"""When a run is over and what it came to: one answer for sweeps, lists and reports."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

ERROR = re.compile(r"deeploop (?:train|eval|sweep): error: (.*)")
MEMORY_IS_FULL = "the GPU's memory is full"  # how the error of `train` and `eval` begins
TAIL = 4096  # bytes of a log that its last line lies in


def ending(
    validation: Mapping[str, Any], *, steps: int | None, since: int, stops: bool
) -> Literal["finished", "collapsed"] | None:
    """How a run ended, by its last validation; None if it did not.

    A guard that `stops` a run ends it at a collapse seen at step `since` (the end of warm-up) or later.
    """
    step = validation.get("step", -1)
    if steps is not None and step >= steps:
        return "finished"
    return "collapsed" if stops and step >= since and validation.get("verdict") == "collapsed" else None


def outcome(validation: Mapping[str, Any]) -> str | None:
    """The collapse verdict of a language model, the puzzles that a reasoner solved."""
    exact = validation.get("exact")
    return validation.get("verdict") or (None if exact is None else f"{exact:.1%} exact")


def log_error(log: Path) -> str | None:
    """What the last process of a log died of, if it did: the log then ends in a line that says so."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return None
    last = next((line for line in reversed(lines) if line.strip()), "")
    match = ERROR.search(last)
    return match.group(1) if match else None
