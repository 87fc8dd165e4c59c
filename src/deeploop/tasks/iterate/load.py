"""Load the model of an iterated task's run."""

from pathlib import Path

from deeploop.models.gpt import LoopedGPT
from deeploop.runs.folder import load_any_config
from deeploop.tasks.iterate.config import IterateTrainConfig
from deeploop.train.rundir import load_gpt


def load_iterate(run: str | Path, *, checkpoint: Path | None = None) -> tuple[LoopedGPT, IterateTrainConfig]:
    """Load the model, on the CPU, and the config of an iterated task's run; `checkpoint` as in `load`."""
    config = load_any_config(Path(run))
    if not isinstance(config, IterateTrainConfig):
        raise ValueError(f"{run}: a run of another kind; this is for iterated tasks")
    return load_gpt(Path(run), config.model, "cpu", checkpoint), config
