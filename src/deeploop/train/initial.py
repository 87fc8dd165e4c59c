"""Start a run from the weights of another run, or of an export."""

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from deeploop.config.run import RunConfig
from deeploop.models.exit_gate import GATE
from deeploop.models.gpt_config import GPTConfig
from deeploop.models.reasoner_config import ReasonerConfig
from deeploop.runs.folder import check_kind, is_export, load_any_config, read_stamp, require_checkpoint
from deeploop.train.checkpoint import load_weights, read_whole_state
from deeploop.train.checks import ShapeMismatch
from deeploop.train.from_export import load_export, read_export
from deeploop.train.task import Task


class Change(NamedTuple):
    """A field of the model that differs from the source."""

    name: str
    old: Any
    new: Any

    @property
    def option(self) -> str:
        """Words of the command line that set the source's value."""
        return " ".join(option_words(f"model.{self.name}", self.old))


def option_words(field: str, value: Any) -> list[str]:
    """Return a config field and its value as words of the command line."""
    part, _, name = field.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return [f"--{part}.{'' if value else 'no-'}{name}"]
    return [f"--{part}.{name}", *map(str, value if isinstance(value, tuple) else [value])]


def start_from(
    config: RunConfig, source: Path, task: Task, model: nn.Module, named: Collection[str] = ()
) -> list[str]:
    """Load the weights of another run or an export; return a line for each model field that differs.

    A field that changes what is computed must equal the source's, unless it is `named`. The rounds and the
    scales of a rule may always differ.
    """
    if not is_export(source):
        check_kind(config, source, "init_from")
    changes = changes_from(config.model, source)
    shaping = [change for change in changes if not _is_scale(change, config)]
    if refused := [change for change in shaping if f"model.{change.name}" not in named]:
        raise _other_model(source, refused)
    try:
        _load_weights(source, task, model)
    except ShapeMismatch as error:
        raise (_other_model(source, shaping) if shaping else error) from None
    return [
        f"starting from {source} with model.{name}={_shown(new)} (it has {_shown(old)})"
        for name, old, new in changes
    ]


def model_of(source: Path) -> Any:
    """Return the model config of a run or an export."""
    return read_export(source) if is_export(source) else load_any_config(source).model


def changes_from(ours: Any, source: Path) -> list[Change]:
    """Return the fields that make our model compute something different from the source."""
    theirs = model_of(source)
    if not isinstance(ours, GPTConfig | ReasonerConfig) or type(theirs) is not type(ours):
        return []
    names = (field.name for field in fields(ours))
    pairs = (Change(name, getattr(theirs, name), getattr(ours, name)) for name in names)
    return [change for change in pairs if change.old != change.new and not _is_same(change, theirs, ours)]


def _is_same(change: Change, theirs: Any, ours: Any) -> bool:
    """Return True if both values give the same loss on the same tokens."""
    match change.name:
        case "context":  # limits the length only
            return True
        case "exit_gate":  # a new gate does not change the logits
            return not change.old
        case "head_width":  # 0 is width / heads
            return bool(theirs.head_size == ours.head_size)
        case "kv_heads":
            return bool(theirs.grouped_heads == ours.grouped_heads)
    return False


def _is_scale(change: Change, config: RunConfig) -> bool:
    """Return True if only rounds or scales differ, not the block that the weights were trained in."""
    if not isinstance(config.model, GPTConfig):
        return False
    if change.name == "rule":
        old = GPTConfig(rule=change.old).residual
        return old.block == config.model.residual.block and old.by_block == config.model.residual.by_block
    return change.name == "rounds"


def _other_model(source: Path, changes: list[Change]) -> ValueError:
    """Return an error that names the differing fields and the options that would set them."""
    differences = ", ".join(
        f"model.{name}={_shown(old)} (this run {_shown(new)})" for name, old, new in changes
    )
    options = " ".join(change.option for change in changes)
    return ValueError(f"init_from={source}: has {differences}; add {options}")


def _shown(value: Any) -> str:
    """Format a value as on the command line."""
    return (" ".join(map(str, value)) or "()") if isinstance(value, tuple) else str(value)


def _load_weights(source: Path, task: Task, model: nn.Module) -> None:
    """Load the source's weights, unless they were trained on other data than this task can have."""
    if is_export(source):
        load_export(model, source, task.tokenizer)
        return
    checkpoint = require_checkpoint(source)
    task.check_source(read_stamp(source), source)
    read_whole_state(checkpoint)
    load_weights(model, checkpoint, may_lack=GATE)


def origin(init_from: Path | None) -> dict[str, Any]:
    """Return what a retrofit records of its source; runs that start from it record it too."""
    stamp = {} if init_from is None or is_export(init_from) else read_stamp(init_from)
    return {"retrofit": stamp["retrofit"]} if "retrofit" in stamp else {}
