"""Cost of a sweep before it runs: tokens and GPU-hours, by the accounting model and as the paper states them.

Sweeps for a laptop are counted in FLOPs instead.
"""

from typing import NamedTuple

from deeploop.config.run import RunConfig
from deeploop.paper import published
from deeploop.report.tables import Table
from deeploop.sweep.arguments import UTILIZATION
from deeploop.sweep.grid import Cell, Grid
from deeploop.tasks import task_class
from deeploop.tasks.language.config import TrainConfig
from deeploop.train.device import PEAK_FLOPS

GPU = "H200"
SMALL = 0.01  # GPU-hours below which a sweep is meant for a laptop, and its FLOPs are shown instead
HOURS = ("GPU-hours", "paper's")
SETTINGS = ("steps", "batch", "peak rate", "warm-up", "unigram bias")
HEADER = ("cell", *SETTINGS, "tokens", "GFLOP a token", "TFLOP", *HOURS)


class Cost(NamedTuple):
    """Tokens of a whole run; a reasoner's are the cells of its boards, at every segment."""

    tokens: int
    flops_per_token: float

    @property
    def flops(self) -> float:
        return self.tokens * self.flops_per_token

    def gpu_hours(self, utilization: float = UTILIZATION) -> float:
        """Return hours on one H200 at a share of its dense bf16 peak, for training steps alone."""
        return self.flops / (utilization * PEAK_FLOPS[GPU]) / 3600


def cost(config: RunConfig) -> Cost | None:
    """Return the cost of a run; None if its task can't tell."""
    counted = task_class(config.task).tokens_and_flops(config)
    return counted and Cost(*counted)


def papers_hours(grid: Grid, cell: Cell) -> float | None:
    """Return the GPU-hours that the paper gives for the cell."""
    axes = cell.axes
    if (grid.name, grid.scale) == ("p-sweep", "paper"):
        return published.SWEEP_GPUS.number * published.SWEEP_MINUTES.number / 60
    if grid.scale != "paper" or not {"size", "rule", "rounds"} <= axes.keys():
        return None
    return published.gpu_hours(axes["size"], axes["rule"], axes["rounds"])


def settings(config: RunConfig) -> list[str]:
    """Return the values of SETTINGS; – for what the config does not have."""
    optim = config.optim
    bias = "–"
    if isinstance(config, TrainConfig):
        bias = "on" if config.model.unigram_bias else "off"
    return [f"{optim.steps:,}", f"{optim.batch:,}", f"{optim.peak_lr:g}", f"{optim.warmup_steps:,}", bias]


def table(grid: Grid, cells: list[Cell], utilization: float) -> str:
    """Make a table of every cell and their sum; – without a model of the cost, or a number in the paper.

    Settings that all cells share stand in a line below it.
    """
    configs = [cell.config() for cell in cells]
    costs = [cost(config) for config in configs]
    chosen = [settings(config) for config in configs]
    papers = [papers_hours(grid, cell) for cell in cells]
    rows = [
        [cell.name, *words, *_figures(own, utilization), short(paper)]
        for cell, words, own, paper in zip(cells, chosen, costs, papers, strict=True)
    ]
    known = [own for own in costs if own]
    hours = sum(own.gpu_hours(utilization) for own in known)
    tokens = f"{sum(own.tokens for own in known):,}" if known else "–"
    sums = sum(own.flops for own in known) / 1e12, hours, sum(paper or 0.0 for paper in papers)
    rows.append([f"{len(cells)} cells", *[""] * len(SETTINGS), tokens, "", *map(short, sums)])
    is_small = 0 < hours < SMALL and not any(papers)
    shared = {
        name: values[0]
        for name, values in zip(SETTINGS, zip(*chosen, strict=True), strict=True)
        if len(set(values)) == 1
    }
    shown = Table("cost", "", HEADER, rows).without([*shared, *(HOURS if is_small else ["TFLOP"])])
    every = ", ".join(f"{name} {value}" for name, value in shared.items() if value != "–")
    notes = [f"every cell: {every}."] * bool(every) + [f"{_note(is_small, utilization)} –: not known."]
    return "\n".join([shown.text(), "", *notes])


def _figures(cost: Cost | None, utilization: float) -> list[str]:
    """Format tokens, GFLOP a token, TFLOP and GPU-hours of a cell."""
    if cost is None:
        return ["–"] * 4
    flops = f"{cost.flops_per_token / 1e9:.3f}", short(cost.flops / 1e12)
    return [f"{cost.tokens:,}", *flops, short(cost.gpu_hours(utilization))]


def _note(is_small: bool, utilization: float) -> str:
    counted = "6 a visited parameter, causal attention by half"
    if is_small:
        return (
            f"TFLOP: of the training steps alone ({counted}); in all under {SMALL} hours of one {GPU}. "
            "How long that is here, the sweep says while it runs."
        )
    return (
        f"GPU-hours: FLOPs per token ({counted}) at {utilization:.0%} of one {GPU}'s "
        f"{PEAK_FLOPS[GPU] / 1e12:.0f} TFLOP/s; training steps alone."
    )


def short(value: float | None) -> str:
    """Format a number with about two digits; – for None and 0."""
    if not value:
        return "–"
    return f"{value:,.0f}" if value >= 20 else f"{value:.2g}"
