"""Does a rule keep its learning rate as R grows? Best rates, their slope over R, and the regret. No torch.

From runs that vary in rule, rounds, peak rate and seed, and agree in all else: `deeploop sweep transfer`.

- η*(R), the best rate: the vertex of the parabola through the best cell and its two neighbours, loss against
  log₂ of the peak rate, over the seeds that all three have. At an edge of the grid, and beside a cell that
  was lost (collapsed or diverged), there is no such parabola: η* is the rate of the best cell, and says so.
- The slope d ln η*/d ln R: least squares over all R.
- The regret at R: the loss at R with η*(1), minus the best loss at R, both read off the same curve: that
  parabola, and beyond its three cells the one through the nearest three, held between the two losses beside
  it. Next to a lost cell the nearer one decides.

Intervals are 95%, Student's, over the seeds: each has an η* and a slope of its own. They hold the noise of
seeds, not the error of a parabola through three rates an octave apart.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, linear_regression
from typing import Any, Literal, NamedTuple

from deeploop.diagnose.exponent import STUDENT, half_width
from deeploop.report.groups import Histories, Setup, method, setups
from deeploop.report.runs import Run
from deeploop.runs.endings import log_error, log_file

# "Transfers". A slope of 0.1 moves η* by 16^0.1 = 1.32 from R = 1 to 16, less than half of the octave between
# two rates of the grid; 0.01 nats is what seeds of the quietest rules differ by (docs/rules.md).
MOST_SLOPE = 0.1
MOST_REGRET = 0.01
JUDGED_AT = 16
BIAS = " + unigram bias"

Mark = Literal["", "edge", "cliff"]
Interval = tuple[float, float]
Result = tuple[Run, float]  # a run and its loss, infinite if it was lost


class Parabola(NamedTuple):
    """Through three points, in Newton's form."""

    x: tuple[float, float, float]
    y0: float
    slope: float
    curvature: float

    @staticmethod
    def through(x: Sequence[float], y: Sequence[float]) -> "Parabola":
        first, second = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
        return Parabola((x[0], x[1], x[2]), y[0], first, (second - first) / (x[2] - x[0]))

    def __call__(self, at: float) -> float:
        left, middle, _ = self.x
        return self.y0 + self.slope * (at - left) + self.curvature * (at - left) * (at - middle)

    @property
    def lowest(self) -> float:
        """The place of the minimum between its outer points."""
        left, middle, right = self.x
        if self.curvature <= 0:
            return min(self.x, key=self.__call__)
        return min(right, max(left, (left + middle) / 2 - self.slope / (2 * self.curvature)))


@dataclass(frozen=True)
class Cell:
    """The runs of one rule, R and peak rate that came to an end."""

    peak: float
    losses: Mapping[int, float]
    """Seed → last validation loss."""
    lost: tuple[str, ...] = ()
    """Names of the runs that collapsed or diverged: one of them, and the rate is no choice."""

    @property
    def x(self) -> float:
        return math.log2(self.peak)

    def mean(self, seeds: frozenset[int] = frozenset()) -> float:
        """Over these seeds, where it has some of them; else over all of its own."""
        return fmean([self.losses[s] for s in sorted(seeds & self.losses.keys())] or [*self.losses.values()])

    def minus(self, other: "Cell") -> float:
        """The difference of losses over the seeds that both have."""
        shared = frozenset(self.losses) & other.losses.keys()
        return self.mean(shared) - other.mean(shared)

    @staticmethod
    def of(peak: float, results: Sequence[Result]) -> "Cell":
        by_seed: dict[int, list[float]] = {}
        for run, loss in results:
            if math.isfinite(loss):
                by_seed.setdefault(run.fields["seed"], []).append(loss)
        losses = {seed: fmean(own) for seed, own in by_seed.items()}  # a seed may have been run twice
        lost = tuple(run.name for run, loss in results if not math.isfinite(loss))
        return Cell(peak, losses, lost)


@dataclass(frozen=True)
class Optimum:
    """The best rate at one R."""

    peak: float
    loss: float
    mark: Mark
    """edge: no rate was run beyond the best, or none with its seeds; cliff: its neighbour was lost."""
    interval: Interval | None
    """None with one seed, and with a mark."""


@dataclass(frozen=True)
class Curve:
    """Loss against peak rate, of one rule at one R."""

    cells: tuple[Cell, ...]
    """By rate."""

    @staticmethod
    def of(results: Sequence[Result]) -> "Curve":
        by_peak: dict[float, list[Result]] = {}
        for run, loss in results:
            by_peak.setdefault(run.fields["optim.peak_lr"], []).append((run, loss))
        return Curve(tuple(Cell.of(peak, own) for peak, own in sorted(by_peak.items())))

    @cached_property
    def _best(self) -> int | None:
        """By the seeds that all rates have: a rate that was run with more of them must not lose by that.

        Then by those that it shares with each neighbour, often more, until no neighbour is better.
        """
        whole = {index: cell for index, cell in enumerate(self.cells) if not cell.lost}
        if not whole:
            return None
        shared = frozenset.intersection(*(frozenset(cell.losses) for cell in whole.values()))
        best, better = -1, min(whole, key=lambda index: whole[index].mean(shared))
        while best != better:
            best = better
            around = [index for index in (best, best - 1, best + 1) if index in whole]
            better = min(around, key=lambda index: whole[index].minus(whole[best]))
        return best

    @property
    def best(self) -> Cell | None:
        """The rate with the lowest loss; None where every one was lost."""
        return None if self._best is None else self.cells[self._best]

    @cached_property
    def mark(self) -> Mark:
        assert self._best is not None
        around = self.cells[max(0, self._best - 1) : self._best + 2]
        if any(cell.lost for cell in around):
            return "cliff"
        shared = frozenset.intersection(*(frozenset(cell.losses) for cell in around))
        lowest = min(around, key=lambda cell: cell.mean(shared))
        return "" if len(around) == 3 and lowest is self.cells[self._best] else "edge"

    @cached_property
    def around(self) -> tuple[Cell, ...]:
        """The best cell, with its neighbours where a parabola goes through them."""
        if self._best is None:
            return ()
        margin = 0 if self.mark else 1
        return self.cells[self._best - margin : self._best + margin + 1]

    @cached_property
    def seeds(self) -> frozenset[int]:
        """The seeds that all cells around the best one have."""
        return frozenset.intersection(*(frozenset(cell.losses) for cell in self.around))

    @cached_property
    def parabola(self) -> Parabola | None:
        if len(self.around) < 3:
            return None
        return Parabola.through([c.x for c in self.around], [c.mean(self.seeds) for c in self.around])

    def best_x(self, seed: int) -> float:
        """log₂ η* of one seed, by the same cells."""
        if len(self.around) < 3:
            return self.around[0].x
        return Parabola.through([c.x for c in self.around], [c.losses[seed] for c in self.around]).lowest

    @cached_property
    def optimum(self) -> Optimum | None:
        """None with fewer than three rates, and where every one was lost."""
        if len(self.cells) < 3 or not self.around:
            return None
        if self.parabola is None:
            cell = self.around[0]
            return Optimum(cell.peak, cell.mean(), self.mark, None)
        x, interval = self.parabola.lowest, None
        if len(self.seeds) > 1:
            spread = half_width([self.best_x(seed) for seed in self.seeds])
            interval = (2 ** (x - spread), 2 ** (x + spread))
        return Optimum(2**x, self.parabola(x), "", interval)

    def loss_at(self, peak: float) -> float | None:
        """Infinite where the nearest rate was lost; None outside of the rates that were run."""
        x = math.log2(peak)
        if self.parabola is not None and self.parabola.x[0] <= x <= self.parabola.x[2]:
            return self.parabola(x)
        slack = 1e-9  # a rate of the grid, by way of its logarithm
        below = [cell for cell in self.cells if cell.x <= x + slack]
        above = [cell for cell in self.cells if cell.x >= x - slack]
        if not below or not above:
            return None
        left, right = below[-1], above[0]
        if left.lost or right.lost:
            nearest = left if x - left.x <= right.x - x else right
            return math.inf if nearest.lost else nearest.mean(self.seeds)
        ends = sorted((left.mean(self.seeds), right.mean(self.seeds)))
        return min(ends[1], max(ends[0], self._interpolate(x)))

    def _interpolate(self, x: float) -> float:
        """By a parabola through the three nearest cells that were not lost."""
        near = sorted((cell for cell in self.cells if not cell.lost), key=lambda cell: abs(cell.x - x))[:3]
        near.sort(key=lambda cell: cell.x)
        values = [cell.mean(self.seeds) for cell in near]
        if len(near) < 3:
            return fmean(values)
        return Parabola.through([cell.x for cell in near], values)(x)


@dataclass(frozen=True)
class Slope:
    """d ln η*/d ln R."""

    value: float
    interval: Interval | None
    of: str
    """The source of the interval: `3 seeds`, or `the fit` (what least squares over R leave)."""


@dataclass(frozen=True)
class Transfer:
    """One rule's curves, and what they say."""

    rule: str
    curves: Mapping[int, Curve]
    """R → curve, by R."""
    settings: Mapping[str, Any]
    """The config of one of its runs, as far as it is the rule's: model.rule, and the unigram bias."""

    @cached_property
    def optima(self) -> dict[int, Optimum]:
        return {R: curve.optimum for R, curve in self.curves.items() if curve.optimum is not None}

    @property
    def marks(self) -> dict[int, Mark]:
        return {R: optimum.mark for R, optimum in self.optima.items() if optimum.mark}

    @cached_property
    def slope(self) -> Slope | None:
        """Over every R that has a best rate; None with one."""
        rounds = [*self.optima]
        if len(rounds) < 2:
            return None
        x, y = [math.log(R) for R in rounds], [math.log(one.peak) for one in self.optima.values()]
        value = linear_regression(x, y).slope
        seeds = sorted(frozenset.intersection(*(self.curves[R].seeds for R in rounds)))
        if len(seeds) > 1 and not self.marks:
            own = [[self.curves[R].best_x(seed) * math.log(2) for R in rounds] for seed in seeds]
            spread = half_width([linear_regression(x, values).slope for values in own])
            return Slope(value, (value - spread, value + spread), f"{len(seeds)} seeds")
        spread = _residual_half_width(x, y) if "edge" not in self.marks.values() else math.inf
        return Slope(value, (value - spread, value + spread) if math.isfinite(spread) else None, "the fit")

    def regret(self, R: int) -> float | None:
        """Infinite where R = 1's best rate is lost at R; None where either is not known."""
        if 1 not in self.optima or R not in self.curves:
            return None
        loss, best = self.curves[R].loss_at(self.optima[1].peak), self.optima.get(R)
        if loss is None or math.isinf(loss):
            return loss
        return None if best is None else loss - best.loss

    @property
    def transfers(self) -> bool | None:
        """By the criterion above; None where these runs do not decide it."""
        regret = self.regret(JUDGED_AT)
        if regret is None or self.slope is None or self.marks.get(1) == "edge":
            return None
        if regret > MOST_REGRET:
            return False  # with the best at an edge the regret can only be larger
        return None if "edge" in self.marks.values() else abs(self.slope.value) < MOST_SLOPE

    @property
    def verdict(self) -> str:
        at = {
            mark: ", ".join(str(R) for R, m in self.marks.items() if m == mark) for mark in ("edge", "cliff")
        }
        if self.transfers is not None:
            beside = f", beside a cliff at R = {at['cliff']}" if at["cliff"] else ""
            return "transfers" + beside if self.transfers else "does not"
        if at["edge"]:
            return f"open: best rate at the edge of the grid at R = {at['edge']}"
        return f"open: needs R = 1 and R = {JUDGED_AT}"


@dataclass(frozen=True)
class Study:
    """Runs that agree in all but rule, rounds, peak rate and seed."""

    setup: Setup
    letter: str
    runs: tuple[Run, ...]
    rules: Mapping[str, Transfer]
    """By their name, in the order of losses at the most rounds that all have."""
    biased: bool
    """Every run has the unigram bias, and the names of rules leave it out."""

    @property
    def title(self) -> str:
        warm = f"{self.runs[0].fields['optim.warmup_steps']:,} of them warm-up"
        return f"{self.setup.title}, {warm}" + (", all with the unigram bias" if self.biased else "")

    @property
    def peaks(self) -> list[float]:
        curves = [curve for rule in self.rules.values() for curve in rule.curves.values()]
        return sorted({cell.peak for curve in curves for cell in curve.cells})

    @property
    def rounds(self) -> list[int]:
        return sorted({R for rule in self.rules.values() for R in rule.curves})

    @property
    def over_rounds(self) -> bool:
        """True if some rule has three rates at each of two R, which a slope requires."""
        return any(
            sum(len(curve.cells) >= 3 for curve in rule.curves.values()) >= 2 for rule in self.rules.values()
        )


def find_studies(runs: Sequence[Run], histories: Histories) -> list[Study]:
    """Every set of runs with three peak rates of one rule at one R."""
    found = []
    for setup in setups(runs):
        groups = _by_other_settings(setup)
        studies = [study for own in groups if (study := _study(setup, own, histories)) is not None]
        for index, study in enumerate(studies):
            letter = setup.letter + (str(index + 1) if len(studies) > 1 else "")
            found.append(Study(setup, letter, *study))
    return found


def _by_other_settings(setup: Setup) -> list[list[Run]]:
    """The runs of a set-up that agree in the optimizer's settings too, but for the peak rate."""
    groups: dict[str, list[Run]] = {}
    for run in setup.runs:
        others = {
            name: value
            for name, value in run.fields.items()
            if name.startswith("optim.") and name != "optim.peak_lr"
        }
        groups.setdefault(json.dumps(others, sort_keys=True), []).append(run)
    return [*groups.values()]


def _study(
    setup: Setup, runs: Sequence[Run], histories: Histories
) -> tuple[tuple[Run, ...], dict[str, Transfer], bool] | None:
    results = [(run, loss) for run in runs if (loss := final_loss(run, histories)) is not None]
    biased = all(run.fields.get("model.unigram_bias") for run, _ in results)
    by_rule: dict[str, list[Result]] = {}
    for run, loss in results:
        name = method(run).replace(BIAS, "") if biased else method(run)
        by_rule.setdefault(name, []).append((run, loss))
    rules = [Transfer(name, _curves(own), _rule_settings(own[0][0])) for name, own in by_rule.items()]
    rules = [rule for rule in rules if any(len(curve.cells) >= 3 for curve in rule.curves.values())]
    return (tuple(run for run, _ in results), _ranked(rules), biased) if rules else None


def final_loss(run: Run, histories: Histories) -> float | None:
    """Its loss; infinite if it was lost (not finite, near the floor at its end); None if it is not over."""
    if run.state == "failed":
        diverged = "non-finite" in (log_error(log_file(run.files)) or "")
        return math.inf if run.fields and diverged else None
    if not run.ended:
        return None
    loss = histories.loss(run)
    # Undecided is lost too: a run that ends near the unigram floor has not trained.
    return math.inf if loss is None or run.validation.get("verdict", "escaped") != "escaped" else loss


def _curves(results: Sequence[Result]) -> dict[int, Curve]:
    by_rounds: dict[int, list[Result]] = {}
    for run, loss in results:
        by_rounds.setdefault(run.fields["model.rounds"], []).append((run, loss))
    return {R: Curve.of(own) for R, own in sorted(by_rounds.items())}


def _rule_settings(run: Run) -> dict[str, Any]:
    return {name: run.fields[name] for name in ("model.rule", "model.unigram_bias") if name in run.fields}


def _ranked(rules: Sequence[Transfer]) -> dict[str, Transfer]:
    """The lowest loss first, at the most rounds that all rules have."""
    shared = set.intersection(*({*rule.optima} for rule in rules))
    at = max(shared, default=None)

    def loss(rule: Transfer) -> float:
        return rule.optima[at].loss if at is not None else 0.0

    return {rule.rule: rule for rule in sorted(rules, key=loss)}


def _residual_half_width(x: Sequence[float], y: Sequence[float]) -> float:
    """Half of the 95% interval of a fitted slope, by what the fit leaves; infinite with two points."""
    free = len(x) - 2
    if free < 1:
        return math.inf
    slope, intercept = linear_regression(x, y)
    left = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = sum((a - fmean(x)) ** 2 for a in x)
    return STUDENT[min(free, len(STUDENT)) - 1] * math.sqrt(left / free / spread)
