"""Which rule, at which learning rate, for K blocks and R rounds at a width: what our runs say. No torch.

The rule is DeepLoop where the nearest study that compares rules has it: in long training it is ahead of
pre-norm and flat, and these of `averaged` and `factored`. Where it was not run, of the others within 0.02
nats of the lowest loss at R one whose rate transfers comes first, and of these the one that loses least at
half or twice its rate. A rate beside a cliff is never recommended, nor a rule that stands beside one in a
study about as near as the nearest (less than an octave farther). The peak rate is that rule's best one in
the nearest study that has it, between two measured R by a straight line in logarithms. Nothing is scaled
with K, width or tokens: what differs from the runs is listed, with the rates of other widths, and too far
from them there is no answer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from deeploop.report.evidence import Evidence, Measured, Rate, read_evidence
from deeploop.rules import Rule, parse
from deeploop.theory.scaling import Scales

# How many times as far as its runs an answer goes: two octaves of shape, and of R for a rule that transfers;
# the best rate falls with the length of training, and 16 is as far as a factor of two in it might hide.
FARTHEST = {"blocks": 4, "width": 4, "tokens": 16}
FARTHEST_ROUNDS = 4
LEVEL = 0.02  # nats given up for a forgiving rate: what three seeds of a cell span, in nine cells of ten
LONG_TRAINING = (
    "DeepLoop is ahead of pre-norm and flat by 0.006 nats per byte and of averaged by 0.013, at 151 bytes "
    "per parameter and R = 7. The rate comes from short runs: search from half to twice of it"
)
BIAS = "model.unigram_bias"


@dataclass(frozen=True)
class Carried(Measured):
    """A rule in a study that can't say whether it transfers, where one of another shape can."""

    rounds: tuple[int, int] = (1, 1)
    """R from which and to which that other one was measured."""


class Point(NamedTuple):
    """What a rule has at some R."""

    peak: float
    loss: float
    octave: float
    """What half or twice the rate costs; infinite where that is not known."""
    used: tuple[Rate, ...]
    """The measured rates behind."""


@dataclass(frozen=True)
class Beside:
    """Another rule at the same R, in the study that the rule was chosen by."""

    rule: str
    loss: float
    peak_lr: float
    octave: float | None
    """What half or twice the rate costs; None where that is not known."""
    verdict: str


@dataclass(frozen=True)
class Recommendation:
    """A rule, its scales and its rate, with what they rest on."""

    rule: str
    settings: Mapping[str, Any]
    """Fields of a run's config, such as model.rule."""
    scales: Scales
    peak_lr: float
    interval: tuple[float, float] | None
    """95% over seeds; None between measured R, and for a shape that was not run."""
    warmup: float
    """As a share of the steps."""
    transfers: bool | None
    folder: str
    runs: tuple[str, ...]
    """The runs under `folder` that the rate rests on."""
    conditions: str
    extrapolated: tuple[str, ...]
    """In what the question differs from the runs."""
    other_widths: tuple[str, ...]
    """The rule's best rates at this R in studies of other widths."""
    chosen_in: str | None
    """The conditions under which the rule was the best; None if it was asked for."""
    compared: tuple[Beside, ...]
    """All rules there at this R, the lowest loss first."""


def recommend(
    blocks: int,
    rounds: int,
    width: int,
    tokens: int | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
    evidence: Sequence[Evidence] | None = None,
) -> Recommendation:
    """What to train K blocks for R rounds with; `settings`, of a config, ask for the rate of its own rule."""
    asked = {"blocks": blocks, "width": width, **({} if tokens is None else {"tokens": tokens})}
    for name, value in {**asked, "rounds": rounds}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    ranked = _carried(_ranked(read_evidence() if evidence is None else evidence, asked, optimizer))
    near = _near(ranked, asked)
    chosen_in, rule = (None, settings) if settings is not None else _best_rule(near, rounds, asked, ranked)
    where, measured = _rate_source(near, rounds, asked, rule, ranked)
    peak, _, _, used = _point(measured, rounds)
    same_shape = (blocks, width) == (where.blocks, where.width)
    exact = used[0].interval if same_shape and len(used) == 1 and used[0].rounds == rounds else None
    return Recommendation(
        measured.rule,
        measured.settings,
        _rule(measured).scales(blocks, rounds),
        float(f"{peak:.2g}"),
        exact,
        where.warmup_steps / where.steps,
        measured.transfers,
        where.folder,
        tuple(run for rate in used for run in rate.runs),
        where.conditions,
        tuple(_differences(where, measured, rounds, asked, rule)),
        tuple(_other_widths(near, where, rounds, rule)),
        chosen_in.conditions if chosen_in is not None else None,
        _compared(chosen_in or where, rounds),
    )


# ── What is near enough ─────────────────────────────────────────────────────────────────────────────────
def _ranked(evidence: Sequence[Evidence], asked: Mapping[str, int], optimizer: str) -> list[Evidence]:
    """The studies with this optimizer, the nearest first."""
    known = [one for one in evidence if one.optimizer == optimizer]
    if not known:
        raise ValueError(
            f"no evidence: this version rests on no runs with {optimizer}; "
            "`deeploop sweep transfer --scale gpu --data DATA` and `deeploop report` would give it"
        )
    return sorted(known, key=lambda one: sum(_octaves(one, asked).values()))


def _near(ranked: Sequence[Evidence], asked: Mapping[str, int]) -> list[Evidence]:
    """Those within reach."""
    near = [one for one in ranked if not _too_far(one, asked)]
    if not near:
        name = _too_far(ranked[0], asked)[0]
        raise ValueError(
            f"{name}={asked[name]}: no evidence; the nearest runs ({ranked[0].folder}) have "
            f"{getattr(ranked[0], name):,}, and {FARTHEST[name]} times that, either way, is the farthest; "
            f"{_measurement(name, asked[name])}"
        )
    return near


def _octaves(one: Evidence, asked: Mapping[str, int]) -> dict[str, float]:
    return {name: abs(math.log2(value / getattr(one, name))) for name, value in asked.items()}


def _too_far(one: Evidence, asked: Mapping[str, int]) -> list[str]:
    return [name for name, far in _octaves(one, asked).items() if far > math.log2(FARTHEST[name]) + 1e-9]


def _measurement(name: str, value: int) -> str:
    """What would give the answer."""
    if name == "tokens":
        return "a sweep of runs that long (docs/sweeps.md) would give it; else choose a rate of your own"
    more = " model.heads=… model.hidden=…" if name == "width" else ""
    sweep = f"`deeploop sweep transfer --scale gpu --data DATA --set model.{name}={value}{more}`"
    return f"{sweep} and `deeploop report` would give it"


def _carried(ranked: Sequence[Evidence]) -> list[Evidence]:
    """The studies; in those that compare rules, one that transfers in another study is taken to do so too,
    and as far.
    """
    transferring = [m for one in ranked for m in one.rules if m.transfers]

    def told(m: Measured) -> Measured:
        same = [other for other in transferring if m.transfers is None and _same_rule(m, other.settings)]
        if not same:
            return m
        known = {**vars(m), "transfers": True, "slope": same[0].slope}
        return Carried(**known, rounds=_measured_rounds(same[0]))

    return [replace(one, rules=tuple(map(told, one.rules))) if len(one.rules) > 1 else one for one in ranked]


# ── The rule and its rate ───────────────────────────────────────────────────────────────────────────────
def _covers(measured: Measured, R: int) -> bool:
    """Whether its rates reach R: between those measured, and if it transfers somewhat beyond."""
    return _within(measured, R, FARTHEST_ROUNDS if measured.transfers else 1)


def _within(measured: Measured, R: int, reach: int) -> bool:
    low, high = _measured_rounds(measured)
    if isinstance(measured, Carried):
        low, high = min(low, measured.rounds[0]), max(high, measured.rounds[1])
    return low / reach <= R <= high * reach


def _measured_rounds(measured: Measured) -> tuple[int, int]:
    return measured.rates[0].rounds, measured.rates[-1].rounds


def _point(measured: Measured, R: int) -> Point:
    """Rate, loss and cost at R, by straight lines over ln R; beyond the measured R as at the nearest."""
    below = [rate for rate in measured.rates if rate.rounds <= R]
    above = [rate for rate in measured.rates if rate.rounds >= R]
    if not below or not above:
        return _measured_point((above or below)[0 if above else -1])
    left, right = below[-1], above[0]
    if left == right:
        return _measured_point(left)
    share = math.log(R / left.rounds) / math.log(right.rounds / left.rounds)
    one, other = _measured_point(left), _measured_point(right)
    return Point(
        one.peak ** (1 - share) * other.peak**share,
        one.loss * (1 - share) + other.loss * share,
        one.octave * (1 - share) + other.octave * share,
        (left, right),
    )


def _measured_point(rate: Rate) -> Point:
    return Point(rate.peak, rate.loss, math.inf if rate.octave is None else rate.octave, (rate,))


def _is_safe(measured: Measured, R: int) -> bool:
    return all(rate.mark != "cliff" for rate in _point(measured, R).used)


def _rule(measured: Measured) -> Rule:
    return parse(measured.settings["model.rule"])


def _same_rule(measured: Measured, settings: Mapping[str, Any]) -> bool:
    """Whether these settings are its own; the unigram bias may differ."""
    return all(settings.get(name) == value for name, value in measured.settings.items() if name != BIAS)


def _beside_cliff(
    ranked: Sequence[Evidence], R: int, asked: Mapping[str, int], settings: Mapping[str, Any]
) -> Evidence | None:
    """A study about as near as the nearest one of this rule in which it stands beside a cliff at R.

    However far both are: what is too far for a rate is not too far for a warning.
    """
    found = [
        (sum(_octaves(one, asked).values()), one, _is_safe(m, R))
        for one in ranked
        for m in one.rules
        if _same_rule(m, settings) and _within(m, R, FARTHEST_ROUNDS)  # a warning reaches as far as any rate
    ]
    return next((one for far, one, safe in found if not safe and far < found[0][0] + 1), None)


def _best_rule(
    near: Sequence[Evidence], R: int, asked: Mapping[str, int], ranked: Sequence[Evidence]
) -> tuple[Evidence, Mapping[str, Any]]:
    """The settings of the rule to take, by the nearest study that compares rules at R, else has one."""
    able = [(one, [m for m in one.rules if _covers(m, R)]) for one in near]
    usable = [(one, rules) for least in (2, 1) for one, rules in able if len(rules) >= least]
    safe = [
        (one, [m for m in rules if _is_safe(m, R) and not _beside_cliff(ranked, R, asked, m.settings)])
        for one, rules in usable
    ]
    if not usable:
        raise _no_rounds(R, [(one, m) for one in near for m in one.rules])
    if not (safe := [(one, rules) for one, rules in safe if rules]):
        raise ValueError(
            f"every rule that was run near this shape at rounds={R} is beside a cliff ({near[0].folder}), "
            "where twice its best rate fails to train; `deeploop sweep transfer` at your shape may find one"
        )
    one, rules = safe[0]
    # Those with an ε are behind in long training, though ahead in the short runs that the rates come from.
    rules = [m for m in rules if not _rule(m).has_epsilon] or rules
    if paper := [m for m in rules if _rule(m).is_paper]:
        return one, paper[0].settings
    lowest = min(_point(m, R).loss for m in rules)
    level = [m for m in rules if _point(m, R).loss <= lowest + LEVEL]
    return one, min(level, key=lambda m: (not m.transfers, _point(m, R).octave, _point(m, R).loss)).settings


def _rate_source(
    near: Sequence[Evidence],
    R: int,
    asked: Mapping[str, int],
    settings: Mapping[str, Any],
    ranked: Sequence[Evidence],
) -> tuple[Evidence, Measured]:
    """The nearest study that has the rule at R."""
    found = [(one, m) for one in near for m in one.rules if _same_rule(m, settings)]
    if not found:
        names = dict.fromkeys(m.rule for one in near for m in one.rules)
        raise ValueError(
            f"model.rule={settings.get('model.rule')}: no evidence for this rule; the runs "
            f"near this shape have {', '.join(names)}; choose one of them, or a rate of your own"
        )
    covering = [(one, m) for one, m in found if _covers(m, R)]
    cliff = _beside_cliff(ranked, R, asked, settings)
    if cliff is None and covering and not _is_safe(covering[0][1], R):
        cliff = covering[0][0]
    if cliff is not None:
        raise ValueError(
            f"{found[0][1].rule}: its best rate is beside a cliff at K = {cliff.blocks}, width "
            f"{cliff.width} ({cliff.folder}), where twice the rate fails to train; choose another rule, "
            "or a rate of your own"
        )
    if not covering:
        raise _no_rounds(R, found)
    return covering[0]


def _no_rounds(R: int, tried: Sequence[tuple[Evidence, Measured]]) -> ValueError:
    runs = "; ".join(
        dict.fromkeys(
            f"{m.rule} at R = {', '.join(str(rate.rounds) for rate in m.rates)} ({one.folder})"
            for one, m in tried
        )
    )
    return ValueError(
        f"rounds={R}: no evidence; there are {runs}, and only a rule that transfers is carried further, "
        f"{FARTHEST_ROUNDS} times, and none beside a cliff; a grid with model.rounds = [1, {max(R, 4)}] "
        "(docs/sweeps.md) and `deeploop report` would give it"
    )


# ── What is said beside it ──────────────────────────────────────────────────────────────────────────────
def _differences(
    where: Evidence,
    measured: Measured,
    R: int,
    asked: Mapping[str, int],
    settings: Mapping[str, Any],
) -> Iterable[str]:
    for name, value in asked.items():
        if value != getattr(where, name):
            yield f"{name} {value:,}: the runs have {getattr(where, name):,}; their rate is taken as it is"
    used = [rate.rounds for rate in _point(measured, R).used]
    if R not in used:
        between = (
            f"between the measured {used[0]} and {used[-1]}" if len(used) > 1 else f"as at R = {used[0]}"
        )
        yield f"rounds {R}: {between}"
    if edges := [str(rate.rounds) for rate in _point(measured, R).used if rate.mark == "edge"]:
        yield f"the best rate at R = {', '.join(edges)} is at the edge of the rates that were run"
    bias = measured.settings.get(BIAS, False)
    if settings.get(BIAS, False) != bias:
        yield f"the runs were {'with' if bias else 'without'} the unigram bias (--model.unigram-bias)"
    if "tokens" not in asked:
        yield f"tokens: of {where.tokens / 1e6:.1f} M only; name yours with --tokens"


def _other_widths(
    near: Sequence[Evidence], where: Evidence, R: int, settings: Mapping[str, Any]
) -> Iterable[str]:
    for one in near:
        for m in one.rules:
            if one.width != where.width and _same_rule(m, settings) and _covers(m, R):
                at = _point(m, R)
                mark = ", at the edge of the rates that were run" if at.used[0].mark == "edge" else ""
                yield f"{at.peak:.2g} at width {one.width}, K = {one.blocks}{mark} ({one.folder})"


def _compared(one: Evidence, R: int) -> tuple[Beside, ...]:
    points = [(m, _point(m, R)) for m in one.rules if _covers(m, R)]
    return tuple(
        Beside(
            m.rule,
            at.loss,
            float(f"{at.peak:.2g}"),
            at.octave if math.isfinite(at.octave) else None,
            m.verdict,
        )
        for m, at in sorted(points, key=lambda row: row[1].loss)
    )
