"""assets/rules.json: what `deeploop recommend` answers from.

A line through each rule's best peak rates, and the rules in order of their loss in long training.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, linear_regression
from typing import NamedTuple

from deeploop.report.groups import Histories
from deeploop.report.recommend import BATCH_TOKENS, WIDTH, Line, Order
from deeploop.report.runs import find_runs
from deeploop.rules import NAMED
from research.contrasts import contrasts
from research.rates import find_studies
from research.tables import long_training

# Studies at AdamW whose runs vary in peak rate, with the unigram bias.
RATES = (
    "transfer",
    "shapes",
    "rules-search",
    "tokens-per-parameter/search",
    "long-training/search",
    "gain/search",
)
FEWEST = 4  # best rates that a line is drawn through


class Point(NamedTuple):
    """A best peak rate: between others, or the highest that trains."""

    folder: str
    blocks: int
    rounds: int
    width: int
    batch_tokens: int
    tokens: int
    highest: float
    """The highest peak rate that was run beside it."""
    peak: float

    @property
    def at_unit(self) -> float:
        """The rate at the width and the batch that lines are given at."""
        return self.peak * self.width / WIDTH * math.sqrt(BATCH_TOKENS / self.batch_tokens)


def best_rates(results: Path) -> dict[str, list[Point]]:
    """Rule → its best rates in all studies; those at the edge of a grid are left out.

    Beside a rate at which a run was lost, the best is what trains: without it the line would be too high.
    """
    found: dict[str, list[Point]] = defaultdict(list)
    for folder in filter(lambda name: (results / name).is_dir(), RATES):
        for study in find_studies(find_runs([results / folder]), Histories()):
            fields = study.runs[0].fields
            if fields.get("optim.kind", "adamw") != "adamw":
                continue
            step = fields["model.context"] * fields["optim.batch"]
            shape = fields["model.width"], step, step * fields["optim.steps"]
            for rule in study.rules.values():
                if rule.settings["model.rule"] in NAMED and rule.settings.get("model.unigram_bias"):
                    found[rule.settings["model.rule"]] += [
                        Point(
                            f"docs/results/{folder}",
                            fields["model.blocks"],
                            R,
                            *shape,
                            rule.curves[R].cells[-1].peak,
                            best.peak,
                        )
                        for R, best in rule.optima.items()
                        if best.mark != "edge"
                    ]
    return found


def line_through(points: Sequence[Point]) -> Line:
    """Least squares in the logarithms of rate and R."""
    x, y = [math.log2(one.rounds) for one in points], [math.log2(one.at_unit) for one in points]
    slope, base = linear_regression(x, y)
    squares = sum((b - base - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spans = {
        name: (min(values), max(values))
        for name in ("blocks", "rounds", "width", "batch_tokens", "tokens")
        for values in [[getattr(one, name) for one in points]]
    }
    return Line(
        base=_short(2**base),
        slope=_short(slope),
        spread=_short(math.sqrt(squares / (len(points) - 2))),
        points=len(points),
        highest=max(one.highest for one in points),
        folders=tuple(dict.fromkeys(one.folder for one in points)),
        **spans,
    )


def _short(value: float) -> float:
    """Six digits, so that the file is the same on every machine."""
    return float(f"{value:.6g}")


def long_order(results: Path) -> Order:
    """The rules in long training, the lowest loss first."""
    losses = long_training.losses_of_seeds(results / "long-training")
    means = {rule: _short(fmean(seeds.values())) for rule, seeds in losses.items()}
    return Order(
        "docs/results/long-training",
        "nats per byte; K = 4, R = 7, width 128, 151 bytes per parameter",
        rounds=7,
        tokens=long_training.TOKENS,
        blocks=4,
        width=128,
        losses=dict(sorted(means.items(), key=lambda row: row[1])),
        level=tuple(long_training.level_with_best(contrasts(losses))),
    )


def rules_json(results: Path) -> str:
    rates = {rule: line_through(own) for rule, own in best_rates(results).items() if len(own) >= FEWEST}
    record = {
        "format": 3,
        "rates": {rule: asdict(rates[rule]) for rule in sorted(rates)},
        "order": asdict(long_order(results)),
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"
