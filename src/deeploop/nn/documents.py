"""Documents that share a sequence but are masked from each other: bounds, positions, mask, attention.

A batch (B, T) is read as one row of B·T tokens, and `bounds` (n + 1,), int32, says where documents begin in
it and where the last one ends: the `cu_seqlens` of variable-length attention. Its length is a power of two
times the rows, filled up with empty documents, so that batches have few shapes and a CUDA graph fits many.
"""

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

varlen_attn: Any = None  # torch's, once it is needed: its import takes two seconds
CAUSAL: dict[str, Any] = {}


class Spans(NamedTuple):
    """Begin and end of each token's document, counted in the row, (B, T) each; neither decreases."""

    first: Tensor
    end: Tensor


class Documents(NamedTuple):
    """Begin and end of documents for either kernel, and the largest length; used instead of a mask."""

    bounds: Tensor
    longest: int
    spans: Spans


def document_bounds(starts: Tensor) -> Tensor:
    """Compute the bounds of a batch from the beginnings of its documents, bool (B, T), on the CPU.

    Every row begins a document.
    """
    rows, total = len(starts), starts.numel()
    starts = starts.clone()
    starts[:, 0] = True
    begins = starts.flatten().nonzero().flatten()
    size = 2 * rows
    while size < len(begins):
        size *= 2
    bounds = torch.full((size + 1,), total, dtype=torch.int32)
    bounds[: len(begins)] = begins
    return bounds


def document_spans(bounds: Tensor, shape: torch.Size) -> Spans:
    """Compute begin and end of each token's document."""
    token = torch.arange(shape.numel(), dtype=bounds.dtype, device=bounds.device)
    document = _document(bounds, token)
    row = token - token % shape[1]
    return Spans(*((bounds[document + i] - row).view(shape) for i in (0, 1)))


def documents_of(bounds: Tensor, shape: torch.Size) -> Documents:
    return Documents(bounds, shape[1], document_spans(bounds, shape))


def document_positions(bounds: Tensor, shape: torch.Size) -> Tensor:
    """Compute each token's position in its document, (B, T)."""
    token = torch.arange(shape.numel(), dtype=bounds.dtype, device=bounds.device)
    return (token - bounds[_document(bounds, token)]).view(shape)


def causal_context(starts: Tensor) -> float:
    """Return the context at which whole windows would have as many token pairs as these documents.

    `starts` marks the beginnings of documents, bool (B, T), on the CPU; without any, the context is T.
    """
    positions = document_positions(document_bounds(starts), starts.shape)
    return 2 * float(positions.double().mean()) + 1


def document_mask(
    bounds: Tensor, shape: torch.Size, head_size: int, dtype: torch.dtype
) -> Tensor | Documents:
    """Build the mask that keeps documents apart in attention of this head size and dtype.

    In half precision on a GPU these are the bounds, for variable-length kernels; elsewhere bool (B, 1, T, T).
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if bounds.is_cuda and half and head_size % 8 == 0 and head_size <= 256:
        load_kernel()  # here, where nothing is compiled
        return documents_of(bounds, shape)
    token = torch.arange(shape.numel(), dtype=bounds.dtype, device=bounds.device)
    document = _document(bounds, token).view(shape)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Causal attention inside each document; q and the result (B, H, T, D), k and v with H heads or fewer."""
    if (shared := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    # Views where memory is in the order B, T, H, D, as heads of a product are.
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    bounds, longest, _ = documents
    if varlen_attn is None:
        load_kernel()
    y: Tensor = varlen_attn(*packed, bounds, bounds, longest, longest, **CAUSAL)
    return y.view(len(q), -1, *y.shape[1:]).transpose(1, 2)


def load_kernel() -> None:
    """Import torch's variable-length attention and its argument for causality."""
    global varlen_attn
    from torch.nn.attention import varlen

    varlen_attn = varlen.varlen_attn
    # Some versions say by a flag what others say by a window.
    windows = "window_size" in signature(varlen_attn).parameters
    CAUSAL.update({"window_size": (-1, 0)} if windows else {"is_causal": True})


def _document(bounds: Tensor, token: Tensor) -> Tensor:
    """The number of each token's document; empty ones have none."""
    return torch.searchsorted(bounds[1:].contiguous(), token, right=True)
