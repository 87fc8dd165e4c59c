"""When a run is over and what it came to: one answer for sweeps, lists and reports."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from deeploop.files import open_regular

ERROR = re.compile(r"deeploop (?:train|eval|sweep): error: (.*)")
MEMORY_IS_FULL = "the GPU's memory is full"  # how the errors of `train` and `eval` begin
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


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no memory left, by torch's allocator, the driver or cuBLAS."""
    of_torch = type(error).__name__ == "OutOfMemoryError"  # by name: readers of runs do without torch
    return of_torch or any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))


def log_error(log: Path) -> str | None:
    """What the last process of a log died of, if it did: the last line of its own that says so.

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
