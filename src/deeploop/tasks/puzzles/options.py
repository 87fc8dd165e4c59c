"""What can be asked of a reasoner's run: options of `deeploop eval` and `deeploop solve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class ReasonerOptions:
    """Options for the run of a reasoner (HRM, TRM)."""

    halt: bool = False
    """Let each puzzle stop when the model says so; else it gets all segments, as published."""
    views: int | None = None
    """ARC: views of a task that vote, the task as it is among them; unset: all."""
    batch: int | None = None
    """Puzzles computed at once; unset: 512 on a GPU, 64 on a CPU."""
    gallery: int | None = None
    """ARC: tasks in gallery.html, 0 for none; unset: 60."""

    def __post_init__(self) -> None:
        for name, least in (("views", 1), ("batch", 1), ("gallery", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")


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
