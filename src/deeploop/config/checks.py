"""Checks of config fields and options. Imports no torch."""

from typing import Any


def at_least(least: int, config: Any, *names: str, section: str = "") -> None:
    """Raise ValueError for a field, or an item of a tuple, that is below `least`; None is allowed."""
    for name in names:
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not number >= least:  # also for nan
                raise ValueError(f"{section}{name}={number}: must be at least {least}")
