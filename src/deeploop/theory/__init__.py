"""The theory of looped depth in pure Python: visits, scaling rules, bounds and the plan made of them."""

from deeploop.theory.bounds import (
    Bound,
    aligned_bound,
    exponent_threshold,
    kappa_bar,
    kappa_bar_range,
    module_bound,
    tied_bound,
    untied_bound,
)
from deeploop.theory.escape import critical_ramp, critical_sum, ramp_exponent, sum_exponent
from deeploop.theory.plan import Plan, plan_hierarchy, plan_single
from deeploop.theory.scaling import (
    DEEPLOOP,
    DEEPNORM,
    ScalingRule,
    averaged_epsilon,
    factored_epsilon,
    flat_alpha,
)
from deeploop.theory.visits import (
    HORIZONS,
    Horizon,
    Schedule,
    Visit,
    hierarchy,
    shared_hierarchy,
    single_loop,
)

__all__ = [
    "DEEPLOOP",
    "DEEPNORM",
    "HORIZONS",
    "Bound",
    "Horizon",
    "Plan",
    "ScalingRule",
    "Schedule",
    "Visit",
    "aligned_bound",
    "averaged_epsilon",
    "critical_ramp",
    "critical_sum",
    "exponent_threshold",
    "factored_epsilon",
    "flat_alpha",
    "hierarchy",
    "kappa_bar",
    "kappa_bar_range",
    "module_bound",
    "plan_hierarchy",
    "plan_single",
    "ramp_exponent",
    "shared_hierarchy",
    "single_loop",
    "sum_exponent",
    "tied_bound",
    "untied_bound",
]
