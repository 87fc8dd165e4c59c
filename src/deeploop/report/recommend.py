"""Recommend a rule and learning rates to compare, for K blocks, R rounds, a width and a batch. No torch.

The rule is the best one in long training, named with those that cannot be told apart from it. The rates are
three, an octave apart, around a line through the best rates of all our studies (`make results`):

    rate = base · R^slope · 384 / width · √(tokens per step / 4,096)

Base and slope are the rule's own. That the rate falls as 1/width and rises as √batch is assumed; our best
rates, at widths 128 to 384 (flat: 768) and 4,096 to 32,768 tokens per step, scatter around it by half an
octave. No rate is named above the highest that was run.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deeploop
from deeploop.files import read_object
from deeploop.rules import parse

FILE = Path(deeploop.__file__).parent / "assets" / "rules.json"
WIDTH, BATCH_TOKENS = 384, 4096  # at which `base` is given
FARTHEST = 4  # times beyond the runs, either way
WARMUP = 0.2  # of the steps, as in all our runs
OCTAVE = 2.0
PUBLIC = "1e-3 at 480 × 1,024 tokens, from public code"


@dataclass(frozen=True)
class Line:
    """A rule's best rate over R, at width 384 and 4,096 tokens per step."""

    base: float
    slope: float
    spread: float
    """Standard deviation of the best rates around the line, in octaves."""
    points: int
    blocks: tuple[int, int]
    rounds: tuple[int, int]
    width: tuple[int, int]
    batch_tokens: tuple[int, int]
    tokens: tuple[int, int]
    highest: float
    """The highest peak rate that was run with the rule."""
    folders: tuple[str, ...]

    def rate(self, rounds: int, width: int, batch_tokens: int) -> float:
        return self.base * rounds**self.slope * WIDTH / width * math.sqrt(batch_tokens / BATCH_TOKENS)


@dataclass(frozen=True)
class Order:
    """Rules by their loss in the longest training that compared them."""

    folder: str
    conditions: str
    rounds: int
    tokens: int
    blocks: int
    width: int
    losses: Mapping[str, float]
    level: tuple[str, ...]
    """The best rule, and those not distinguishable from it."""

    @property
    def tokens_per_parameter(self) -> float:
        return tokens_per_parameter(self.tokens, self.blocks, self.width)


@dataclass(frozen=True)
class Recommendation:
    """A rule, and the rates to search with it."""

    rule: str
    rates: tuple[float, float, float]
    """An octave apart. Where the best of the three is at an edge, add the octave beyond."""
    warmup: float
    """As a share of the steps."""
    line: Line
    order: Order
    notes: tuple[str, ...]
    """How the requested model differs from the runs."""


def recommend(
    blocks: int, rounds: int, width: int, tokens: int, batch_tokens: int, *, rule: str | None = None
) -> Recommendation:
    """The rates to search for a rule, by default the best one in long training.

    `tokens` counts the whole training, `batch_tokens` one step.
    """
    asked = {"blocks": blocks, "rounds": rounds, "width": width, "batch_tokens": batch_tokens}
    for name, value in {**asked, "tokens": tokens}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    lines, order = read_lines()
    chosen, rule = rule is None, str(parse(rule)) if rule else order.level[0]
    if rule not in lines:
        raise ValueError(f"rule={rule}: none of our runs has it; they have {', '.join(lines)}")
    if tokens < batch_tokens:
        raise ValueError(f"tokens={tokens:,}: fewer than the {batch_tokens:,} of one step")
    line = lines[rule]
    _check_reach(line, asked)
    wanted = nearest_octave(line.rate(rounds, width, batch_tokens))
    middle = min(wanted, line.highest / OCTAVE)
    notes = [*_notes(line, asked | {"tokens": tokens})]
    if middle < wanted:
        notes.append(f"rates: the line asks for {wanted:g} and beside; none above {line.highest:g} was run")
    if chosen:
        notes += _order_notes(order, blocks, rounds, width, tokens)
    rates = (middle / OCTAVE, middle, middle * OCTAVE)
    return Recommendation(rule, rates, WARMUP, line, order, tuple(notes))


def nearest_octave(rate: float) -> float:
    """The nearest value of 1e-3 times a power of two."""
    return float(1e-3 * OCTAVE ** round(math.log2(rate / 1e-3)))


def _check_reach(line: Line, asked: Mapping[str, int]) -> None:
    beyond = []
    for name, value in asked.items():
        low, high = getattr(line, name)
        if not low / FARTHEST <= value <= high * FARTHEST:
            what = "batch × context; our runs" if name == "batch_tokens" else "our runs"
            beyond.append(f"{name}={value} ({what}: {_span(low, high)})")
    if beyond:
        raise ValueError(
            f"{', '.join(beyond)}: more than {FARTHEST} times beyond our runs, so no rate is named; search "
            f"by octaves from the recipe's rate, for the paper's models {PUBLIC} (docs/sweeps.md)"
        )


def tokens_per_parameter(tokens: int, blocks: int, width: int) -> float:
    """Return tokens per parameter of the blocks, which have about 12 · width² each."""
    return tokens / (12 * blocks * width**2)


def _notes(line: Line, asked: Mapping[str, int]) -> Iterator[str]:
    for name, value in asked.items():
        low, high = getattr(line, name)
        slack = OCTAVE if name == "tokens" else 1
        if not low <= value * slack or not value <= high * slack:
            yield f"{name.replace('_', ' ')} {value:,}: our runs have {_span(low, high)}"


def _order_notes(order: Order, blocks: int, rounds: int, width: int, tokens: int) -> Iterator[str]:
    """Notes on conditions under which another rule may be best."""
    if rounds == 1:
        yield f"the rule: at R = 1 {order.level[0]} and prenorm cannot be told apart (docs/results/gain)"
    if rounds > 2 * order.rounds:
        short = "in short runs at R = 16 flat was ahead (docs/results/transfer)"
        yield f"the rule: ranked at R = {order.rounds}; {short}"
    length = tokens_per_parameter(tokens, blocks, width)
    if length * 8 < order.tokens_per_parameter:
        yield (
            f"the rule: ranked at {order.tokens_per_parameter:.0f} tokens per parameter of the blocks, here "
            f"{length:.2g}; in short runs the order is another (docs/rules.md): compare flat and prenorm"
        )


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def read_lines(path: Path = FILE) -> tuple[dict[str, Line], Order]:
    """Read the results that `make results` collected from docs/results."""
    data = read_object(path)
    lines = {rule: Line(**_tuples(entry)) for rule, entry in data["rates"].items()}
    return lines, Order(**_tuples(data["order"]))


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
