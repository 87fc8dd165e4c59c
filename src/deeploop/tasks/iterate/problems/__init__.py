"""Iterated tasks by name; their instances are generated during training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeploop.tasks.iterate.problems.base import IteratedTask

# Imported on demand: the names are options, which must not need numpy.
TASKS = {
    "automaton": "Automaton",
    "hops": "Hops",
    "induction": "Induction",
    "addition": "Addition",
    "reachability": "Reachability",
}


def make_task(name: str, length: int, rule: int = 86) -> "IteratedTask":
    """Make a task of that size; `rule` is for the automaton."""
    if name not in TASKS:
        raise ValueError(f"data.task={name}: unknown; choose one of {', '.join(TASKS)}")
    kind: Any = getattr(import_module(f"deeploop.tasks.iterate.problems.{name}"), TASKS[name])
    made: IteratedTask = kind(length, rule) if name == "automaton" else kind(length)
    return made
