"""First-order bounds on the change of the output after one step, up to a depth-independent constant.

All follow from the module-wise bound of Eq. (hrm-per-module-bound), over the visits in the training graph,

    sum over modules m of  J_m R_g_m kappa_m (beta_m / alpha_m)^2,     0 <= kappa_m <= R_g_m,

with alpha and beta taken at `depth`, the schedule's rule_depth() unless it is given. A single loop is its
one-module case, where M_g = M = JR and the depth is N:
kappa = 1 gives the untied DeepNorm bound, kappa = kappa_R the tied one, kappa = R the aligned worst case.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple, overload

from deeploop.theory.scaling import Real, ScalingRule, exact
from deeploop.theory.visits import Schedule

Rules = ScalingRule | Mapping[str, ScalingRule]

ROUNDING = 1e-6  # a measured kappa may pass its bound by this much


class Bound(NamedTuple):
    """A bound as a float and, where it is rational, as a fraction."""

    value: float
    exact: Fraction | None


def untied_bound(schedule: Schedule, rules: Rules, depth: int = 0) -> Bound:
    """M (beta/alpha)^2, Eq. (update-bound): every visit owns its parameters."""
    return module_bound(schedule, rules, dict.fromkeys(schedule.modules, 1), depth)


def tied_bound(schedule: Schedule, rules: Rules, kappa: Real) -> Bound:
    """M kappa_R (beta/alpha)^2, Eq. (loop-update-bound), with one kappa for every module."""
    return module_bound(schedule, rules, dict.fromkeys(schedule.modules, kappa))


def aligned_bound(schedule: Schedule, rules: Rules, depth: int = 0) -> Bound:
    """M R (beta/alpha)^2, the worst case of Corollary (aligned-loop): kappa = R_g in every module."""
    return module_bound(schedule, rules, {m: schedule.R_g_of(m) for m in schedule.modules}, depth)


def module_bound(schedule: Schedule, rules: Rules, kappas: Mapping[str, Real], depth: int = 0) -> Bound:
    """Eq. (hrm-per-module-bound), with a rule and a kappa for each module."""
    by_module = rules_by_module(schedule, rules)
    weights = _weights(schedule, kappas)
    depth = depth or schedule.rule_depth()
    value, total = 0.0, Fraction(0)
    rational = True
    for module, weight in weights.items():
        squared = by_module[module].ratio_squared_exact(depth)
        value += float(weight) * by_module[module].ratio(depth) ** 2
        if squared is None or isinstance(weight, float):
            rational = False
        else:
            total += weight * squared
    return Bound(float(total), total) if rational else Bound(value, None)


def kappa_bar(schedule: Schedule, kappas: Mapping[str, Real]) -> Real:
    """The gradient-visible aggregate alignment of Eq. (hrm-cond): sum of J R_g kappa over M_g.

    A module left out of `kappas` is put at its upper bound R_g. For `last_cycle` that is the paper's
    formula, where H is in the graph once and kappa_H <= 1; for `full`, kappa_H is at most C.
    """
    worst: dict[str, Real] = {m: schedule.R_g_of(m) for m in schedule.modules}
    return sum(_weights(schedule, worst | dict(kappas)).values()) / Fraction(schedule.M_g)


def kappa_bar_range(schedule: Schedule) -> tuple[Fraction, Fraction]:
    """Least and greatest kappa_bar as each kappa runs over [0, R_g].

    As in the paper, an H that is in the graph once stays at its bound 1, so `last_cycle` gives
    [J_H / M_g, 1 + J_L C_L (C_L - 1) / M_g].
    """
    once = {"H"} if "H" in schedule.modules and schedule.R_g_of("H") == 1 else set()
    least = kappa_bar(schedule, {m: 0 for m in schedule.modules if m not in once})
    return exact(least), exact(kappa_bar(schedule, {}))


@overload
def exponent_threshold(gamma: int | Fraction) -> Fraction: ...
@overload
def exponent_threshold(gamma: float) -> float: ...
def exponent_threshold(gamma: Real) -> Real:
    """The least p that keeps the tied bound finite as R grows at fixed K, where kappa_R ~ R^gamma."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma}: must lie in [0, 1]")
    return (1 + gamma) / 4 if isinstance(gamma, float) else Fraction(1 + gamma, 4)


def rules_by_module(schedule: Schedule, rules: Rules) -> dict[str, ScalingRule]:
    """Return one rule for each module of the schedule; a single rule serves them all."""
    if isinstance(rules, ScalingRule):
        return dict.fromkeys(schedule.modules, rules)
    if set(rules) != set(schedule.modules):
        raise ValueError(f"rules for {sorted(rules)}: need one for each of {sorted(schedule.modules)}")
    return {m: rules[m] for m in schedule.modules}


def _weights(schedule: Schedule, kappas: Mapping[str, Real]) -> dict[str, Real]:
    """J R_g kappa of each module."""
    if set(kappas) != set(schedule.modules):
        raise ValueError(f"kappa for {sorted(kappas)}: need one for each of {sorted(schedule.modules)}")
    weights: dict[str, Real] = {}
    for module in schedule.modules:
        kappa, R_g = kappas[module], schedule.R_g_of(module)
        if not 0 <= kappa <= R_g * (1 + ROUNDING):
            raise ValueError(f"kappa={kappa} of {module}: must lie in [0, {R_g}], its visits in the graph")
        weights[module] = schedule.J_of(module) * R_g * kappa
    return weights
