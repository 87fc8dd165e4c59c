"""κ_g of a reasoner's modules (Section 4): Eq. (kappa-def) over a module's visits in the gradient.

record = examine_reasoner(model, Probe(tokens, labels, puzzle), horizon="last_cycle")
record["modules"]["L"]["kappa"], record["kappa_bar"], record["bound"]
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeploop.diagnose.alignment import Alignment, kappa, measure
from deeploop.diagnose.examine import Effort
from deeploop.diagnose.visit_grads import Sublayer, residual_sublayers
from deeploop.models.halting import act_loss
from deeploop.models.reasoner import Reasoner
from deeploop.theory import Horizon, Schedule, exponent_threshold, kappa_bar, module_bound


class Probe(NamedTuple):
    """Puzzles to measure on; the first segment of each is used."""

    tokens: Tensor  # (B, length)
    labels: Tensor  # (B, length)
    puzzle: Tensor  # (B, width), the learned embeddings


def pick_module_sublayers(model: Reasoner, names: Sequence[str] = ()) -> dict[str, list[Sublayer]]:
    """The sublayers with these names by module; by default, both of each module's first and last block."""
    sublayers = {sublayer.name: sublayer for sublayer in residual_sublayers(model)}
    if unknown := [name for name in names if name not in sublayers]:
        raise ValueError(f"sublayer {unknown[0]!r}: the model has {', '.join(sublayers)}")
    picked: dict[str, list[Sublayer]] = {}
    for module in model.config.schedule.modules:
        own = [name for name in sublayers if name.startswith(f"stacks.{module}.")]
        chosen = [name for name in own if name in names] if names else [*dict.fromkeys(own[:2] + own[-2:])]
        if not chosen:
            raise ValueError(f"sublayers: name at least one of module {module}, such as {own[0]}")
        picked[module] = [sublayers[name] for name in chosen]
    return picked


def examine_reasoner(
    model: Reasoner,
    probe: Probe,
    *,
    horizon: Horizon,
    sublayers: Sequence[str] = (),
    effort: Effort | None = None,
) -> dict[str, Any]:
    """κ_g of each module, κ̄_g and the per-module bound, with gradients as far back as `horizon`.

    F is z_H after the segment, which both heads read. Updates are raw gradients, as AdamATan2's step is not
    linear in a visit's gradient. α and β are those that the model was built with.
    """
    trained_depth = model.config.N
    with _measured_at(model, horizon):
        schedule = model.config.schedule
        alignments = {
            module: measure(
                own,
                rounds=schedule.R_g_of(module),
                loss=lambda: _loss(model, probe),
                output=lambda: _output(model, probe),
                **asdict(effort or Effort()),
            )
            for module, own in pick_module_sublayers(model, sublayers).items()
        }
    # An unconverged norm is slightly too small, so a ratio of norms may exceed R_g.
    kappas = {m: min(kappa(measured), float(schedule.R_g_of(m))) for m, measured in alignments.items()}
    return {
        "horizon": horizon,
        "modules": {m: _module(schedule, m, kappas[m], measured) for m, measured in alignments.items()},
        # As in the paper, a module with one visit in the graph is set to its bound 1.
        "kappa_bar": float(kappa_bar(schedule, {m: k for m, k in kappas.items() if schedule.R_g_of(m) > 1})),
        "bound": _bound(model, schedule, kappas, trained_depth),
        "exponent": max(asked_exponent(k, schedule.R_g_of(m)) for m, k in kappas.items()),
    }


def asked_exponent(kappa: float, rounds: int) -> float:
    """The exponent that one κ implies as growth from κ_1: p ≥ (1 + γ)/4, γ = log κ / log R_g."""
    if rounds == 1 or kappa <= 1:
        return exponent_threshold(0.0)
    return exponent_threshold(min(1.0, math.log(kappa) / math.log(rounds)))


def _module(schedule: Schedule, module: str, value: float, measured: Sequence[Alignment]) -> dict[str, Any]:
    R_g = schedule.R_g_of(module)
    return {
        "J": schedule.J_of(module),
        "R_g": R_g,
        "kappa": value,
        "exponent": asked_exponent(value, R_g),
        "sublayers": {one.name: one.as_dict() for one in measured},
    }


def _bound(model: Reasoner, schedule: Schedule, kappas: dict[str, float], depth: int) -> float | None:
    """Eq. (hrm-per-module-bound) up to its constant; None if a module has no exponent p."""
    laws = {module: model.config.rule_of(module).law for module in kappas}
    by_module = {module: law for module, law in laws.items() if law is not None}
    return module_bound(schedule, by_module, kappas, depth).value if len(by_module) == len(laws) else None


def _loss(model: Reasoner, probe: Probe) -> Tensor:
    segment = model(model.initial(len(probe.tokens)), probe.tokens, probe.puzzle)
    return act_loss(segment, probe.labels, None) / len(probe.tokens)


def _output(model: Reasoner, probe: Probe) -> Tensor:
    """z_H as the heads read it, inside the graph; the carry is detached."""
    read: list[Tensor] = []
    with model.head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])):
        model(model.initial(len(probe.tokens)), probe.tokens, probe.puzzle)
    return read[0]


@contextmanager
def _measured_at(model: Reasoner, horizon: Horizon) -> Iterator[None]:
    """Put the model in eval mode with another horizon, which does not change the forward values."""
    was_training, config, recompute = model.training, model.config, model.recompute
    model.eval()
    model.config, model.recompute = replace(config, horizon=horizon), "off"
    try:
        with torch.enable_grad():
            yield
    finally:
        model.train(was_training)
        model.config, model.recompute = config, recompute
