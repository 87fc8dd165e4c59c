"""Output sensitivity: the linear maps U_{r,j} from a perturbation of sublayer j at visit r to F.

Their operator norms come from iterated products with U and Uᵀ. ‖Σ_r U_r‖ has its own iteration: the tied map
applies one perturbation at every visit, and its norm is not a sum of the parts. Iterations approach a norm
from below; the last relative change is reported.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deeploop.diagnose.visit_grads import Sublayer, linearise, probing

TINY = 1e-30


@dataclass(frozen=True)
class OperatorNorm:
    """A largest singular value, with the convergence of its iteration."""

    value: float
    iterations: int
    change: float  # relative, in the last iteration


@dataclass(frozen=True)
class Sensitivity:
    """‖U_r‖ of each visit, ‖Σ_r U_r‖, and the cosines (R, R) between the visits' maps."""

    visits: tuple[OperatorNorm, ...]
    tied: OperatorNorm
    cosines: Tensor

    @property
    def change(self) -> float:
        """The largest of the last relative changes."""
        return max(norm.change for norm in (*self.visits, self.tied))


class OutputMap:
    """The linearized output as a function of one sublayer's parameters, in R + 1 lanes.

    Lane r perturbs visit r only, the last lane all visits (the tied map). `output` runs the model once. Uᵀw
    is a backward pass through the retained graph. It is linear in w, so differentiating it by w gives its
    transpose U: a forward-mode product without forward mode, which is several times slower in torch. All
    lanes go through the graph together.
    """

    def __init__(self, sublayer: Sublayer, output: Callable[[], Tensor]) -> None:
        self._like = sublayer.values()
        self.value, aliases = linearise([sublayer], output)
        self._leaves = [leaf for visit in aliases.of[sublayer.name] for leaf in visit]
        self.visits = len(aliases.of[sublayer.name])
        self._w = torch.zeros_like(self.value, requires_grad=True)
        with probing():
            self._back = torch.autograd.grad(
                self.value, self._leaves, self._w, create_graph=True, materialize_grads=True
            )

    def rows(self, w: Tensor) -> Tensor:
        """U_rᵀ of S output-shaped cotangents for every visit: (S, R, P)."""
        back = torch.autograd.grad(
            self.value, self._leaves, w, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        parts = [
            w.new_zeros(len(w), leaf.numel()) if part is None else part.flatten(1)
            for part, leaf in zip(back, self._leaves, strict=True)
        ]
        return torch.cat(parts, dim=1).view(len(w), self.visits, -1)

    def transpose(self, w: Tensor) -> Tensor:
        """Uᵀ of each lane's own cotangent: (R + 1, …) → (R + 1, P)."""
        rows = self.rows(w)
        own = rows[:-1].diagonal(dim1=0, dim2=1).T
        return torch.cat([own, rows[-1:].sum(1)])

    def push(self, v: Tensor) -> Tensor:
        """U of each lane's own perturbation: (R + 1, P) → (R + 1, …)."""
        read = torch.zeros(len(v), self.visits, v.shape[1], dtype=v.dtype, device=v.device)
        read[:-1].diagonal(dim1=0, dim2=1).copy_(v[:-1].T)
        read[-1] = v[-1]
        pieces = torch.split(read, [value.numel() for value in self._like], dim=2)
        tangents = [
            piece[:, r].reshape(-1, *value.shape)
            for r in range(self.visits)
            for piece, value in zip(pieces, self._like, strict=True)
        ]
        # A visit that does not affect the output has a zero gradient without a graph.
        linear = [(b, t) for b, t in zip(self._back, tangents, strict=True) if b.requires_grad]
        outs, tangents = map(list, zip(*linear, strict=True))
        (pushed,) = torch.autograd.grad(outs, self._w, tangents, retain_graph=True, is_grads_batched=True)
        return pushed


def operator_norms(
    linear: OutputMap, start: Tensor, *, iterations: int, tolerance: float
) -> list[OperatorNorm]:
    """The operator norm of every lane's map, from initial perturbations (R + 1, P).

    Golub-Kahan bidiagonalization: a power iteration that keeps all previous directions as a small bidiagonal
    matrix (a on the diagonal, b above it), whose largest singular value is the best estimate in the space
    spanned so far.
    """
    a: list[Tensor] = []
    b: list[Tensor] = []
    value = torch.zeros(len(start), dtype=torch.float64)
    v, u = _unit(start)[0], torch.zeros_like(linear.value)
    for index in range(1, iterations + 1):
        pushed = linear.push(v)
        u, length = _unit(pushed - _each(b[-1], u) if b else pushed)
        a.append(length)
        before, value = value, _largest(a, b)
        change = (value - before).abs() / value.clamp(min=TINY)
        if float(change.max()) < tolerance or index == iterations:
            break
        v, length = _unit(linear.transpose(u) - _each(a[-1], v))
        b.append(length)
    return [OperatorNorm(float(norm), index, float(c)) for norm, c in zip(value, change, strict=True)]


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each lane normalized, and its norm."""
    lengths = x.flatten(1).norm(dim=1)
    return _each(1 / lengths.clamp(min=TINY), x), lengths


def _each(factors: Tensor, x: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (x.ndim - 1)) * x


def _largest(a: list[Tensor], b: list[Tensor]) -> Tensor:
    matrix = torch.diag_embed(torch.stack(a, dim=1).double().cpu())
    if b:
        matrix += torch.diag_embed(torch.stack(b, dim=1).double().cpu(), 1)
    norms: Tensor = torch.linalg.matrix_norm(matrix, 2)
    return norms


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

    The cosines are those of the Hilbert-Schmidt product ⟨U_r, U_s⟩ = tr U_rᵀU_s, estimated with `samples`
    random cotangents w: the mean of ⟨U_rᵀw, U_sᵀw⟩ is that trace, and one backward pass serves all pairs.
    """
    linear = OutputMap(sublayer, output)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    w = torch.randn(samples, *linear.value.shape, generator=generator).to(linear.value)
    rows = linear.rows(w)
    gram = torch.einsum("srp,stp->rt", rows, rows).double().cpu()
    # Uᵀ of a random vector is a better start than a random perturbation.
    start = torch.cat([rows[0], rows[:1].sum(1)])
    *visits, tied = operator_norms(linear, start, iterations=iterations, tolerance=tolerance)
    return Sensitivity(tuple(visits), tied, cosines_of_gram(gram))


def cosines_of_gram(gram: Tensor) -> Tensor:
    """⟨a_r, a_s⟩ / ‖a_r‖‖a_s‖ from all inner products; 0 if a vector is 0."""
    lengths = gram.diagonal().clamp(min=0).sqrt()
    return gram / torch.outer(lengths, lengths).clamp(min=torch.finfo(gram.dtype).tiny)
