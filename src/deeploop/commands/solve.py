"""`deeploop solve`: one puzzle, and the reasoner's board after each segment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from deeploop.commands.parsing import run_command


@dataclass(frozen=True, kw_only=True)
class SolveArgs:
    """Show how a reasoner (HRM, TRM) solves one puzzle: its board after each segment."""

    run: Positional[Path]
    """Run folder."""
    puzzle: Positional[str]
    """The board as a string of symbols (98.7..6.. of Sudoku), or as a JSON grid."""
    answer: str | None = None
    """The right answer, in the same form; a Sudoku is solved for it."""
    segments: int | None = None
    """Segments to run; unset: as many as in training."""
    data: Path | None = None
    """Where the run's puzzles are, if they moved."""
    out: Path | None = None
    """HTML page to write; unset: solve.html in the run folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    def __post_init__(self) -> None:
        if self.segments is not None and self.segments < 1:
            raise ValueError(f"segments={self.segments}: must be at least 1")


def run(args: SolveArgs) -> str:
    """Solve the puzzle, write the page, return what to print."""
    from deeploop.commands import solve_puzzle  # waits for torch

    return solve_puzzle.run(args)


def main(arguments: list[str]) -> int:
    return run_command(SolveArgs, run, arguments, prog="deeploop solve")
