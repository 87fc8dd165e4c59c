"""What a sweep costs, before it runs: tokens, and GPU-hours by the accounting model beside the paper's."""

from typing import Any

from deeploop.experiments import published
from deeploop.experiments.grids import Cell, Grid
from deeploop.experiments.page import text_table
from deeploop.models.accounting import flops_per_token
from deeploop.models.gpt import GPTConfig
from deeploop.train.progress import PEAK_FLOPS

GPU = "H200"
UTILIZATION = 0.33  # measured: docs/results/gpt2-small-r3-britannica
HEADER = ("cell", "tokens", "GFLOP a token", "GPU-hours", "paper's")


def tokens(config: Any) -> int:
    return config.optim.steps * config.optim.batch * config.model.context


def gpu_hours(config: Any, utilization: float = UTILIZATION) -> float:
    """Hours on one H200 at a share of its dense bf16 peak; training steps alone."""
    flops = tokens(config) * flops_per_token(config.model)
    return flops / (utilization * PEAK_FLOPS[GPU]) / 3600


def papers_hours(grid: Grid, cell: Cell) -> float | None:
    """What the paper says of the same cell."""
    axes = cell.axes
    if grid.scale != "paper" or not {"size", "block", "rounds"} <= axes.keys():
        return None
    return published.gpu_hours(axes["size"], axes["block"], axes["rounds"])


def table(grid: Grid, cells: list[Cell], utilization: float) -> str:
    """Every cell and the sum of all; – where there is no model of the cost, or no number in the paper."""
    rows, ours, papers, all_tokens = [], 0.0, 0.0, 0
    for cell in cells:
        config = cell.config()
        known = isinstance(config.model, GPTConfig)
        hours = gpu_hours(config, utilization) if known else None
        paper = papers_hours(grid, cell)
        ours, papers = ours + (hours or 0.0), papers + (paper or 0.0)
        all_tokens += tokens(config) if known else 0
        rows.append(
            (
                cell.name,
                f"{tokens(config):,}" if known else "–",
                f"{flops_per_token(config.model) / 1e9:.3f}" if known else "–",
                show_hours(hours),
                show_hours(paper),
            )
        )
    total = (
        f"{len(cells)} cells",
        f"{all_tokens:,}" if all_tokens else "–",
        "",
        show_hours(ours or None),
        show_hours(papers or None),
    )
    how = (
        f"GPU-hours: FLOPs a token (6 a visited parameter, causal attention by half) at {utilization:.0%} of "
        f"one {GPU}'s {PEAK_FLOPS[GPU] / 1e12:.0f} TFLOP/s; training steps alone. –: not known."
    )
    return f"{text_table(HEADER, [*rows, total])}\n\n{how}"


def show_hours(hours: float | None) -> str:
    if hours is None:
        return "–"
    return f"{hours:,.0f}" if hours >= 20 else f"{hours:.2g}"
