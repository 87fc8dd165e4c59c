"""Options of `deeploop eval`, `solve` and `import` for reasoners."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from deeploop.config.checks import at_least

NOISE = 0.1


@dataclass(frozen=True, kw_only=True)
class ReasonerOptions:
    """Options for a reasoner (HRM, TRM). More segments than in training, and several answers to a puzzle from
    other views or first states, give accuracy against forward passes and a plot: --segments 16 64 256
    --views 8 --starts 2 --choose vote. The symmetries of a Sudoku relabel digits, permute bands, stacks and
    lines, and transpose; those of a maze are its 8 rotations and reflections."""

    halt: bool = False
    """Let each puzzle stop when the model halts; otherwise it gets all segments, as published."""
    segments: tuple[int, ...] = ()
    """Read the answers after each of these numbers of segments, such as 16 64 256; unset: as trained."""
    views: int | None = None
    """Views of a puzzle that vote, the original included: ARC's (unset: all), or symmetries (unset: 1)."""
    starts: int = 1
    """First states to answer from; all but the first have noise with a seed of their own."""
    noise: float | None = None
    """Standard deviation of the noise; that of the states is about 1. Unset: 0.1."""
    choose: Literal["vote", "q"] = "vote"
    """Choice among a puzzle's answers (views × starts): the most frequent one, or the highest q_halt."""
    batch: int | None = None
    """Puzzles computed at once; unset: 512 on a GPU, 64 on a CPU."""
    gallery: int | None = None
    """Number of ARC tasks in gallery.html, 0 for none; unset: 60."""

    def __post_init__(self) -> None:
        at_least(1, self, "views", "starts", "batch", "segments")
        at_least(0, self, "gallery")
        if self.noise is not None and not 0 < self.noise < math.inf:
            raise ValueError(f"noise={self.noise:g}: must be above 0, and finite")
        if self.noise is not None and self.starts == 1:
            raise ValueError(f"noise={self.noise:g}: the first state never has noise; add --starts 2 or more")


@dataclass(frozen=True, kw_only=True)
class SolveArgs:
    """Show how a reasoner (HRM, TRM) solves one puzzle: its board after each segment."""

    run: Positional[Path]
    """Run folder."""
    puzzle: Positional[str]
    """The board as a string of symbols (98.7..6.. of Sudoku), or as a JSON grid."""
    answer: str | None = None
    """The right answer in the same form; a Sudoku's is computed."""
    segments: int | None = None
    """Number of segments; unset: as in training."""
    data: Path | None = None
    """Folder of the run's puzzles, if they moved."""
    out: Path | None = None
    """HTML page to write; unset: solve.html in the run folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    def __post_init__(self) -> None:
        at_least(1, self, "segments")


@dataclass(frozen=True, kw_only=True)
class ImportArgs:
    """Import a checkpoint of the public code of HRM or TRM as a run folder that `eval` can read."""

    kind: Positional[Literal["hrm", "trm"]]
    """The code that wrote it: sapientinc/HRM, or SamsungSAILMontreal/TinyRecursiveModels."""
    checkpoint: Positional[Path]
    """The checkpoint file, such as step_26041."""
    data: Path
    """Puzzles that it was trained on: `deeploop prepare sudoku | maze | arc --from-public FOLDER`."""
    out: Path = Path("runs/imported")
    """Run folder to write."""
    heads: int = 8
    """Attention heads."""
    cycles: int | None = None
    """H_cycles; unset: as published, 2 for HRM and 3 for TRM."""
    low_cycles: int | None = None
    """L_cycles; unset: as published, 2 for HRM, 6 for TRM on boards and 4 on ARC."""
    puzzle_positions: int | None = None
    """Positions of the puzzle embedding; unset: as published, 1 for HRM and 16 for TRM."""
    segments: int = 16
    """The published code's halt_max_steps."""
