"""The config for fine-tuning a looped GPT on conversations."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from deeploop.config.checks import at_least
from deeploop.tasks.language.config import TrainConfig


@dataclass(frozen=True)
class ChatDataConfig:
    """Conversations, as `deeploop prepare chat` writes them."""

    path: Path = Path("data/chat")
    """Folder of conversations."""
    validation_rows: int = 500
    """Largest number of rows of held-out conversations to validate on."""
    validate_every: int = 100
    """Steps between validations; there is also one at the end."""
    validation_rounds: tuple[int, ...] = ()
    """More numbers of rounds to validate at, besides model.rounds."""

    def __post_init__(self) -> None:
        at_least(1, self, "validation_rounds", "validation_rows", "validate_every", section="data.")

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def mix(self) -> tuple[str, ...]:
        """Empty: conversations are not mixed from several corpora."""
        return ()

    @property
    def mix_last(self) -> tuple[str, ...]:
        return ()

    @property
    def mask_documents(self) -> bool:
        """Conversations are always masked from each other."""
        return True


@dataclass(frozen=True)
class ChatTrainConfig(TrainConfig):
    """One fine-tuning of a looped GPT on conversations."""

    task: ClassVar[str] = "chat"
    kept_apart: ClassVar[str] = "conversations"
    data: ChatDataConfig = field(default_factory=ChatDataConfig)  # type: ignore[assignment]
