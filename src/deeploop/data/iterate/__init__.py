"""Iterated tasks: generated while training, with any number of steps. `make_task` has them by name."""

from collections.abc import Callable

from deeploop.data.iterate.addition import Addition
from deeploop.data.iterate.automaton import Automaton
from deeploop.data.iterate.hops import Hops
from deeploop.data.iterate.induction import Induction
from deeploop.data.iterate.reachability import Reachability
from deeploop.data.iterate.task import IteratedTask

TASKS: dict[str, Callable[[int], IteratedTask]] = {
    "automaton": Automaton,
    "hops": Hops,
    "induction": Induction,
    "addition": Addition,
    "reachability": Reachability,
}


def make_task(name: str, length: int, rule: int = 86) -> IteratedTask:
    """The task of a name and a size; `rule` is the automaton's."""
    if name not in TASKS:
        raise ValueError(f"data.task={name}: unknown; choose one of {', '.join(TASKS)}")
    return Automaton(length, rule) if name == "automaton" else TASKS[name](length)
