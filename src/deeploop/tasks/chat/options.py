"""Options of `deeploop chat`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from deeploop.config.checks import at_least
from deeploop.eval.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class ChatArgs(Sampling):
    """Chat with the model of a chat run: one question per line, answers as they are generated.

    /reset starts a new conversation, /quit or the end of the input ends it.
    """

    run: Positional[Path]
    """Run folder, as `deeploop train chat` writes it."""
    system: str = ""
    """A system message before all turns."""
    max_tokens: int = 400
    """Largest number of tokens in an answer."""
    rounds: int | None = None
    """Rounds R at test time; unset: as trained."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "max_tokens")
