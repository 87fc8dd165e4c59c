"""The residual equations, here and nowhere else.

prenorm     x ← x + f(inner(x))
postnorm    x ← outer(x + f(x))
sandwich    x ← outer(α·x + f(inner(x)))      the paper's Eq. (deeploop-block)
sandwich without inner norm: x ← outer(α·x + f(x)), DeepNorm's original form
factored    x ← x + ε·f(inner(x)), ε = λ/(R·√K)     looped depth by arXiv 2606.18524, in its own words
averaged    x ← x + ε·f(inner(x)), ε = 1/N          N = K·R: the branches' mean over depth

The last two are pre-norm at standard initialisation with the whole scale in ε, which is why the output
projections are not divided by √K on top of it, as those of plain pre-norm are.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import Tensor, nn

from deeploop.nn.layers import RMSNorm

ResidualKind = Literal["prenorm", "postnorm", "sandwich", "factored", "averaged"]
PRENORM = ("prenorm", "factored", "averaged")  # without an outer norm
EPSILON = ("factored", "averaged")


class ScaledResidual(nn.Module):
    """A residual around any `branch` that maps (..., width) to (..., width).

    `alpha` and `epsilon` are read at every visit, so they may be changed for another depth at test time
    (`deeploop.theory` has both by K and R). β is no part of the forward pass: it is drawn into the branch's
    matrices (`init_residual_branch_`).
    """

    def __init__(
        self,
        branch: nn.Module,
        width: int,
        *,
        kind: ResidualKind = "sandwich",
        alpha: float = 1.0,
        epsilon: float = 1.0,
        inner_norm: bool = True,
        norm: Callable[[int], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        if kind not in get_args(ResidualKind):
            raise ValueError(f"kind={kind!r}: must be one of {', '.join(get_args(ResidualKind))}")
        for name, scale in (("alpha", alpha), ("epsilon", epsilon)):
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{name}={scale}: must be a positive number")
        if kind != "sandwich" and alpha != 1:
            raise ValueError(
                f"alpha={alpha}: must be 1 with kind={kind!r}, only the sandwich scales its skip"
            )
        if kind not in EPSILON and epsilon != 1:
            raise ValueError(f"epsilon={epsilon}: must be 1 with kind={kind!r}, which has none")
        if kind in PRENORM and not inner_norm:
            raise ValueError(f"inner_norm=False: must be True with kind={kind!r}, it has no other norm")
        self.alpha, self.epsilon = float(alpha), float(epsilon)
        self.inner = norm(width) if inner_norm and kind != "postnorm" else nn.Identity()
        self.branch = branch
        self.outer = norm(width) if kind not in PRENORM else nn.Identity()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        skip = self.alpha * x
        f = self.branch(self.inner(x), *args, **kwargs)
        y: Tensor = self.outer(skip + f if self.epsilon == 1 else skip + self.epsilon * f)
        return y

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:.6g}" + (f", epsilon={self.epsilon:.6g}" if self.epsilon != 1 else "")
