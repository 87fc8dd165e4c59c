"""Documents that share a sequence and do not see each other: bounds, positions, mask, attention.

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
    """First token of each token's document and the one after its last, counted in the row, (B, T) each.

    Neither falls along a row.
    """

    first: Tensor
    end: Tensor


class Documents(NamedTuple):
    """In place of a mask: where documents begin and end, as either kernel reads it; their largest length."""

    bounds: Tensor
    longest: int
    spans: Spans


def document_bounds(starts: Tensor) -> Tensor:
    """The bounds of a batch from where its documents begin: bool (B, T), on the CPU.

    A row begins a document in any case: what came before it is not there to be seen.
    """
    rows, total = len(starts), starts.numel()
    starts = starts.clone()
    starts[:, 0] = True
    found = starts.flatten().nonzero().flatten()
    size = 2 * rows
    while size < len(found):
        size *= 2
    bounds = torch.full((size + 1,), total, dtype=torch.int32)
    bounds[: len(found)] = found
    return bounds


def document_spans(bounds: Tensor, shape: torch.Size) -> Spans:
    """Where each token's document begins and ends."""
    token = torch.arange(shape.numel(), dtype=bounds.dtype, device=bounds.device)
    document = _document(bounds, token)
    row = token - token % shape[1]
    return Spans(*((bounds[document + i] - row).view(shape) for i in (0, 1)))


def documents_of(bounds: Tensor, shape: torch.Size) -> Documents:
    return Documents(bounds, shape[1], document_spans(bounds, shape))


def document_positions(bounds: Tensor, shape: torch.Size) -> Tensor:
    """Where each token stands in its document, (B, T)."""
    token = torch.arange(shape.numel(), dtype=bounds.dtype, device=bounds.device)
    return (token - bounds[_document(bounds, token)]).view(shape)


def causal_context(starts: Tensor) -> float:
    """The context of whole windows in which a token sees as many others, on average, as in these documents.

    `starts` says where documents begin, bool (B, T), on the CPU; where none does, the context is T.
    """
    positions = document_positions(document_bounds(starts), starts.shape)
    return 2 * float(positions.double().mean()) + 1


def document_mask(
    bounds: Tensor, shape: torch.Size, head_size: int, dtype: torch.dtype
) -> Tensor | Documents:
    """Build the mask that keeps documents apart in attention of this head size and dtype.

    In half precision on a GPU the bounds themselves, for kernels of variable length; elsewhere which keys
    each query sees, bool (B, 1, T, T).
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
    """Imports torch's variable-length attention, and how it is asked to be causal."""
    global varlen_attn
    from torch.nn.attention import varlen

    varlen_attn = varlen.varlen_attn
    # Some versions say by a flag what others say by a window.
    windows = "window_size" in signature(varlen_attn).parameters
    CAUSAL.update({"window_size": (-1, 0)} if windows else {"is_causal": True})


def _document(bounds: Tensor, token: Tensor) -> Tensor:
    """The number of each token's document; empty ones have none."""
    return torch.searchsorted(bounds[1:].contiguous(), token, right=True)
