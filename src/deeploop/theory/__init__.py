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
from deeploop.theory.plan import plan_hierarchy, plan_single
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
    "ScalingRule",
    "Schedule",
    "Visit",
    "aligned_bound",
    "averaged_epsilon",
    "exponent_threshold",
    "factored_epsilon",
    "flat_alpha",
    "hierarchy",
    "kappa_bar",
    "kappa_bar_range",
    "module_bound",
    "plan_hierarchy",
    "plan_single",
    "shared_hierarchy",
    "single_loop",
    "tied_bound",
    "untied_bound",
]
