"""Validate the state of a loader that a checkpoint holds."""

from collections.abc import Mapping
from typing import Any


def check_position(state: Any, identity: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and position of a loader's state. Raises ValueError for other data or another seed."""
    if not isinstance(state, dict):
        raise ValueError(f"loader state: must be an object, not {state!r:.40}")
    for field, value in identity.items():
        if state.get(field) != value:
            raise ValueError(f"loader state: {field} {state.get(field)!r:.80}, this run has {field} {value}")
    for name in ("epoch", "position"):
        if type(count := state.get(name)) is not int or not 0 <= count < 2**31:
            raise ValueError(f"loader state: {name} {count!r:.40}: must be a whole number, 0 or more")
    return state["epoch"], state["position"]
