# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The step of AdamATan2 for one parameter, in one pass over memory; see `train/adam_atan2.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error

BLOCK, WARPS = 2048, 8


@triton.jit
def _arctangent(y, x):
    """atan2(y, x) of x ≥ 0, by Cephes' atanf: to the last digit or two of fp32."""
    a = tl.abs(y)
    steep = a > x
    # Of 0 and 0 it is 0; what is not finite stays so.
    t = tl.where(steep, x, a) / tl.where(steep, a, tl.where(x == 0, 1.0, x))
    large = t > 0.4142135623730950
    t = tl.where(large, (t - 1) / (t + 1), t)
    z = t * t
    p = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    angle = p * z * t + t + tl.where(large, 0.7853981633974483, 0.0)
    angle = tl.where(steep, 1.5707963267948966 - angle, angle)
    return tl.where(y < 0, -angle, angle)


@triton.jit(do_not_specialize=["decay", "rate", "root"])
def _step(
    P, G, M, V, AVERAGE, SKIP, DIVISOR, n, decay, rate, root, beta1, beta2, ema,
    BLOCK: tl.constexpr, GUARDED: tl.constexpr, SCALED: tl.constexpr, AVERAGED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    if GUARDED:
        live = i < tl.where(tl.load(SKIP) == 0, n, 0)
    g = tl.load(G + i, mask=live, other=0.0)
    if SCALED:
        g /= tl.load(DIVISOR)
    p = tl.load(P + i, mask=live, other=0.0)
    m = tl.load(M + i, mask=live, other=0.0)
    v = tl.load(V + i, mask=live, other=0.0)
    m += (1 - beta1) * (g - m)
    v = v * beta2 + (1 - beta2) * (g * g)
    p = p * decay - rate * _arctangent(m, tl.sqrt_rn(v) / root)
    tl.store(P + i, p, mask=live)
    tl.store(M + i, m, mask=live)
    tl.store(V + i, v, mask=live)
    if AVERAGED:
        average = tl.load(AVERAGE + i, mask=live, other=0.0)
        tl.store(AVERAGE + i, average + (1 - ema) * (p - average), mask=live)


def adam_atan2_(
    values: Sequence[Tensor], gradient: Tensor, *, decay: float, rate: float, root: float,
    betas: tuple[float, float], ema: float, skip: Tensor | None, divisor: Tensor | None,
) -> None:  # fmt: skip
    """Update p, m, v and the average, if there is one: p ← p·decay − rate·atan2(m, √v / root).

    Nothing is written if `skip` is not 0. The gradient is divided by `divisor`.
    """
    p, m, v, *average = values
    n = p.numel()
    _step[(triton.cdiv(n, BLOCK),)](
        p, gradient, m, v, average[0] if average else None, skip, divisor, n, decay, rate, root, *betas, ema,
        BLOCK=BLOCK, GUARDED=skip is not None, SCALED=divisor is not None, AVERAGED=bool(average),
        num_warps=WARPS,
    )  # fmt: skip


def fits(p: Tensor, gradient: Tensor) -> bool:
    """Return True if the kernel supports a parameter: unsharded, fp32, contiguous as its gradient is."""
    plain = type(p) in (Tensor, torch.nn.Parameter) and p.dtype == gradient.dtype == torch.float32
    return plain and p.is_contiguous() and gradient.is_contiguous()
