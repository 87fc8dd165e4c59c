"""The residual equations, here and nowhere else.

prenorm     x ← x + f(inner(x))
postnorm    x ← outer(x + f(x))
sandwich    x ← outer(α·x + f(inner(x)))      the paper's Eq. (deeploop-block)
sandwich without inner norm: x ← outer(α·x + f(x)), DeepNorm's original form
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import Tensor, nn

from deeploop.nn.layers import RMSNorm

ResidualKind = Literal["prenorm", "postnorm", "sandwich"]


class ScaledResidual(nn.Module):
    """A residual around any `branch` that maps (..., width) to (..., width).

    `alpha` is read at every visit, so it may be changed for another depth at test time. β is no part
    of the forward pass: it is drawn into the branch's matrices (`init_residual_branch_`).
    """

    def __init__(
        self,
        branch: nn.Module,
        width: int,
        *,
        kind: ResidualKind = "sandwich",
        alpha: float = 1.0,
        inner_norm: bool = True,
        norm: Callable[[int], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        if kind not in get_args(ResidualKind):
            raise ValueError(f"kind={kind!r}: must be one of {', '.join(get_args(ResidualKind))}")
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha={alpha}: must be a positive number")
        if kind != "sandwich" and alpha != 1:
            raise ValueError(
                f"alpha={alpha}: must be 1 with kind={kind!r}, only the sandwich scales its skip"
            )
        if kind == "prenorm" and not inner_norm:
            raise ValueError("inner_norm=False: must be True with kind='prenorm', it has no other norm")
        self.alpha = float(alpha)
        self.inner = norm(width) if inner_norm and kind != "postnorm" else nn.Identity()
        self.branch = branch
        self.outer = norm(width) if kind != "prenorm" else nn.Identity()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.outer(self.alpha * x + self.branch(self.inner(x), *args, **kwargs))
        return y

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:.6g}"
