"""Convert configs to JSON values and back, list their fields' types, and compare them."""

import dataclasses
import functools
import types
import typing
from pathlib import Path
from typing import Any, Literal

from deeploop.config import old_names


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))


def from_dict(kind: type, data: dict[str, Any], where: str = "config") -> Any:
    """Make a config from a JSON object. Unknown fields are an error, absent ones have their default."""
    hints = _field_hints(kind)
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be a JSON object")
    data = old_names.current(kind, data)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{where}.{unknown[0]}: unknown field (written by another version of deeploop?)")
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return from_dict(hint, value, where)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _value(options[0], value, where)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint == tuple[int, ...] and type(value) is int:  # data.max_epochs was a single number, 0 for no limit
        return (value,) if value else ()
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        kinds = typing.get_args(hint)
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        if len(kinds) == len(value):
            return tuple(_value(kind, item, where) for kind, item in zip(kinds, value, strict=True))
    if typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint):
            return value
    elif type(value) is hint or (hint is float and type(value) is int):
        return value
    raise ValueError(f"{where}={value!r}: not a value of the kind this field has")


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"p": 0.5}} → {"model.p": 0.5}."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        leaves |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return leaves


@functools.cache
def _field_hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def leaf_hints(kind: type, prefix: str = "") -> dict[str, Any]:
    """Map the path of every field of a config to its type."""
    hints: dict[str, Any] = {}
    for name, hint in _field_hints(kind).items():
        inner = isinstance(hint, type) and hasattr(hint, "__dataclass_fields__")
        hints |= leaf_hints(hint, f"{prefix}{name}.") if inner else {prefix + name: hint}
    return hints


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The field, old value and new value of every leaf in which two configs differ."""
    changes: list[tuple[str, Any, Any]] = []
    for name in sorted(set(old) | set(new)):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            changes += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            changes.append((prefix + name, a, b))
    return changes
