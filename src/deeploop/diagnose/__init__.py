"""Measurements on looped models: alignment, updates, collapse.

`measure` and `kappa` give the alignment κ_R of any looped module; `audit_alpha` and `audit_beta` check a
model of your own; `token_similarity`, `unigram_floor` and `judge` detect a collapse.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

# By module: `exponent` works without torch, so the others are imported on first access.
_PUBLIC = {
    "alignment": ("Alignment", "kappa", "measure"),
    "audit": ("Finding", "audit_alpha", "audit_beta"),
    "collapse": ("judge", "token_similarity", "unigram_floor"),
    "exponent": ("GammaFit", "Point", "fit_gamma"),
    "perturbation": ("AdamState", "StepEffect", "step_effect"),
    "stream": ("BranchVisits", "branch_visits"),
    "visit_grads": ("Sublayer", "residual_sublayers", "visit_gradients"),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'deeploop.diagnose' has no attribute {name!r}")
    return getattr(_import_module(f"deeploop.diagnose.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
