"""What a sweep costs, before it runs: tokens, and GPU-hours by the accounting model beside the paper's.

One for a laptop has FLOPs in their place.
"""

from pathlib import Path
from typing import Any, NamedTuple

from deeploop.files import read_json
from deeploop.models.accounting import flops_per_segment
from deeploop.models.reasoner import PuzzleShape
from deeploop.recipes.reasoners import PUZZLES
from deeploop.report import published
from deeploop.report.page import text_table
from deeploop.sweep.grid import Cell, Grid
from deeploop.train import iterate, language
from deeploop.train.config import IterateTrainConfig, TrainConfig
from deeploop.train.progress import PEAK_FLOPS

GPU = "H200"
UTILIZATION = 0.45  # measured: docs/results/speed, gpt2-small at R = 1, 3, 7, gpt2-medium at R = 1, 3
SMALL = 0.01  # GPU-hours of a whole sweep below which they tell nobody anything: it is one for a laptop
HOURS = ("GPU-hours", "paper's")
HEADER = ("cell", "tokens", "GFLOP a token", "TFLOP", *HOURS)


class Cost(NamedTuple):
    """Of a whole run; a reasoner's tokens are the cells of its boards, at every segment."""

    tokens: int
    flops_per_token: float

    @property
    def flops(self) -> float:
        return self.tokens * self.flops_per_token

    def gpu_hours(self, utilization: float = UTILIZATION) -> float:
        """Hours on one H200 at a share of its dense bf16 peak; training steps alone."""
        return self.flops / (utilization * PEAK_FLOPS[GPU]) / 3600


def cost(config: Any) -> Cost | None:
    """None for a reasoner on boards of a size that nobody knows."""
    examples = config.optim.steps * config.optim.batch
    if isinstance(config, IterateTrainConfig):
        return Cost(examples * config.examples.tokens, iterate.training_flops_per_token(config))
    if isinstance(config, TrainConfig):
        return Cost(examples * config.model.context, language.training_flops_per_token(config))
    shape = board(config.data.path)
    if shape is None:
        return None
    segment = flops_per_segment(config.model, shape, forward_again=config.halting.bootstraps_continue)
    return Cost(examples * shape.length, segment / shape.length)


def board(path: Path) -> PuzzleShape | None:
    """The shape of puzzles that were prepared, or else of those that a recipe expects under this name."""
    found = read_json(path / "puzzles.json")
    sizes = [size for name in PuzzleShape._fields if type(size := found.get(name)) is int]
    if len(sizes) == len(PuzzleShape._fields):
        return PuzzleShape(*sizes)
    known = PUZZLES.get(path.name)
    return known.shape if known else None


def papers_hours(grid: Grid, cell: Cell) -> float | None:
    """What the paper says of the same cell."""
    axes = cell.axes
    if grid.scale != "paper" or not {"size", "rule", "rounds"} <= axes.keys():
        return None
    return published.gpu_hours(axes["size"], axes["rule"], axes["rounds"])


def table(grid: Grid, cells: list[Cell], utilization: float) -> str:
    """Every cell and the sum of all; – where there is no model of the cost, or no number in the paper."""
    rows, ours, papers, all_tokens, all_flops = [], 0.0, 0.0, 0, 0.0
    for cell in cells:
        known = cost(cell.config())
        hours = known.gpu_hours(utilization) if known else None
        paper = papers_hours(grid, cell)
        ours, papers = ours + (hours or 0.0), papers + (paper or 0.0)
        all_tokens += known.tokens if known else 0
        all_flops += known.flops if known else 0.0
        rows.append(
            (
                cell.name,
                f"{known.tokens:,}" if known else "–",
                f"{known.flops_per_token / 1e9:.3f}" if known else "–",
                short(known.flops / 1e12 if known else None),
                short(hours),
                short(paper),
            )
        )
    total = (
        f"{len(cells)} cells",
        f"{all_tokens:,}" if all_tokens else "–",
        "",
        short(all_flops / 1e12 or None),
        short(ours or None),
        short(papers or None),
    )
    small = 0 < ours < SMALL and not papers
    shown = [i for i, name in enumerate(HEADER) if (name not in HOURS if small else name != "TFLOP")]
    lines = [[line[i] for i in shown] for line in (HEADER, *rows, total)]
    return f"{text_table(lines[0], lines[1:])}\n\n{_note(small, utilization)} –: not known."


def _note(small: bool, utilization: float) -> str:
    counted = "6 a visited parameter, causal attention by half"
    if small:
        return (
            f"TFLOP: of the training steps alone ({counted}); in all under {SMALL} hours of one {GPU}. "
            "How long that is here, the sweep says while it runs."
        )
    return (
        f"GPU-hours: FLOPs per token ({counted}) at {utilization:.0%} of one {GPU}'s "
        f"{PEAK_FLOPS[GPU] / 1e12:.0f} TFLOP/s; training steps alone."
    )


def short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 20 else f"{value:.2g}"
