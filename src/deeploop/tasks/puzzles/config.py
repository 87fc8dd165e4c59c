"""The configs for training reasoners on puzzles."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from deeploop.config.checks import at_least
from deeploop.config.loop import HaltingConfig
from deeploop.config.optim import ReasonerOptimConfig
from deeploop.config.run import RunConfig
from deeploop.models.reasoner_config import HRMConfig, ReasonerConfig, TRMConfig


@dataclass(frozen=True)
class PuzzleDataConfig:
    """The puzzles, as `deeploop prepare arc | sudoku | maze | pairs` writes them."""

    path: Path = Path("data/arc1")
    """Folder of puzzles."""
    test_examples: int = 1_000
    """Held-out examples solved in a validation, spread evenly over the test split."""
    validate_every: int = 1_000
    """Steps between validations; there is also one at the end."""

    def __post_init__(self) -> None:
        at_least(1, self, "test_examples", "validate_every", section="data.")


@dataclass(frozen=True)
class ReasonerTrainConfig(RunConfig):
    """One training run of a reasoner."""

    kind: ClassVar[str] = "a reasoner"
    model: ReasonerConfig = field(default_factory=ReasonerConfig)
    data: PuzzleDataConfig = field(default_factory=PuzzleDataConfig)
    optim: ReasonerOptimConfig = field(default_factory=ReasonerOptimConfig)
    halting: HaltingConfig = field(default_factory=HaltingConfig)

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.data.path,)

    def planned(self, examples: int) -> str:
        return (
            f"{self.optim.steps * self.optim.batch:,} segments planned, at most {self.halting.segments} "
            f"per puzzle; {examples:,} training examples"
        )


@dataclass(frozen=True)
class HRMTrainConfig(ReasonerTrainConfig):
    """One training run of an HRM."""

    task: ClassVar[str] = "hrm"
    model: HRMConfig = field(default_factory=HRMConfig)


@dataclass(frozen=True)
class TRMTrainConfig(ReasonerTrainConfig):
    """One training run of a TRM."""

    task: ClassVar[str] = "trm"
    model: TRMConfig = field(default_factory=TRMConfig)
    optim: ReasonerOptimConfig = field(default_factory=partial(ReasonerOptimConfig, ema=0.999))
    halting: HaltingConfig = field(default_factory=partial(HaltingConfig, learn_continue=False))
