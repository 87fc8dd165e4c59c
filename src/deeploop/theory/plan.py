"""`deeploop plan`: alpha, beta and the stability bounds of an architecture, as a table or as JSON.

deeploop plan --blocks 12 --rounds 3
deeploop plan --blocks 4 --rounds 4 --prelude 2 --coda 2 --sample poisson-lognormal --backprop 4
deeploop plan --high-blocks 4 --low-blocks 4 --cycles 2 --low-cycles 2 --horizon last_cycle
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from deeploop.theory import plan_table
from deeploop.theory.bounds import (
    Rules,
    aligned_bound,
    exponent_threshold,
    kappa_bar_range,
    rules_by_module,
    untied_bound,
)
from deeploop.theory.depth_law import DepthLaw, effective_depth, mean_read_write
from deeploop.theory.plan_table import flat_alphas
from deeploop.theory.scaling import (
    DEEPLOOP,
    PAPER_RULES,
    Scales,
    ScalingRule,
    averaged_epsilon,
    factored_epsilon,
    flat_alpha,
)
from deeploop.theory.visits import HORIZONS, DepthFrom, Horizon, Schedule, hierarchy, single_loop

if TYPE_CHECKING:
    from deeploop.rules import Rule


@dataclass(frozen=True)
class Training:
    """How a loop is trained: the law of its rounds, and the rounds that gradients go through (None: all)."""

    sample: str
    law: DepthLaw
    backprop: int | None = None

    @property
    def is_plain(self) -> bool:
        """R is fixed, and all of it stands in the graph."""
        return self.law.least == self.law.most and not self.truncates

    @property
    def truncates(self) -> bool:
        return self.backprop is not None and self.backprop < self.law.most

    @property
    def formula(self) -> str:
        """N* of this training, in the symbols of the paper."""
        if self.law.least == self.law.most:
            return "K·√(R·R_g)"
        return "K·√E[R·R_g]" if self.truncates else "K·√E[R²]"


@dataclass(frozen=True)
class Plan:
    """A schedule, the rule of each module, and what follows from the two."""

    settings: Mapping[str, int | str]  # the architecture as it was asked for
    schedule: Schedule
    rules: Mapping[str, ScalingRule]  # one per module
    horizons: Mapping[Horizon, Schedule] = field(default_factory=dict)  # a hierarchy's, at each horizon
    epsilons: Mapping[str, float] = field(default_factory=dict)  # a loop's, of the rules that scale pre-norm
    once: Mapping[str, int] = field(default_factory=dict)  # blocks of a loop's prelude and coda
    training: Training | None = None  # of a loop whose rounds are drawn, or not all in the graph
    other: "Rule | None" = None  # the chosen rule of a loop, if none of the paper's: `rules` are to compare
    depth_from: DepthFrom = "cycles"

    def depth(self, schedule: Schedule | None = None) -> int:
        """The depth that alpha and beta are taken at, of this schedule or of another."""
        return (schedule or self.schedule).rule_depth(self.depth_from)

    @property
    def scales(self) -> Scales:
        """α, β and ε of the chosen rule, where it is none of the paper's."""
        assert self.other is not None
        return self.other.scales(int(self.settings["blocks"]), int(self.settings["rounds"]))

    def to_json(self) -> dict[str, Any]:
        """One object of plain numbers, exact fractions beside them as strings (null where irrational)."""
        schedule, depth = self.schedule, self.depth()
        kappa_bar = kappa_bar_range(schedule)
        return {
            **self.settings,
            **{name: getattr(schedule, name) for name in ("N", "M", "J", "N_g", "M_g")},
            "scaled_by": "N_g" if self.horizons else "N",
            "rule_depth": depth,
            **_scales(schedule, self.rules, depth),
            **(self._of_other() if self.other else {}),
            "kappa_bar_range": [float(end) for end in kappa_bar],
            "kappa_bar_range_exact": [str(end) for end in kappa_bar],
            "exponent_thresholds": {f"gamma_{g}": float(exponent_threshold(g)) for g in (0, 1)},
            "modules": {
                m: _module(schedule, self.rules[m], m, depth) | (self._of_other() if self.other else {})
                for m in schedule.modules
            },
            "comparison": {
                name: _scales(schedule, rules_by_module(schedule, rule), depth)
                for name, rule in PAPER_RULES.items()
            },
            "horizons": {
                name: _horizon(at, self.rules, self.depth(at)) for name, at in self.horizons.items()
            },
            "epsilons": dict(self.epsilons),
            "flat": {"formula": "lambda * R * sqrt(K)", "lambda": 1.0, "alpha": flat_alphas(schedule)},
            "once": {name: _visited_once(self.rules["loop"], blocks) for name, blocks in self.once.items()},
            "training": _trained(self),
            "verdict": plan_table.verdict(self),
        }

    def _of_other(self) -> dict[str, Any]:
        """The chosen rule in place of the paper's, whose bounds are not for it."""
        nothing = dict.fromkeys(("p", "ratio", "ratio_exact"))
        bounds = [f"{kind}_bound{exact}" for kind in ("untied", "aligned") for exact in ("", "_exact")]
        return {"rule": str(self.other), **nothing, **self.scales._asdict(), **dict.fromkeys(bounds)}

    def to_table(self) -> str:
        """The plan as text for a terminal of 100 columns."""
        return plan_table.render(self)


def plan_single(
    blocks: int,
    rounds: int,
    rule: ScalingRule = DEEPLOOP,
    *,
    prelude: int = 0,
    coda: int = 0,
    training: Training | None = None,
    other: "Rule | None" = None,
) -> Plan:
    """K blocks for R rounds under one rule, between blocks that are visited once.

    `training` says how R is drawn, and how much of it stands in the graph. `other` is a rule that is not the
    paper's (`deeploop.rules`), such as flat or averaged.
    """
    schedule = single_loop(blocks, rounds)
    once = {"prelude": prelude, "coda": coda}
    for name, count in once.items():
        if count < 0:
            raise ValueError(f"{name}={count}: must be 0 (none) or more")
    return Plan(
        {"blocks": blocks, "rounds": rounds, **once},
        schedule,
        rules_by_module(schedule, rule),
        once={name: count for name, count in once.items() if count},
        training=None if training is None or training.is_plain else training,
        other=other,
        epsilons={
            "factored": factored_epsilon(blocks, rounds),
            "averaged": averaged_epsilon(blocks, rounds),
        },
    )


def plan_hierarchy(
    high_blocks: int,
    low_blocks: int,
    cycles: int,
    low_cycles: int,
    horizon: Horizon = "last_cycle",
    rules: Rules = DEEPLOOP,
    depth_from: DepthFrom = "cycles",
) -> Plan:
    """Two modules H and L under one rule, or one rule each: {"H": ..., "L": ...}."""
    sizes = {"high_blocks": high_blocks, "low_blocks": low_blocks, "cycles": cycles, "low_cycles": low_cycles}
    schedule = hierarchy(**sizes, horizon=horizon)
    horizons = {h: hierarchy(**sizes, horizon=h) for h in HORIZONS}
    settings = {**sizes, "horizon": horizon, "depth_from": depth_from}
    return Plan(settings, schedule, rules_by_module(schedule, rules), horizons, depth_from=depth_from)


def _scales(schedule: Schedule, rules: Mapping[str, ScalingRule], depth: int) -> dict[str, Any]:
    """alpha, beta and their ratio (null where the modules' rules differ), and the bounds."""
    first = next(iter(rules.values()))
    numbers = _rule(first, depth)
    untied, aligned = untied_bound(schedule, rules, depth), aligned_bound(schedule, rules, depth)
    return {
        **(numbers if set(rules.values()) == {first} else dict.fromkeys(numbers)),
        "untied_bound": untied.value,
        "untied_bound_exact": _string(untied.exact),
        "aligned_bound": aligned.value,
        "aligned_bound_exact": _string(aligned.exact),
    }


def _rule(rule: ScalingRule, N: int) -> dict[str, Any]:
    return {
        "rule": rule.name,
        "p": float(rule.p),
        "alpha": rule.alpha(N),
        "beta": rule.beta(N),
        "ratio": rule.ratio(N),
        "ratio_exact": _string(rule.ratio_exact(N)),
    }


def _trained(plan: Plan) -> dict[str, Any] | None:
    """N* and what it would make of the scales; null where it is N."""
    if plan.training is None:
        return None
    training, K = plan.training, int(plan.settings["blocks"])
    mean = mean_read_write(training.law, training.backprop)
    return {
        "sample": training.sample,
        "mean_rounds": float(training.law.mean),
        "least_rounds": training.law.least,
        "most_rounds": training.law.most,
        "backprop": training.backprop,
        "formula": training.formula,
        "read_times_written": float(mean),
        "read_times_written_exact": str(mean) if isinstance(mean, Fraction) else None,
        "N_star": effective_depth(K, training.law, training.backprop),
    }


def _visited_once(rule: ScalingRule, blocks: int) -> dict[str, Any]:
    """The scales of blocks that a forward pass visits once, each rule's at K = blocks and R = 1."""
    return {
        "blocks": blocks,
        **_rule(rule, blocks),
        "epsilons": {"factored": factored_epsilon(blocks, 1), "averaged": averaged_epsilon(blocks, 1)},
        "flat_alpha": flat_alpha(blocks, 1),
    }


def _module(schedule: Schedule, rule: ScalingRule, module: str, depth: int) -> dict[str, Any]:
    counts = {"J": schedule.J_of(module), "R": schedule.R_of(module), "R_g": schedule.R_g_of(module)}
    asked = exponent_threshold(int(schedule.R_g_of(module) > 1))
    return counts | _rule(rule, depth) | {"aligned_exponent": float(asked)}


def _horizon(schedule: Schedule, rules: Mapping[str, ScalingRule], depth: int) -> dict[str, Any]:
    R_g = {m: schedule.R_g_of(m) for m in schedule.modules}
    counts = {"M_g": schedule.M_g, "N_g": schedule.N_g, "rule_depth": depth, "R_g": R_g}
    return {**counts, **_scales(schedule, rules, depth), "flat_alpha": flat_alphas(schedule)}


def _string(fraction: Fraction | None) -> str | None:
    return None if fraction is None else str(fraction)
