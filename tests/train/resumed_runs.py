"""A run that is resumed in the middle, and what it left, to be compared with one that never stopped."""

import shutil
from dataclasses import replace

from deeploop.runs.folder import last_checkpoint, list_checkpoints
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics


def losses(folder):
    return [(r["step"], r["loss"]) for r in read_metrics(folder, "train")]


def tensors(folder):
    return {path.name: path.read_bytes() for path in last_checkpoint(folder).glob("*.safetensors")}


def resumed_in_the_middle(config, task=None):
    """Compare a run that is resumed at its first checkpoint with one that was never stopped."""
    train(config, task=task)
    copy = config.out.with_name("resumed")
    shutil.copytree(config.out, copy)
    shutil.rmtree(list_checkpoints(copy)[-1])
    train(replace(config, out=copy, resume=True), task=task)
    return copy
