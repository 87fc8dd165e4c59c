"""Output sensitivity: the linear maps U_{r,j} from a perturbation of sublayer j, read at visit r, to F.

Their operator norms come from iterated products with U and Uᵀ. ‖Σ_r U_r‖ has an iteration of its own: the
tied map reads one perturbation at every visit, and its norm is no sum of the parts. Iterations approach a
norm from below; the last relative change is reported.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deeploop.diagnose.visit_grads import Sublayer, flat, linearise, probing, unflat

ROUNDING = 1e-6
TIED = None  # in place of a visit's number: the perturbation is read at every visit


@dataclass(frozen=True)
class OperatorNorm:
    """A largest singular value, and how it was reached."""

    value: float
    iterations: int
    change: float  # relative, in the last iteration


@dataclass(frozen=True)
class Sensitivity:
    """‖U_r‖ of each visit, ‖Σ_r U_r‖, and the cosines between the visits' maps, (R, R)."""

    visits: tuple[OperatorNorm, ...]
    tied: OperatorNorm
    cosines: Tensor

    @property
    def change(self) -> float:
        """The worst of the last relative changes."""
        return max(norm.change for norm in (*self.visits, self.tied))


class OutputMap:
    """The linearised output as a function of one sublayer's parameters, at each visit by itself.

    `output` runs the model once. Uᵀw is a backward pass through the graph that is kept, and gives all visits
    at once. It is linear in w, so differentiating it by w gives its own transpose, U: the forward-mode
    product without forward mode, which torch makes several times slower and knows fewer operators of.
    """

    def __init__(self, sublayer: Sublayer, output: Callable[[], Tensor]) -> None:
        self._name = sublayer.name
        self.value, self._aliases = linearise([sublayer], output)
        self._w = torch.zeros_like(self.value, requires_grad=True)
        with probing():
            back = self._aliases.gradients(self.value, self._w, create_graph=True)
        self._rows = back[self._name]  # Uᵀw of each visit, at w = 0
        self.visits = len(self._rows)

    def transpose(self, cotangent: Tensor) -> Tensor:
        """U_rᵀ of an output-shaped cotangent, a row for each visit: (R, P)."""
        back = self._aliases.gradients(self.value, cotangent, keep=True)
        return torch.stack([*map(flat, back[self._name])])

    def push(self, tangent: Tensor, visit: int | None) -> Tensor:
        """U_r of a perturbation (P,) that is read at one visit only, or at all of them (TIED)."""
        reading = self._rows if visit is TIED else [self._rows[visit]]
        rows = [value for row in reading for value in row]
        pieces = unflat(tangent, reading[0]) * len(reading)
        linear = [(row, piece) for row, piece in zip(rows, pieces, strict=True) if row.requires_grad]
        if not linear:  # the output does not depend on this visit
            return torch.zeros_like(self.value)
        outs, tangents = zip(*linear, strict=True)
        (result,) = torch.autograd.grad(outs, self._w, tangents, retain_graph=True, materialize_grads=True)
        return result


def operator_norm(
    linear: OutputMap, visit: int | None, start: Tensor, *, iterations: int, tolerance: float
) -> OperatorNorm:
    """‖U_r‖, or ‖Σ U_r‖ for TIED, from `start` (P,).

    Golub-Kahan: power iteration that keeps what it has seen, as a small bidiagonal matrix whose largest
    singular value is the best one in the space spanned so far.
    """
    value, change, index = 0.0, 1.0, 0
    diagonal: list[float] = []
    above: list[float] = []
    v, b = start, float(start.norm())
    u = torch.zeros_like(linear.value)
    for index in range(1, iterations + 1):
        if b <= value * ROUNDING:  # nothing is left outside the space: the value is exact
            change = 0.0
            break
        v = v / b
        u = linear.push(v, visit) - b * u if diagonal else linear.push(v, visit)
        a = float(u.norm())
        above += [b] if diagonal else []
        diagonal += [a]
        before, value = value, _largest(diagonal, above)
        change = abs(value - before) / value if value else 0.0
        if a <= value * ROUNDING or change < tolerance or index == iterations:
            break
        u = u / a
        rows = linear.transpose(u)
        v = (rows.sum(0) if visit is TIED else rows[visit]) - a * v
        b = float(v.norm())
    return OperatorNorm(value, index, change)


def _largest(diagonal: list[float], above: list[float]) -> float:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if above:
        matrix += torch.diag(torch.tensor(above, dtype=torch.float64), 1)
    return float(torch.linalg.matrix_norm(matrix, 2))


def sensitivity(
    sublayer: Sublayer,
    output: Callable[[], Tensor],
    *,
    iterations: int = 20,
    tolerance: float = 1e-2,
    samples: int = 4,
    seed: int = 0,
) -> Sensitivity:
    """Norms and cosines of all visits of one sublayer.

    The cosines are those of the Hilbert-Schmidt product ⟨U_r, U_s⟩ = tr U_rᵀU_s, from `samples` random
    cotangents w: the mean of ⟨U_rᵀw, U_sᵀw⟩ is that trace, and one backward pass serves all pairs.
    """
    linear = OutputMap(sublayer, output)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    gram: Tensor = torch.zeros(linear.visits, linear.visits, dtype=torch.float64)
    for _ in range(max(1, samples)):
        w = torch.randn(linear.value.shape, generator=generator).to(linear.value)
        rows = linear.transpose(w)
        gram += (rows @ rows.T).double().cpu()
    # The rows are Uᵀ of something random: better starts than random perturbations.
    visits = tuple(
        operator_norm(linear, r, rows[r], iterations=iterations, tolerance=tolerance)
        for r in range(linear.visits)
    )
    tied = operator_norm(linear, TIED, rows.sum(0), iterations=iterations, tolerance=tolerance)
    return Sensitivity(visits, tied, cosines_of_gram(gram))


def cosines_of_gram(gram: Tensor) -> Tensor:
    """⟨a_r, a_s⟩ / ‖a_r‖‖a_s‖ from all inner products; 0 where a vector is 0."""
    lengths = gram.diagonal().clamp(min=0).sqrt()
    return gram / torch.outer(lengths, lengths).clamp(min=torch.finfo(gram.dtype).tiny)
