"""Documents that share a sequence: bounds, positions, masks, and attention of variable length."""

from inspect import signature
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from deeploop.models import GPTConfig, LoopedGPT
from deeploop.models.adaptive import AdaptiveDepth, ExitRule
from deeploop.nn import documents
from deeploop.nn.documents import (
    causal_context,
    document_bounds,
    document_mask,
    document_positions,
    document_spans,
    documents_of,
)

END = 0
SHAPE = torch.Size([2, 9])
STARTS = torch.tensor([[0, 0, 0, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0, 1]]).bool()


def test_bounds_are_filled_up_with_empty_documents():
    assert document_bounds(STARTS[1:]).tolist() == [0, 8, 9]
    # Three documents in the first row, two in the second: eight fit, a power of two times two rows.
    assert document_bounds(STARTS).tolist() == [0, 3, 7, 9, 17, 18, 18, 18, 18]


def test_positions_start_anew_in_each_document():
    found = document_positions(document_bounds(STARTS), SHAPE)
    assert found.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 0]]


def test_spans_say_where_a_tokens_document_begins_and_ends_in_its_row():
    first, end = document_spans(document_bounds(STARTS), SHAPE)
    assert first.tolist() == [[0, 0, 0, 3, 3, 3, 3, 7, 7], [0, 0, 0, 0, 0, 0, 0, 0, 8]]
    assert end.tolist() == [[3, 3, 3, 7, 7, 7, 7, 9, 9], [8, 8, 8, 8, 8, 8, 8, 8, 9]]


def test_the_mask_shows_what_came_before_in_the_same_document():
    mask = document_mask(document_bounds(STARTS), SHAPE, 16, torch.bfloat16)
    assert mask.shape == (2, 1, 9, 9)
    assert [row.nonzero().flatten().tolist() for row in mask[0, 0]] == [
        [0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [7], [7, 8],
    ]  # fmt: skip


def test_the_context_of_the_same_attention_without_documents():
    whole = torch.ones(9, 9).tril().sum()
    assert causal_context(torch.zeros(2, 9, dtype=torch.bool)) == 9
    seen = document_mask(document_bounds(STARTS), SHAPE, 16, torch.bfloat16).sum() / len(STARTS)
    # Causal attention over T tokens has T (T + 1) / 2 pairs: (T + 1) / 2 for a token.
    assert (causal_context(STARTS) + 1) / (9 + 1) == pytest.approx(float(seen / whole))


def reference(q, k, v, bounds, bounds_k, longest, longest_k, *, window_size):
    """The result of a kernel of variable length, one document at a time."""
    assert bounds is bounds_k
    assert window_size == (-1, 0)
    assert longest == longest_k >= bounds.diff().max()
    parts = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        own = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        if stop > start:
            parts.append(F.scaled_dot_product_attention(*own, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def kernels(monkeypatch):
    """The path of a GPU with the kernel's equations in its place."""
    monkeypatch.setattr(documents, "varlen_attn", reference)
    monkeypatch.setattr(documents, "CAUSAL", {"window_size": (-1, 0)})
    monkeypatch.setattr(
        "deeploop.models.gpt.document_mask", lambda bounds, shape, *rest: documents_of(bounds, shape)
    )


def test_the_kernel_is_called_for_torch_as_it_is_installed():
    from torch.nn.attention.varlen import varlen_attn

    documents.load_kernel()
    assert documents.varlen_attn is varlen_attn
    assert documents.CAUSAL.keys() <= signature(varlen_attn).parameters.keys()
    assert documents.CAUSAL in ({"window_size": (-1, 0)}, {"is_causal": True})


PLAIN = {}
PARTS = {"prelude": 1, "coda": 1, "injection": "gated", "first_state": "noise", "rule": "flat"}


def build(rounds=3, dtype=torch.float32, **fields):
    """A tiny model whose weights were moved: fresh ones hide too much."""
    config = GPTConfig(
        blocks=2, rounds=rounds, width=32, heads=2, hidden=48, vocabulary=30, context=24, **fields
    )
    model = LoopedGPT(config, seed=1).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


def packed_texts():
    """Documents of several lengths, each after END, packed into two rows of 24; a row may cut one."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(1, 30, (n,), generator=generator) for n in (5, 1, 11, 9, 3, 14, 10)]
    flat = torch.cat([torch.cat([torch.tensor([END]), text]) for text in texts])[:49]
    return flat[:-1].view(2, 24), flat[1:].view(2, 24)


def apart(tokens):
    """Where each row's documents lie: (row, start, stop)."""
    for row, own in enumerate(tokens):
        edges = sorted({0, *(own == END).nonzero().flatten().tolist(), len(own)})
        yield from ((row, *edge) for edge in pairwise(edges))


@pytest.mark.parametrize("rounds", [1, 3, 7])
@pytest.mark.parametrize("fields", [PLAIN, PARTS], ids=["plain", "parts"])
def test_packed_is_unpacked(rounds, fields):
    model = build(rounds, **fields)
    tokens, targets = packed_texts()
    bounds = document_bounds(tokens == END)
    packed = model(tokens, targets, documents=bounds)
    logits = model.logits(packed.states)
    alone = torch.zeros(())
    for row, start, stop in apart(tokens):
        one = model(tokens[row : row + 1, start:stop], targets[row : row + 1, start:stop])
        assert (logits[row, start:stop] - model.logits(one.states)[0]).abs().max() < 1e-5
        alone = alone + one.loss
    together = torch.autograd.grad(packed.loss, tuple(model.parameters()))
    for a, b in zip(together, torch.autograd.grad(alone, tuple(model.parameters())), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
    # And it is not what the whole row says.
    assert (logits - model.logits(model(tokens).states)).abs().max() > 1e-2


@pytest.mark.parametrize("recompute", ["off", "round", "block"])
@pytest.mark.parametrize("fields", [PLAIN, PARTS, {"kv_heads": 1}], ids=["plain", "parts", "grouped"])
def test_kernels_of_variable_length_give_the_same(kernels, monkeypatch, fields, recompute):
    model = build(3, torch.float64, **fields)
    model.recompute = recompute
    tokens, targets = packed_texts()
    bounds = document_bounds(tokens == END)
    by_kernel = model(tokens, targets, documents=bounds).loss
    ours = torch.autograd.grad(by_kernel, tuple(model.parameters()))
    monkeypatch.undo()
    by_mask = model(tokens, targets, documents=bounds).loss
    exact = torch.autograd.grad(by_mask, tuple(model.parameters()))
    for a, b in zip((by_kernel, *ours), (by_mask, *exact), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_adaptive_depth_keeps_documents_apart_too():
    model, (tokens, targets) = build(), packed_texts()
    bounds = document_bounds(tokens == END)
    never_early = AdaptiveDepth(model, ExitRule(threshold=0.0))
    expected = model(tokens, targets, documents=bounds).loss
    torch.testing.assert_close(never_early(tokens, targets, documents=bounds).loss, expected)


def test_a_row_longer_than_the_context_is_refused():
    tokens = torch.ones(1, 25, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tokens of length 25: must be at most model\.context=24"):
        build()(tokens, documents=document_bounds(tokens == END))


@pytest.mark.gpu
@pytest.mark.parametrize("rounds", [1, 3, 7])
@torch.no_grad()
def test_on_a_gpu_packed_is_unpacked_within_the_error_of_bf16(rounds):
    model, (tokens, _) = build(rounds).cuda(), packed_texts()

    def logits(tokens, *, exact=False, **own):
        with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
            return model.logits(model(tokens.cuda(), **own).states.float())

    packed = logits(tokens, documents=document_bounds(tokens == END).cuda())
    apart_by, own_error = [], []
    for row, start, stop in apart(tokens):
        piece = tokens[row : row + 1, start:stop]
        alone = logits(piece)
        apart_by.append((packed[row, start:stop] - alone[0]).norm())
        own_error.append((alone - logits(piece, exact=True)).norm())
    assert torch.stack(apart_by).norm() <= torch.stack(own_error).norm()
