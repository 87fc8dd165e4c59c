"""`deeploop validate`: its arguments; `validate_run.py` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from deeploop.commands.parsing import run_command


@dataclass(frozen=True, kw_only=True)
class ValidateArgs:
    """Validation loss and bits per byte of a run, at one or more numbers of rounds."""

    run: Positional[Path]
    """Run folder, as `deeploop train` writes it; `shipped` is the small model that comes with deeploop."""
    data: Path | None = None
    """Corpus whose validation split is read; unset: the run's own, all corpora of a mixture by weight."""
    sequences: int | None = None
    """Sequences, spread evenly over the split; unset: as in training, at most 64 with --cache-rounds."""
    rounds: tuple[int, ...] = ()
    """Rounds R to evaluate at; several make a picture. Unset: as trained, with --adaptive also below."""
    recompute_alpha: bool = False
    """Take alpha of each depth instead of the trained one."""
    adaptive: tuple[Literal["change", "kl", "gate"], ...] = ()
    """Also let tokens stop early: by the change of their state, the KL between readouts, or the exit gate."""
    thresholds: tuple[float, ...] = ()
    """Thresholds of the criterion, one result each; unset: a few that span the range."""
    cache_rounds: tuple[str, ...] = ()
    """Also decode token by token with the keys and values of so many rounds, such as 1 2 all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        if self.sequences is not None and self.sequences < 1:
            raise ValueError(f"sequences={self.sequences}: must be at least 1")


def run(args: ValidateArgs) -> str:
    """Evaluates, writes the results into the run folder, and returns what to print."""
    from deeploop.commands import validate_run  # now: it waits for torch, --help does not

    return validate_run.run(args)


def main(arguments: list[str]) -> int:
    return run_command(ValidateArgs, run, arguments, prog="deeploop validate")
