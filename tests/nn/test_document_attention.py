"""The kernels of attention inside documents against the masked softmax in float64: forward, every gradient.

They run on a GPU; where Triton is installed without one, set TRITON_INTERPRET=1 to run them on the CPU.
"""

import pytest
import torch

from deeploop.nn.documents import Documents, document_bounds, document_mask, document_spans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.kernels
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no bf16 product
TOLERANCE = 2e-2 if DEVICE == "cuda" else 2e-5
B, H = 2, 2
TILE = 64 if DEVICE == "cuda" else 16  # a warp group's product has no fewer rows on a GPU


def cut_of(queries, keys, warps=4):
    from deeploop.nn.kernels.document_attention import Cut, Tiles

    return Cut(*[Tiles(queries, keys, 2, warps)] * 3)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def packed_heads(length, size, shared=H):
    """q, k, v as the chain of kernels has them: v is a view of the packed product."""
    q, k = (normal(B, length, n, size, seed=n + i) for i, n in enumerate((H, shared)))
    v = normal(B, length, 3, shared, size, seed=9)[:, :, 2]
    return [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]


def random_starts(length, share):
    starts = torch.rand(B, length, generator=torch.Generator().manual_seed(length)) < share
    starts[:, 0] = True
    return starts


def starts_at(length, *places):
    starts = torch.zeros(B, length, dtype=torch.bool)
    starts[0, [place for place in places if place < length]] = True
    starts[1, [place + 1 for place in places if place + 1 < length]] = True  # the other row: a token later
    return starts


def visible(starts):
    """Which keys each query sees, (B, 1, T, T)."""
    return document_mask(document_bounds(starts), starts.shape, 0, torch.float32).to(DEVICE)


def spans_of(starts):
    return document_spans(document_bounds(starts).to(DEVICE), starts.shape)


def exact_attention(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def assert_exact(inputs, starts, cut):
    from deeploop.nn.kernels.document_attention import CUTS, attend_documents, attend_forward

    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact, exact_lse = exact_attention(*wide, visible(starts))
    found = attend_documents(*inputs, spans_of(starts), cut)
    _, lse = attend_forward(*(x.detach() for x in inputs), spans_of(starts), cut or CUTS[inputs[0].shape[3]])
    weight = normal(*found.shape, seed=5)
    ours = torch.autograd.grad(found, inputs, weight)
    theirs = torch.autograd.grad(exact, wide, weight.double())
    for a, b in zip((found, lse, *ours), (exact, exact_lse, *theirs), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < TOLERANCE * b.abs().max().clamp(min=1)  # zero in documents of one token


def edges(length):
    """A document from every edge of a tile, from a token before and from a token after: some of one token."""
    return sorted({at + off for at in range(0, length, TILE) for off in (-1, 0, 1) if 0 <= at + off < length})


DOCUMENTS = {
    "one": lambda length: starts_at(length, 0),
    "two": lambda length: starts_at(length, 0, length // 3),
    "at every edge of a tile": lambda length: starts_at(length, *range(0, length, TILE)),
    "around every edge of a tile": lambda length: starts_at(length, *edges(length)),
    "of one token": lambda length: torch.ones(B, length, dtype=torch.bool),
    "long": lambda length: random_starts(length, 0.02),
    "short": lambda length: random_starts(length, 0.2),
}


# Lengths that fill the last tile and that do not; more queries than keys in a tile, as many, fewer.
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("length", [3 * TILE, 3 * TILE + 5])
@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (1, 2)], ids=["square", "wide", "tall"])
def test_is_the_masked_softmax(documents, length, tile):
    cut = cut_of(*(TILE * n for n in tile))
    assert_exact(packed_heads(length, 32), DOCUMENTS[documents](length), cut)


@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("size", [pytest.param(32, marks=pytest.mark.sample), 64, 128])
def test_is_the_masked_softmax_in_the_tiles_of_each_head_size(size, length):
    assert_exact(packed_heads(length, size), random_starts(length, 0.04), None)


@pytest.mark.parametrize("documents", ["one", "short"])
def test_grouped_queries_share_keys_and_values(documents):
    length = 2 * TILE + 5
    assert_exact(packed_heads(length, 32, shared=1), DOCUMENTS[documents](length), cut_of(TILE, TILE))


def test_grouped_queries_share_keys_and_values_in_the_tiles_of_their_head_size():
    assert_exact(packed_heads(150, 128, shared=1), random_starts(150, 0.04), None)


def test_memory_may_be_in_another_order():
    length = 2 * TILE + 5
    inputs = [x.detach().contiguous().requires_grad_() for x in packed_heads(length, 32)]
    assert_exact(inputs, random_starts(length, 0.05), cut_of(TILE, TILE))


def test_gradients_are_the_same_every_time_and_from_a_broadcast_one():
    from deeploop.nn.kernels.document_attention import attend_documents

    inputs, starts = packed_heads(3 * TILE, 32), random_starts(3 * TILE, 0.05)
    y = attend_documents(*inputs, spans_of(starts), cut_of(TILE, TILE))
    once = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(y, inputs, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_other_documents_and_other_rows_are_not_read():
    from deeploop.nn.kernels.document_attention import attend_documents

    length, at = 2 * TILE + 5, TILE + 3
    inputs, starts = packed_heads(length, 32), starts_at(length, 0, at)
    spans, cut = spans_of(starts), cut_of(TILE, TILE)
    expected = attend_documents(*inputs, spans, cut)
    with torch.no_grad():
        for x in inputs:
            x[0, :, at:] = 7.0
    changed = attend_documents(*inputs, spans, cut)
    assert torch.equal(changed[0, :, :at], expected[0, :, :at])
    assert torch.equal(changed[1], expected[1])
    assert not torch.equal(changed[0, :, at:], expected[0, :, at:])


@pytest.mark.gpu
def test_a_graph_is_replayed_on_other_documents():
    from deeploop.nn.kernels.document_attention import attend_documents

    length = 1000
    inputs, static = packed_heads(length, 128), spans_of(random_starts(length, 0.01))
    weight = normal(B, H, length, 128, seed=5)

    def step(spans):
        y = attend_documents(*inputs, spans)
        return y, *torch.autograd.grad(y, inputs, weight)

    step(static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for share in (0.002, 0.1):
        other = spans_of(random_starts(length, share))
        for to, new in zip(static, other, strict=True):
            to.copy_(new)
        graph.replay()
        for a, b in zip(captured, step(other), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("size", "hopper", "ours"), [(128, True, True), (128, False, False), (64, True, False)]
)
def test_the_kernels_are_taken_where_they_are_known_to_be_faster(monkeypatch, size, hopper, ours):
    from deeploop.nn.kernels import document_attention as kernels

    monkeypatch.setattr(kernels, "on_hopper", lambda x: hopper)
    monkeypatch.setattr(kernels, "attend_documents", lambda q, k, v, spans: spans)
    monkeypatch.setattr(kernels, "document_attention", lambda q, k, v, documents: documents)
    q, documents = torch.zeros(B, H, 4, size), Documents(torch.zeros(2), 4, "spans")
    assert kernels.attend_inside(q, q, q, documents) is ("spans" if ours else documents)
