"""The paper's sweeps at three scales, read from `grids.toml`. No torch."""

from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from deeploop.files import read_toml

Scale = Literal["paper", "gpu", "laptop"]
SCALES: tuple[Scale, ...] = get_args(Scale)
LAYERED = ("settings", "axes", "base")


@cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = read_toml(Path(__file__).with_name("grids.toml"))
    return found


def grids() -> dict[str, str]:
    """Map the name of each grid to a line about it."""
    return {name: grid["about"] for name, grid in _file().items() if name != "shared"}


def paper_grid(name: str, scale: Scale) -> dict[str, Any]:
    """A grid at one scale, in the form of a grid file, with `omit` and `shares_folder_of`."""
    grid = _file()[name]
    if "same_as" in grid:
        more = {key: value for key, value in grid.items() if key not in ("about", "same_as")}
        return {**paper_grid(grid["same_as"], scale), **more, "shares_folder_of": grid["same_as"]}
    part = grid.get(scale, {})
    shared = _file()["shared"]["settings"]
    settings: dict[str, Any] = {}
    for layer in (grid, part):
        base = shared[layer["base"]] if "base" in layer else {}
        settings = merged(merged(settings, base), layer.get("settings", {}))
    axes = {**grid.get("axes", {}), **part.get("axes", {})}
    plain = {k: v for k, v in {**grid, **part}.items() if k not in (*SCALES, *LAYERED, "about")}
    return {**plain, "settings": settings, "axes": {name: _axis(axis) for name, axis in axes.items()}}


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested tables; values of the second take precedence."""
    found = dict(one)
    for key, value in other.items():
        known = found.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            value = merged(known, value)
        found[key] = value
    return found


def _axis(axis: Any) -> Any:
    """Return an axis: a list of values, or labels with their settings."""
    if isinstance(axis, str):
        return _file()["shared"]["axes"][axis]
    if isinstance(axis, dict) and "exponents" in axis:
        return {p: {"model.rule": f"deeploop:p={p:g}"} for p in axis["exponents"]}
    return axis
