"""Options of `deeploop eval` for iterated tasks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class IteratedOptions:
    """Options for the run of an iterated task."""

    steps: tuple[int, ...] = ()
    """Steps to ask for, also more than were trained; unset: those of the run's validation."""
    rule: int | None = None
    """Another rule of the automaton than the trained one."""
    length: int | None = None
    """Another size than the trained one, such as longer rows."""

    def __post_init__(self) -> None:
        if self.steps and min(self.steps) < 1:
            raise ValueError(f"steps={min(self.steps)}: must be at least 1")
