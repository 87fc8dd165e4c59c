"""Options of `deeploop eval` for iterated tasks."""

from dataclasses import dataclass

from deeploop.config.checks import at_least


@dataclass(frozen=True, kw_only=True)
class IteratedOptions:
    """Options for an iterated task."""

    steps: tuple[int, ...] = ()
    """Numbers of steps, also beyond the trained ones; unset: those of the run's validation."""
    rule: int | None = None
    """A rule of the automaton other than the trained one."""
    length: int | None = None
    """A size other than the trained one, such as longer rows."""

    def __post_init__(self) -> None:
        at_least(1, self, "steps")
