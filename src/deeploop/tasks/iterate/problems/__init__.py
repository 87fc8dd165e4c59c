"""Iterated tasks: generated while training, with any number of steps. `make_task` has them by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeploop.tasks.iterate.problems.base import IteratedTask
    from deeploop.tasks.iterate.problems.examples import Examples

# Imported when one is made: their names are options, which are read without numpy.
TASKS = {
    "automaton": "Automaton",
    "hops": "Hops",
    "induction": "Induction",
    "addition": "Addition",
    "reachability": "Reachability",
}


def make_task(name: str, length: int, rule: int = 86) -> "IteratedTask":
    """The task of a name and a size; `rule` is the automaton's."""
    if name not in TASKS:
        raise ValueError(f"data.task={name}: unknown; choose one of {', '.join(TASKS)}")
    kind: Any = getattr(import_module(f"deeploop.tasks.iterate.problems.{name}"), TASKS[name])
    made: IteratedTask = kind(length, rule) if name == "automaton" else kind(length)
    return made


def make_examples(name: str, length: int, rule: int = 86, *, tells_steps: bool) -> "Examples":
    """The task as a model reads it."""
    from deeploop.tasks.iterate.problems.examples import Examples

    return Examples(make_task(name, length, rule), tells_steps)
