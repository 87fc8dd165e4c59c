"""Measure everything about a looped model: the record that `deeploop diagnose` and training share.

record = examine(model, tokens, targets, state=AdamState(…))
record["kappa"], record["sublayers"]["blocks.0.mlp"]["update_cosines"], …
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from deeploop.diagnose.alignment import Alignment, adam_updates, constants, kappa, kappas, summarise
from deeploop.diagnose.collapse import token_similarity
from deeploop.diagnose.perturbation import AdamState, step_effect
from deeploop.diagnose.sensitivity import sensitivity
from deeploop.diagnose.stream import branch_visits
from deeploop.diagnose.visit_grads import Sublayer, probing, residual_sublayers, visit_gradients
from deeploop.models.gpt import LoopedGPT
from deeploop.theory import single_loop, tied_bound


@dataclass(frozen=True)
class Effort:
    """Effort of the measurement; with the defaults, norms converge to about one percent."""

    iterations: int = 20
    tolerance: float = 1e-2
    samples: int = 4


def scaled_sublayers(model: LoopedGPT) -> list[Sublayer]:
    """The residual sublayers of the loop, without the gate projection if it is not drawn with β.

    Prelude and coda are visited once, so they have no alignment.
    """
    sublayers = residual_sublayers(model, model.config.init_rule.branch)
    return [sublayer for sublayer in sublayers if sublayer.name.startswith("blocks.")]


def pick_sublayers(model: LoopedGPT, names: Sequence[str] = ()) -> list[Sublayer]:
    """The sublayers with these names; by default, both of the first and last block."""
    sublayers = {sublayer.name: sublayer for sublayer in scaled_sublayers(model)}
    if not names:
        names = [*dict.fromkeys([*sublayers][:2] + [*sublayers][-2:])]
    if unknown := [name for name in names if name not in sublayers]:
        raise ValueError(f"sublayer {unknown[0]!r}: the model has {', '.join(sublayers)}")
    return [sublayers[name] for name in names]


def examine(
    model: LoopedGPT,
    tokens: Tensor,
    targets: Tensor,
    *,
    documents: Tensor | None = None,
    sublayers: Sequence[str] = (),
    state: AdamState | None = None,
    effort: Effort | None = None,
    progress: Callable[[str], object] = lambda name: None,
) -> dict[str, Any]:
    """Alignment, stream and last step of `model` on one probe of tokens (B, T), as plain values.

    Gradients go through all rounds, even if training truncates them. `kappa` is that of the effective updates
    if the optimizer's state is given, otherwise that of the raw gradients (`kappa_raw`). F is the output
    after the final norm. `documents` are the bounds of the probe's documents, if they are masked from each
    other.
    """
    effort = effort or Effort()

    def output() -> Tensor:
        states: Tensor = model(tokens, documents=documents).states
        return states

    def loss() -> Tensor:
        mean: Tensor = model(tokens, targets, documents=documents).loss / targets.numel()
        return mean

    with _evaluated(model):
        picked = pick_sublayers(model, sublayers)
        raw, effective = _align(picked, loss, output, state, effort, progress)
        alignments = effective or raw
        with torch.no_grad(), probing():
            similarity = token_similarity(output())
        record: dict[str, Any] = {
            "rounds": model.rounds,
            "tokens": tokens.numel(),
            "updates": "effective" if effective else "raw",
            "kappa": kappa(alignments),
            "kappa_raw": kappa(raw),
            "kappas": kappas(alignments),
            "similarity": similarity,
            "sublayers": {one.name: one.as_dict() for one in alignments},
            "raw": {one.name: {"update_norms": one.update_norms, "own_kappa": one.own_kappa} for one in raw},
            "stream": {v.name: _without_name(asdict(v)) for v in branch_visits(model, output)},
        }
        if state is not None:
            progress("step")
            effect = step_effect(scaled_sublayers(model), output, state)
            record["step_effect"] = asdict(effect) | bounds(model, alignments, state.lr, effect.output_norm)
    return record


def _align(
    sublayers: Sequence[Sublayer],
    loss: Callable[[], Tensor],
    output: Callable[[], Tensor],
    state: AdamState | None,
    effort: Effort,
    progress: Callable[[str], object],
) -> tuple[list[Alignment], list[Alignment]]:
    """Measure each sublayer by raw gradients and, with the optimizer's state, by effective updates."""
    precondition = None
    if state is not None:
        precondition = adam_updates(state.exp_avg_sq, step=state.step, beta2=state.betas[1], eps=state.eps)
    raw, effective = [], []
    for sublayer in sublayers:
        progress(sublayer.name)
        gradients = visit_gradients([sublayer], loss)[sublayer.name]
        reading = sensitivity(sublayer, output, **asdict(effort))
        raw.append(summarise(sublayer.name, gradients, reading))
        if precondition is not None:
            effective.append(summarise(sublayer.name, precondition(sublayer, gradients), reading))
    return raw, effective


@contextmanager
def _evaluated(model: LoopedGPT) -> Iterator[None]:
    """Put the model in eval mode, with gradients through all rounds; restore it afterwards."""
    was_training, backprop = model.training, model.backprop
    model.eval()
    model.backprop = None
    try:
        yield
    finally:
        model.train(was_training)
        model.backprop = backprop


def bounds(
    model: LoopedGPT, alignments: Sequence[Alignment], lr: float, output_norm: float
) -> dict[str, float | None]:
    """The paper's bound on ‖ΔF‖/‖F‖, with measured constants and without: M κ_R (β/α)².

    It is for the update η Σ G, without momentum and weight decay.
    """
    u, g = constants(alignments)
    schedule = single_loop(len(model.blocks), model.rounds)
    M, rule = schedule.M_g, model.config.residual.law
    measured = lr * M * kappa(alignments) * u * g / output_norm
    bare = tied_bound(schedule, rule, kappa(alignments)).value if rule else None
    return {"bound": measured, "bound_bare": bare}


def _without_name(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "name"}
