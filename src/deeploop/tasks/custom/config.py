"""The config of a user's own task: `train(config, task=YourTask)`."""

from dataclasses import dataclass, field
from typing import ClassVar

from deeploop.config.checks import at_least
from deeploop.config.optim import OptimConfig
from deeploop.config.run import RunConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.looped import check_optim


@dataclass(frozen=True)
class CustomDataConfig:
    """The data settings that the loop needs."""

    validate_every: int = 500
    """Steps between validations; there is also one at the end."""

    def __post_init__(self) -> None:
        at_least(1, self, "validate_every", section="data.")


@dataclass(frozen=True)
class CustomTrainConfig(RunConfig):
    """One training run on your own task: `train(config, task=YourTask)`."""

    task: ClassVar[str] = "custom"
    kind: ClassVar[str] = "a task of somebody's own"
    model: GPTConfig = field(default_factory=GPTConfig)
    data: CustomDataConfig = field(default_factory=CustomDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self.model, self.optim, self.device)
