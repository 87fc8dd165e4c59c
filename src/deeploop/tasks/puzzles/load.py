"""Load the reasoner of a run."""

from pathlib import Path

import torch

from deeploop.models.reasoner import Reasoner
from deeploop.runs.folder import OPTIMIZER, WEIGHTS, load_reasoner_config, puzzle_shape, require_checkpoint
from deeploop.tasks.puzzles.config import ReasonerTrainConfig
from deeploop.train.checkpoint import load_moments, load_weights, read_whole_state
from deeploop.train.rundir import check_size


def load_reasoner(
    run: str | Path, *, device: str | torch.device = "cpu", checkpoint: Path | None = None
) -> tuple[Reasoner, ReasonerTrainConfig]:
    """Load a reasoner, with averaged weights if there are any, and its config; `checkpoint` as in `load`."""
    run = Path(run)
    config = load_reasoner_config(run)
    checkpoint, shape = checkpoint or require_checkpoint(run), puzzle_shape(run)
    model_config = config.model
    blocks = sum(model_config.blocks_of.values()) * model_config.width**2
    embedded = (shape.puzzle_ids + shape.vocabulary) * model_config.width
    read_whole_state(checkpoint, [WEIGHTS, OPTIMIZER] if config.optim.ema else [WEIGHTS])
    check_size(checkpoint, blocks + embedded, shape.length * model_config.head_size)
    model = Reasoner(config.model, shape)
    load_weights(model, checkpoint)
    if config.optim.ema:
        moments = load_moments(checkpoint, model)
        averages = {name: own["average"] for name, own in moments.items() if "average" in own}
        model.load_state_dict(averages, strict=False)
    return model.to(device).eval(), config
