"""The folder, seed, device, checkpoints and log of a run; each task's config adds its own to `RunConfig`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from deeploop.config.checks import at_least
from deeploop.config.optim import BaseOptimConfig
from deeploop.extras import require

Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class DeviceConfig:
    """Where and how to compute. `auto`: the GPU with bf16 and fast blocks if there is one."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """Precision of matrix products; weights and norms stay in fp32. fp8: for the blocks, in training."""
    stream: Literal["fp32", "bf16"] = "fp32"
    """Residual stream of training steps; bf16, with the Triton kernels, rounds the output of branches."""
    compile: Switch = "auto"
    """torch.compile for each block; auto: on a GPU the Triton kernels instead, if they support the block."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: replicate the model (ddp), or shard each physical block by itself (fsdp)."""
    reshard: bool = False
    """Under fsdp: free a gathered block after every visit: less memory, 2R times the gathers."""
    micro_batch: int = 0
    """Most sequences that a rank computes at once; 0: its whole share, or on a GPU as many as fit."""
    recompute: Literal["auto", "off", "round", "block"] = "auto"
    """Recompute activations in the backward pass, by round or by block; auto: if a GPU's memory needs it."""
    graph: bool = True
    """With the kernels, but not fsdp: capture a micro-batch's passes in a CUDA graph (keeps its memory)."""
    deterministic: bool = False
    """Ask torch for deterministic kernels on the GPU (slower). CPU runs always repeat bit for bit."""

    def __post_init__(self) -> None:
        if self.micro_batch < 0:
            raise ValueError(f"device.micro_batch={self.micro_batch}: must be 0 (all at once) or more")


@dataclass(frozen=True)
class CheckpointConfig:
    """Interval and number of checkpoints."""

    every: int = 1_000
    """Steps between checkpoints; there is also one at the end, and on SIGTERM or Ctrl-C."""
    keep: int = 2
    """Number of newest checkpoints to keep on disk."""

    def __post_init__(self) -> None:
        at_least(1, self, "every", "keep", section="checkpoint.")


@dataclass(frozen=True)
class LogConfig:
    """Logging during training."""

    every: int = 10
    """Steps between lines of training metrics."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folder (needs the extra `tensorboard`)."""
    wandb: str = ""
    """Also log to this Weights & Biases project (needs the extra `wandb`)."""

    def __post_init__(self) -> None:
        at_least(1, self, "every", section="log.")

    def require_extras(self) -> None:
        """Raise ValueError for missing packages before there is a run folder."""
        if self.tensorboard:
            require("tensorboard", "tensorboard", "log.tensorboard")
        if self.wandb:
            require("wandb", "wandb", f"log.wandb={self.wandb}")


@dataclass(frozen=True)
class RunConfig:
    """Settings that all runs share; each task has a subclass."""

    task: ClassVar[str]
    """A key of `deeploop.tasks.KINDS`, also in run.json."""
    kind: ClassVar[str]
    """A description of the kind of run, for messages."""
    kept: ClassVar[tuple[str, ...]] = ("seed", "optim.kind")
    """Fields that a resumed run must keep, besides those of its model, rounds and gate."""

    out: Path = Path("runs/latest")
    """Run folder: config, metrics and checkpoints."""
    resume: bool = False
    """Continue from the last checkpoint in the run folder; start a new run if there is none."""
    init_from: Path | None = None
    """Start from the weights of another run (its last checkpoint), or of an exported folder."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    log: LogConfig = field(default_factory=LogConfig)
    # Subclasses give these the types of their task.
    model: Any = None
    data: Any = None
    optim: BaseOptimConfig = field(default_factory=BaseOptimConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))  # a str from Python is fine
        if self.init_from is not None:
            object.__setattr__(self, "init_from", Path(self.init_from))
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: must be 0 or more, and below 2^63")

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that `deeploop prepare` must have written."""
        return ()

    @property
    def stops_when_collapsed(self) -> bool:
        """True if a validation that finds the model collapsed ends the run."""
        return False

    def planned(self, examples: int) -> str:
        """A header line about the data of the run; the training set has `examples` tokens or examples."""
        return f"{self.optim.steps * self.optim.batch:,} rows planned"

    def more_of_header(self, begun_with: int) -> dict[str, str]:
        """The task's own header lines; the run was started with `begun_with` steps."""
        return {}
