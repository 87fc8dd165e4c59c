"""Options of `deeploop sweep`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from deeploop.config.checks import at_least
from deeploop.config.short_names import SHORT
from deeploop.files import parse_json
from deeploop.paper.grids import Scale

UTILIZATION = 0.45  # measured: docs/results/speed, gpt2-small at R = 1, 3, 7, gpt2-medium at R = 1, 3


@dataclass(frozen=True)
class SlurmConfig:
    """The allocation of each cell, with --launcher slurm."""

    partition: str = ""
    """Partition; unset: the cluster's default."""
    account: str = ""
    """Account to charge; unset: yours."""
    hours: float = 24.0
    """Time limit of a job; one that reaches it saves and is queued again."""
    cpus: int = 8
    """CPU cores for each GPU."""
    at_once: int = 16
    """How many cells may run at a time."""

    def __post_init__(self) -> None:
        for name in ("hours", "cpus", "at_once"):
            if getattr(self, name) <= 0:
                raise ValueError(f"slurm.{name}={getattr(self, name)}: must be positive")


@dataclass(frozen=True, kw_only=True)
class SweepArgs:
    """Run a grid of training runs: a sweep of the paper, one of ours, or one from a file."""

    name: Positional[str]
    """A sweep's name (`deeploop sweep` lists them), or a file of your own (.toml, .json)."""
    scale: Scale = "paper"
    """The paper's size, one that a single GPU finishes, or one for a laptop. A file has its own."""
    out: Path | None = None
    """Folder of the cells; unset: runs/sweeps/NAME-SCALE, for a file NAME.toml runs/sweeps/NAME-own."""
    data: Path | None = None
    """Corpus or puzzles to train on instead of the grid's (data.path)."""
    tuned: Path | None = None
    """A finished search, a sweep with an axis `trial`: every cell takes the best trial's settings."""
    only: tuple[str, ...] = ()
    """A part of the grid, by its axes: rule=flat,prenorm rounds=16. Other parts may follow later."""
    set: tuple[str, ...] = ()
    """Fields to change in every cell, such as steps=200 device.micro_batch=16."""
    jobs: int = 1
    """Cells at a time on each device (or group of --gpus devices)."""
    gpus: int = 1
    """GPUs of each cell; more than one are joined by torchrun."""
    minutes: float | None = None
    """Start no cell after this many minutes, and finish those that run. The same command continues later."""
    keep_weights: bool = True
    """Keep the checkpoints of finished cells; otherwise only their metrics."""
    tasks: Path | None = None
    """Local files of the eight tasks for sweeps that are scored, as in deeploop eval --data."""
    launcher: Literal["local", "slurm"] = "local"
    """Processes of this machine, or jobs of a cluster."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    dry_run: bool = False
    """Print the cells and what they cost, and do nothing."""
    status: bool = False
    """Print the progress of the cells that were started, with their settings, and do nothing."""
    utilization: float = UTILIZATION
    """Share of the H200's peak that --dry-run assumes."""

    def __post_init__(self) -> None:
        at_least(1, self, "jobs", "gpus")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes={self.minutes}: must be above 0")
        if self.minutes is not None and self.launcher == "slurm":
            raise ValueError("minutes: is for --launcher local; a job's limit is --slurm.hours")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization={self.utilization}: must be above 0 and at most 1")

    def overrides(self) -> dict[str, Any]:
        """Return --set and --data as settings."""
        settings: dict[str, Any] = {}
        for word in self.set:
            path, equals, text = word.partition("=")
            if not equals:
                raise ValueError(f"set={word}: must be field=value")
            settings[SHORT.get(path, path.replace("-", "_"))] = _value(text)
        return settings if self.data is None else {**settings, "data.path": str(self.data)}


def _value(text: str) -> Any:
    """Parse a value of the command line: as JSON if possible, else the word itself."""
    try:
        return parse_json(text)
    except ValueError:
        return {"None": None, "True": True, "False": False}.get(text, text)
