"""Options of `deeploop validate` and `generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from deeploop.config.checks import at_least
from deeploop.eval.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class ValidateArgs:
    """Validation loss and bits per byte of a run, at one or more numbers of rounds."""

    run: Positional[Path]
    """Run folder, as `deeploop train` writes it; `shipped` is the small model that comes with deeploop."""
    data: Path | None = None
    """Corpus whose validation split is used; unset: the run's own, all corpora of a mixture by weight."""
    sequences: int | None = None
    """Sequences, spread evenly over the split; unset: as in training, at most 64 with --cache-rounds."""
    rounds: tuple[int, ...] = ()
    """Rounds R to evaluate at; several make a figure. Unset: as trained, with --adaptive also fewer."""
    recompute_alpha: bool = False
    """Use the alpha of each depth instead of the trained one."""
    adaptive: tuple[Literal["change", "kl", "gate"], ...] = ()
    """Also let tokens exit early: by the change of their state, the KL between readouts, or the exit gate."""
    thresholds: tuple[float, ...] = ()
    """Thresholds of the criterion, one result each; unset: a few that span the range."""
    cache_rounds: tuple[str, ...] = ()
    """Also decode token by token with the keys and values of that many rounds, such as 1 2 all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        at_least(1, self, "sequences")


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(Sampling):
    """Continue a prompt with a run's model, printing text as it is generated."""

    run: Positional[Path] = Path("shipped")
    """Run folder, as `deeploop train` writes it; `shipped` is the small model that comes with deeploop."""
    prompt: str = ""
    """Text to continue; without one, start a new document."""
    max_tokens: int = 200
    """Largest number of tokens to add; the end of a document or a full context may come first."""
    rounds: int | None = None
    """Rounds R at test time; unset: as trained."""
    adaptive: Literal["off", "change", "kl", "gate"] = "off"
    """Let a token exit early: by the change of its state, the KL between readouts, or the exit gate."""
    threshold: float | None = None
    """Threshold of --adaptive: the change that counts as converged (0.1), or the gate's probability (0.5)."""
    cache_rounds: int | None = None
    """Rounds whose keys and values are kept: 1 keeps the last round's; unset, or above R: all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "max_tokens")
        if self.threshold is not None and self.adaptive == "off":
            raise ValueError(f"threshold={self.threshold}: needs --adaptive change, kl or gate")
