"""Check the files, fields of state.json and tensors of a checkpoint. A checksum does not say who wrote it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deeploop.train.metrics import is_sound

FILES = frozenset(f"{name}.safetensors" for name in ("model", "optimizer", "rng", "task"))
REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

COUNTS = frozenset(("step", "tokens", "skipped", "looked_at", "segment", "drawn", "begun_with"))
TIMES = frozenset(("seconds", "lr", "schedule_lr"))
KINDS: dict[str, Any] = {
    **dict.fromkeys(("corpus", "puzzles", "deeploop", "torch", "python", "written"), str),
    **dict.fromkeys(("loader", "config", "validation"), dict),
    "git": str | None,
    "command": list,
    "warned": bool,
}


class NotFinite(ValueError):
    """A tensor holds NaN or infinity: the run that saved it had diverged."""


class ShapeMismatch(ValueError):
    """Weights of another model: a tensor is absent, or has another shape."""


def check_files(checksums: Any) -> None:
    """Raise unless these are checksums of files of a checkpoint, including its weights."""
    if not isinstance(checksums, dict) or "model.safetensors" not in checksums:
        raise ValueError("sha256: must name model.safetensors")
    for name, value in checksums.items():
        if name not in FILES:
            raise ValueError(f"sha256: {name!r:.40} is no file of a checkpoint")
        if not isinstance(value, str):
            raise ValueError(f"sha256.{name}: must be a string, not {value!r:.40}")


def check_state(state: Mapping[str, Any]) -> None:
    """Raise if a known field has the wrong type; unknown fields are ignored."""
    if "step" not in state:
        raise ValueError("step: missing")
    for name, value in state.items():
        if name in COUNTS and not (type(value) is int and 0 <= value < 2**53):
            raise ValueError(f"{name}={value!r:.40}: must be a whole number, 0 or more")
        if name in TIMES and not (type(value) in (int, float) and 0 <= value < 1e300):
            raise ValueError(f"{name}={value!r:.40}: must be a number, 0 or more")
        if name in KINDS and not isinstance(value, KINDS[name]):
            raise ValueError(f"{name}={value!r:.40}: not a value of the kind this field has")
    if not is_sound(state.get("validation", {})):
        raise ValueError(f"validation={state['validation']!r:.80}: must be numbers and words")


def check_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless the tensors have these names and shapes, and hold finite real numbers."""
    for name in sorted(wanted.keys() | tensors.keys()):
        theirs = tuple(tensors[name].shape) if name in tensors else "absent"
        ours = wanted.get(name, "absent")
        if theirs != ours:
            raise ShapeMismatch(f"{name} is {theirs} there and {ours} in this model")
        if tensors[name].dtype not in REAL:
            raise ValueError(f"{name} is of {tensors[name].dtype}: must be real numbers")
        if not tensors[name].isfinite().all():
            raise NotFinite(f"{name} holds numbers that are not finite (NaN or infinity)")
