"""`deeploop diagnose`: its arguments; `diagnose_run.py` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from deeploop.commands.parsing import run_command


@dataclass(frozen=True, kw_only=True)
class DiagnoseArgs:
    """Measures how a run's visits align: κ_R, what it asks of the exponent, and what a real step does.

    Of HRM and TRM: κ_g of each module, κ̄_g and the bound, at the run's horizon and over the last cycle.
    """

    runs: Positional[tuple[Path, ...]] = (Path("shipped"),)
    """Run folders; those of one family that differ in rounds (HRM: C_L) are also fitted together, for γ."""
    at: Literal["last", "init"] = "last"
    """The weights to look at: the last checkpoint's, or those of the start, drawn anew from the seed."""
    data: Path | None = None
    """Corpus or puzzles of the probe; unset: the run's own, or Python's library if a corpus is gone."""
    sequences: int = 0
    """Sequences or puzzles of the probe; 0 takes as many as make about a thousand tokens."""
    sublayers: tuple[str, ...] = ()
    """Sublayers to compare, such as blocks.0.mlp; unset: both of the first and last block of a module."""
    iterations: int = 20
    """Iterations towards an operator norm, at most."""
    tolerance: float = 0.01
    """Relative change of a norm at which its iterations stop."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json: bool = False
    """Print the records as JSON."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs: name at least one run folder")
        for name, least in (("sequences", 0), ("iterations", 1), ("tolerance", 0)):
            if not getattr(self, name) >= least:  # nor nan
                raise ValueError(f"{name}={getattr(self, name)}: must be {least} or more")


def run(args: DiagnoseArgs) -> str:
    """Diagnoses each run, writes what was found into its folder, and returns what to print."""
    from deeploop.commands import diagnose_run  # now: it waits for torch, --help does not

    return diagnose_run.run(args)


def main(arguments: list[str]) -> int:
    return run_command(DiagnoseArgs, run, arguments, prog="deeploop diagnose")
