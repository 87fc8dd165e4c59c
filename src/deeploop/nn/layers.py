"""The layers of a block: RMSNorm, rotary embedding, self-attention (plain, or causal with QK-norm), SwiGLU.

No layer has a bias unless it is asked for. Shapes: B sequences, T positions, H heads, D numbers a head.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config.kinds import AttentionBias, QKNorm
from deeploop.nn.cache import Cache, EngineAttention
from deeploop.nn.documents import Documents, document_attention
from deeploop.nn.written import as_written

Rotary = tuple[Tensor, Tensor]  # cos and sin, (T, D/2) each; or (B, 1, T, D/2) where sequences differ


@as_written
class RMSNorm(nn.Module):
    """x / RMS(x) · gain over the last dimension, computed in fp32 or wider, returned in x's dtype.

    With gain=False there is no parameter, and the gain is 1.
    """

    weight: nn.Parameter | None

    def __init__(self, width: int, eps: float = 1e-5, *, gain: bool = True) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.register_parameter("weight", nn.Parameter(torch.ones(width)) if gain else None)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.dtype == wide and (self.weight is None or self.weight.dtype == wide):
            return F.rms_norm(x, (self.width,), self.weight, self.eps)  # casts are not free, on a CPU
        gain = None if self.weight is None else self.weight.to(wide)
        return F.rms_norm(x.to(wide), (self.width,), gain, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}" + (", gain=False" if self.weight is None else "")


def rotary_table(
    context: int, head_size: int, base: float = 10000.0, scaling: Sequence[float] = ()
) -> Rotary:
    """cos and sin of position · base^(-2i/D) for i < D/2, on the CPU, shape (context, D/2).

    The angles are computed in float64: in float32, late positions are off by 1e-4. `scaling` is a
    factor by which positions are divided (linear), or Llama 3's four numbers (`_llama3_frequencies`).
    """
    if head_size % 2:
        raise ValueError(f"head_size={head_size}: must be even, rotary turns pairs")
    exponent = torch.arange(0, head_size, 2, dtype=torch.float64, device="cpu") / head_size
    position = torch.arange(context, dtype=torch.float64, device="cpu")
    frequency = base**-exponent
    if len(scaling) == 1:
        frequency = frequency / scaling[0]
    elif scaling:
        frequency = _llama3_frequencies(frequency, *scaling)
    angle = torch.outer(position, frequency)
    return angle.cos().float(), angle.sin().float()


def _llama3_frequencies(frequency: Tensor, factor: float, low: float, high: float, original: float) -> Tensor:
    """Llama 3's scaling: wavelengths above original/low are stretched by the factor, those below
    original/high are kept, and those between are blended.
    """
    wavelength = 2 * math.pi / frequency
    kept = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * frequency / factor


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of x (..., T, D) by the angles of their positions (half-split)."""
    cos, sin = rotary
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@as_written
class SelfAttention(nn.Module):
    """Multi-head attention in which every position sees all; queries and keys are rotated.

    q, k, v and o are separate matrices because the residual rule scales v and o alone. With fewer `kv_heads`
    than heads, consecutive queries share keys and values (grouped-query attention).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        bias: AttentionBias = "none",
    ) -> None:
        super().__init__()
        if head_size is None and width % heads:
            raise ValueError(f"heads={heads}: must divide width={width}")
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_size = width // heads if head_size is None else head_size
        self.is_grouped = kv_heads != heads
        own, shared = heads * self.head_size, kv_heads * self.head_size
        self.q = nn.Linear(width, own, bias=bias != "none")
        self.k = nn.Linear(width, shared, bias=bias != "none")
        self.v = nn.Linear(width, shared, bias=bias != "none")
        self.o = nn.Linear(own, width, bias=bias == "qkvo")

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q, k = (apply_rotary(self._heads(project(x)), rotary) for project in (self.q, self.k))
        return self._merge(F.scaled_dot_product_attention(q, k, self._heads(self.v(x))))

    def _heads(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], -1, self.head_size).transpose(1, 2)  # (B, T, H·D) → (B, H, T, D)

    def _merge(self, y: Tensor) -> Tensor:
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


@as_written
class CausalSelfAttention(SelfAttention):
    """Causal multi-head attention; queries and keys are rotated, then normalised by head.

    `qk_norm` can put the normalisation before the rotation, or remove it.

    A cache holds keys and values as `scaled_dot_product_attention` receives them.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        bias: AttentionBias = "none",
        qk_norm: QKNorm = "after-rotary",
        eps: float = 1e-5,
    ) -> None:
        super().__init__(width, heads, kv_heads=kv_heads, head_size=head_size, bias=bias)
        self.qk_norm = qk_norm
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_size, eps) if qk_norm != "none" else nn.Identity() for _ in range(2)
        )

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        mask: Tensor | Documents | None = None,
        cache: Cache | None = None,
        slot: int = 0,
    ) -> Tensor:
        """`mask` is True for the keys that a query sees; without one attention is causal.

        With a cache that is not empty, more than one query needs a mask (`causal_mask`).
        """
        q = self._rotated(self.q(x), self.q_norm, rotary)
        k = self._rotated(self.k(x), self.k_norm, rotary)
        v = self._heads(self.v(x))
        if isinstance(cache, EngineAttention):
            return self._merge(cache.attend(q, k, v, slot))
        if cache is not None:
            k, v = cache.update(k, v, slot)
        if isinstance(mask, Documents):
            return self._merge(document_attention(q, k, v, mask))
        # A single query is the newest position and sees every key.
        causal = mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.is_grouped
        )
        return self._merge(y)

    def _rotated(self, y: Tensor, norm: nn.Module, rotary: Rotary) -> Tensor:
        if self.qk_norm == "before-rotary":
            return apply_rotary(norm(self._heads(y)), rotary)
        rotated: Tensor = norm(apply_rotary(self._heads(y), rotary))
        return rotated


@as_written
class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y
