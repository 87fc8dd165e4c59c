"""Options of `deeploop eval` and `deeploop diagnose` for all kinds of runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tyro.conf import OmitArgPrefixes, Positional

from deeploop.config.checks import at_least
from deeploop.eval.tasks import PAPER_TASKS
from deeploop.tasks.puzzles.options import ReasonerOptions


@dataclass(frozen=True, kw_only=True)
class IteratedOptions:
    """Options for an iterated task."""

    steps: tuple[int, ...] = ()
    """Numbers of steps, also beyond the trained ones; unset: those of the run's validation."""
    rule: int | None = None
    """A rule of the automaton other than the trained one."""
    length: int | None = None
    """A size other than the trained one, such as longer rows."""

    def __post_init__(self) -> None:
        at_least(1, self, "steps")


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Score a run: a language model on the paper's eight tasks or others of lm-evaluation-harness, a reasoner
    on the test split of its puzzles (on ARC with votes over the views of each task), an iterated task at any
    number of steps and rounds."""

    run: Positional[Path | None] = None
    """Run folder, as `deeploop train` writes it; unset: write --requests, or judge --scores."""
    tasks: tuple[str, ...] = ()
    """Tasks of the harness; unset: the paper's eight."""
    shots: tuple[int, ...] = ()
    """Numbers of examples before each question; unset: 0 and 1."""
    limit: int | None = None
    """Evaluate only this many documents of each task (the first), puzzles (evenly spread) or instances."""
    data: Path | None = None
    """Folder of <task>/<split>.jsonl (unset: download), or of a reasoner's puzzles (unset: as trained)."""
    rounds: tuple[int, ...] = ()
    """Rounds R to evaluate at; several make a figure. Unset: as trained, or one round per step."""
    recompute_alpha: bool = False
    """Use the alpha of each depth instead of the trained one."""
    requests: Path | None = None
    """Without a run: write the tokenized requests to this file. With a run: score the requests in it."""
    scores: Path | None = None
    """Judge scores computed from a file of requests; the result is written next to them."""
    tokenizer: str = "gpt2"
    """Tokenizer of the requests to write, or a folder that has one; with a run, the run's is used."""
    batch_tokens: int | None = None
    """Tokens computed at once, including padding; unset: 65536 on a GPU, 4096 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json: bool = False
    """Print the result as JSON."""
    reasoner: OmitArgPrefixes[ReasonerOptions] = field(default_factory=ReasonerOptions)
    iterated: OmitArgPrefixes[IteratedOptions] = field(default_factory=IteratedOptions)

    def __post_init__(self) -> None:
        at_least(1, self, "limit", "batch_tokens")
        at_least(0, self, "shots")
        given = [name for name in ("tasks", "shots", "limit") if getattr(self, name)]
        if self.scores and (self.run or self.requests):
            raise ValueError("scores: can't be combined with a run folder or --requests; leave those out")
        if given and (self.scores or (self.run and self.requests)):
            raise ValueError(f"{given[0]}: the file determines the requests; leave --{given[0]} out")

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the harness."""
        return {
            "tasks": list(dict.fromkeys(self.tasks or PAPER_TASKS)),
            "shots": sorted(set(self.shots or (0, 1))),
            "limit": self.limit,
            "data": None if self.data is None else str(self.data),
        }


@dataclass(frozen=True, kw_only=True)
class DiagnoseArgs:
    """Measure how a run's visits align: κ_R, the exponent that it implies, and the effect of a real step.

    For HRM and TRM: κ_g of each module, κ̄_g and the bound, at the run's horizon and over the last cycle.
    """

    runs: Positional[tuple[Path, ...]] = (Path("shipped"),)
    """Run folders; those of one family that differ in rounds (HRM: C_L) are also fitted together for γ."""
    at: Literal["last", "init"] = "last"
    """The weights to examine: the last checkpoint's, or the initial ones, drawn again from the seed."""
    data: Path | None = None
    """Corpus or puzzles of the probe; unset: the run's own, or Python's library if its corpus is missing."""
    sequences: int = 0
    """Sequences or puzzles of the probe; 0: as many as make about a thousand tokens."""
    sublayers: tuple[str, ...] = ()
    """Sublayers to compare, such as blocks.0.mlp; unset: both of the first and last block of a module."""
    iterations: int = 20
    """Largest number of iterations for an operator norm."""
    tolerance: float = 0.01
    """Relative change of a norm at which the iterations stop."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json: bool = False
    """Print the records as JSON."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs: name at least one run folder")
        at_least(0, self, "sequences", "tolerance")
        at_least(1, self, "iterations")
