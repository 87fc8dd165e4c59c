"""Measure the visit alignment κ_R of Eq. (kappa-def).

κ_R = max_j ‖Σ_r U_{r,j}‖ ‖Σ_r G_{r,j}‖ / (R · u · g), where u = C_U β/α and g = C_G β/α are the largest
‖U_{r,j}‖ and ‖G_{r,j}‖ over all visits of all sublayers measured. It lies in [0, R].

    alignments = measure({"block": model.block}, rounds=6, loss=lambda: …, output=lambda: …)
    print(kappa(alignments))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.diagnose.sensitivity import Sensitivity, cosines_of_gram, sensitivity
from deeploop.diagnose.visit_grads import Sublayer, visit_gradients

Matrix = tuple[tuple[float, ...], ...]
Precondition = Callable[[Sublayer, Tensor], Tensor]
"""Maps raw visit gradients (R, P) of a sublayer to effective updates, linearly and equally for all visits."""


@dataclass(frozen=True)
class Alignment:
    """Alignment of one sublayer's visits: updates G in Frobenius norm, sensitivities U in operator norm."""

    name: str
    update_norms: tuple[float, ...]  # ‖G_r‖
    update_sum: float  # ‖Σ G_r‖
    update_cosines: Matrix
    sensitivity_norms: tuple[float, ...]  # ‖U_r‖
    sensitivity_sum: float  # ‖Σ U_r‖
    sensitivity_cosines: Matrix
    iterations: int  # largest number of iterations for a norm of U
    change: float  # largest relative change in a last iteration

    @property
    def rounds(self) -> int:
        return len(self.update_norms)

    @property
    def update_ratio(self) -> float:
        """‖Σ G_r‖ over the largest ‖G_r‖: R if all visits have the same update, 0 if they cancel."""
        return _ratio(self.update_sum, max(self.update_norms))

    @property
    def sensitivity_ratio(self) -> float:
        """‖Σ U_r‖ over the largest ‖U_r‖: R if all visits have the same sensitivity."""
        return _ratio(self.sensitivity_sum, max(self.sensitivity_norms))

    @property
    def own_kappa(self) -> float:
        """κ_R of this sublayer by its own largest visits. It needs no β/α, so pre-norm has one too."""
        return self.update_ratio * self.sensitivity_ratio / self.rounds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"own_kappa": self.own_kappa}


def measure(
    blocks: Sequence[Sublayer] | Mapping[str, nn.Module],
    *,
    loss: Callable[[], Tensor],
    output: Callable[[], Tensor],
    rounds: int | None = None,
    precondition: Precondition | None = None,
    iterations: int = 20,
    tolerance: float = 1e-2,
    samples: int = 4,
) -> list[Alignment]:
    """Alignment of each shared block, measured one at a time, so that memory does not grow with their number.

    `blocks` are modules by name (with all their matrices) or sublayers; `rounds` is the expected number of
    visits to each. `loss` and `output` run the model on the probe. `precondition` turns gradients into the
    updates of an optimizer (the paper's G); by default they are raw.
    """
    if isinstance(blocks, Mapping):
        blocks = [Sublayer.of(name, module) for name, module in blocks.items()]
    alignments = []
    for sublayer in blocks:
        updates = visit_gradients([sublayer], loss)[sublayer.name]
        if rounds is not None and len(updates) != rounds:
            raise ValueError(
                f"sublayer {sublayer.name!r}: {len(updates)} visits with gradients, not rounds={rounds}; "
                "is the loop cut short, or its blocks copied?"
            )
        if precondition is not None:
            updates = precondition(sublayer, updates)
        reading = sensitivity(sublayer, output, iterations=iterations, tolerance=tolerance, samples=samples)
        alignments.append(summarise(sublayer.name, updates, reading))
    return alignments


def summarise(name: str, updates: Tensor, reading: Sensitivity) -> Alignment:
    gram = (updates @ updates.T).double().cpu()
    norms = (*reading.visits, reading.tied)
    return Alignment(
        name=name,
        update_norms=tuple(updates.norm(dim=1).tolist()),
        update_sum=float(updates.sum(0).norm()),
        update_cosines=_matrix(cosines_of_gram(gram)),
        sensitivity_norms=tuple(norm.value for norm in reading.visits),
        sensitivity_sum=reading.tied.value,
        sensitivity_cosines=_matrix(reading.cosines),
        iterations=max(norm.iterations for norm in norms),
        change=reading.change,
    )


def kappas(alignments: Sequence[Alignment]) -> dict[str, float]:
    """Each sublayer's term of Eq. (kappa-def), with the constants of all sublayers."""
    if not alignments:
        raise ValueError("no sublayers: κ_R needs at least one")
    u, g = constants(alignments)
    return {
        one.name: _ratio(one.sensitivity_sum, u) * _ratio(one.update_sum, g) / one.rounds
        for one in alignments
    }


def constants(alignments: Sequence[Alignment]) -> tuple[float, float]:
    """C_U β/α and C_G β/α: the largest ‖U_{r,j}‖ and ‖G_{r,j}‖ over all visits and sublayers."""
    return (
        max(max(one.sensitivity_norms) for one in alignments),
        max(max(one.update_norms) for one in alignments),
    )


def kappa(alignments: Sequence[Alignment]) -> float:
    """κ_R: the largest of the sublayers' terms."""
    return max(kappas(alignments).values())


def adam_updates(
    second_moments: Mapping[str, Tensor], *, step: int, beta2: float, eps: float
) -> Precondition:
    """Adam's diagonal D = 1/(√v̂ + ε), shared by all visits and applied linearly to each visit's gradient.

    Moments per visit would not add up to the real step, and momentum can't be split by visit. The second
    moments are those after `step` steps, named by sublayer and parameter: "blocks.0.mlp.branch.up.weight".
    """

    def precondition(sublayer: Sublayer, gradients: Tensor) -> Tensor:
        names = [f"{sublayer.name}.{name}" for name in sublayer.parameters]
        missing = [name for name in names if name not in second_moments]
        if missing:
            raise ValueError(f"{missing[0]}: the optimizer's state has no second moment for it")
        v = torch.cat([second_moments[name].reshape(-1) for name in names]).to(gradients)
        return gradients / ((v / (1 - beta2**step)).sqrt() + eps)

    return precondition


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _matrix(values: Tensor) -> Matrix:
    return tuple(tuple(row) for row in values.tolist())
