"""Audit a looped model: is α right for its depth, are its matrices drawn with β?

Public code has shipped an α for another depth. Each function returns findings; `problems` keeps those that
are wrong.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deeploop.accelerate.install import eager_modules
from deeploop.nn.residual import ScaledResidual
from deeploop.theory import ScalingRule


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    expected: str
    found: str
    right: bool

    def __str__(self) -> str:
        mark = "ok   " if self.right else "WRONG"
        return f"{mark} {self.what}: {self.found}" + ("" if self.right else f", must be {self.expected}")


def problems(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if not finding.right]


def count_visits(modules: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, int]:
    """Count the calls of each module while `run` calls the model once."""
    visits: Counter[str] = Counter()
    with ExitStack() as stack, torch.no_grad(), eager_modules():
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(lambda *_, name=name: visits.update([name]))
            stack.callback(hook.remove)
        run()
    return {name: visits[name] for name in modules}


def audit_alpha(
    model: nn.Module,
    rule: ScalingRule | Callable[[int, int], float],
    run: Callable[[], object],
    *,
    within: str = "",
) -> list[Finding]:
    """Compare α of every residual with the rule at the actual depth, which is found by counting visits.

    `rule` is the paper's, a function of N, half the number of residual visits; or a function of K and R such
    as `flat_alpha`: half the number of residual sublayers, and the visits to each. `within` selects residuals
    by the prefix of their name.
    """
    residuals = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ScaledResidual) and name.startswith(within)
    }
    visits = count_visits(residuals, run)
    M, K = sum(visits.values()), max(1, len(residuals) // 2)
    findings = []
    for name, module in residuals.items():
        if isinstance(rule, ScalingRule):
            alpha = rule.alpha(max(1, M // 2))
            formula = f"({float(rule.c):g}·{M // 2})^{float(rule.p):g}"
        else:
            R = max(1, visits[name])
            alpha, formula = rule(K, R), f"that of K = {K}, R = {R}"
        right = math.isclose(module.alpha, alpha, rel_tol=1e-6)
        what = f"α of {name} ({visits[name]} visits)"
        findings.append(Finding(what, f"{alpha:.6g}, which is {formula}", f"{module.alpha:.6g}", right))
    return findings


def audit_beta(matrices: Mapping[str, tuple[Tensor, float]]) -> list[Finding]:
    """Compare the standard deviation of each newly drawn matrix with the expected one.

    n draws estimate it with a relative error of 1/√(2n); five times that is allowed.
    """
    findings = []
    for name, (matrix, std) in matrices.items():
        measured = float(matrix.detach().double().std())
        room = 5 * std / math.sqrt(2 * matrix.numel())
        right = abs(measured - std) <= room
        findings.append(Finding(f"std of {name}", f"{std:.4g} ± {room:.1g}", f"{measured:.4g}", right))
    return findings
