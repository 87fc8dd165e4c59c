"""The weights of another run, or of an export, to start from."""

from pathlib import Path
from typing import Any

from torch import nn

from deeploop.config.run import RunConfig
from deeploop.models.exit_gate import GATE
from deeploop.models.gpt_config import GPTConfig
from deeploop.runs.folder import check_kind, is_export, load_any_config, read_stamp, require_checkpoint
from deeploop.train.checkpoint import load_weights, read_whole_state
from deeploop.train.checks import ShapeMismatch
from deeploop.train.exported import load_export, read_export
from deeploop.train.task import Task

# Fields of a looped GPT that names and shapes of its weights depend on.
SHAPING = (
    *("blocks", "prelude", "coda", "injection", "exit_gate", "width", "heads", "kv_heads", "head_width"),
    *("qk_norm", "attention_bias", "mlp_bias", "hidden", "vocabulary", "rule"),
    *("input_norm", "final_norm", "tied_head", "unigram_bias"),
)


def start_from(config: RunConfig, source: Path, task: Task, model: nn.Module) -> None:
    """Start from the weights of another run, or of an export."""
    try:
        _load_initial(config, source, task, model)
    except ShapeMismatch as error:
        raise _other_model(config, source) or error from None


def _other_model(config: RunConfig, source: Path) -> ValueError | None:
    """What to add to the command where the model of `source` has other weights; None if no field tells."""
    ours = getattr(config, "model", None)
    if not isinstance(ours, GPTConfig):
        return None
    theirs = read_export(source) if is_export(source) else getattr(load_any_config(source), "model", None)
    told, options = [], []
    for name in SHAPING:
        old, new = getattr(theirs, name, None), getattr(ours, name)
        if name == "rule" and isinstance(theirs, GPTConfig) and theirs.residual.block == ours.residual.block:
            continue  # other scales, the same weights
        # A source without a gate is taken: this run's is drawn anew.
        if old != new and (name, old) != ("exit_gate", False):
            told.append(f"model.{name}={old} (this run {new})")
            word = name.replace("_", "-")
            options.append(f"--model.{word} {old}" if type(old) is not bool else _switch(word, old))
    if not told:
        return None
    return ValueError(f"init_from={source}: has {', '.join(told)}; add {' '.join(options)}")


def _switch(word: str, on: bool) -> str:
    return f"--model.{word}" if on else f"--model.no-{word}"


def _load_initial(config: RunConfig, source: Path, task: Task, model: nn.Module) -> None:
    if is_export(source):
        load_export(model, source, task.tokenizer)
        return
    checkpoint = require_checkpoint(source)
    check_kind(config, source, "init_from")
    task.check_source(read_stamp(source), source)
    read_whole_state(checkpoint)
    load_weights(model, checkpoint, may_lack=GATE)


def origin(init_from: Path | None) -> dict[str, Any]:
    """What a retrofit says of its source: the runs that start from it say so too."""
    stamp = {} if init_from is None or is_export(init_from) else read_stamp(init_from)
    return {"retrofit": stamp["retrofit"]} if "retrofit" in stamp else {}
