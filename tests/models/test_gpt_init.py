"""Initialisation of LoopedGPT: total, repeatable, the stated standard deviations, β where it belongs."""

import math
from dataclasses import replace

import pytest
import torch

from deeploop.models import GPTConfig, LoopedGPT

CONFIG = GPTConfig(blocks=4, rounds=2, width=64, heads=2, hidden=160, vocabulary=300, context=8)
BRANCH = {"v", "o", "gate", "up", "down"}
MATRICES = {"q", "k"} | BRANCH


def matrices(model):
    """role → all matrices of that role; gains are left out."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            found.setdefault(name.split(".")[-2], []).append(parameter.detach())
    return found


@pytest.mark.parametrize("kind", ["prenorm", "postnorm", "deeploop", "factored", "flat"])
def test_init_is_total(kind):
    model = LoopedGPT(replace(CONFIG, rule=kind), seed=3)
    fresh = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(math.nan)
    model.init_weights(3)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, fresh[name]), name
        assert tensor.isfinite().all(), name


def test_init_is_repeatable_and_depends_on_the_seed():
    torch.manual_seed(0)
    first = LoopedGPT(CONFIG, seed=1)
    torch.manual_seed(99)  # the global generator has no part in it
    second, other = LoopedGPT(CONFIG, seed=1), LoopedGPT(CONFIG, seed=2)
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name


def test_no_two_matrices_share_a_draw():
    model = LoopedGPT(CONFIG)
    corners = [m[0, 0].item() for group in matrices(model).values() for m in group]
    assert len(set(corners)) == len(corners) == 4 * 7 + 1


def test_a_meta_model_gets_its_weights_and_tables_from_init_weights():
    with torch.device("meta"):
        model = LoopedGPT(CONFIG)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights(4)
    expected = LoopedGPT(CONFIG, seed=4)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).states, expected(tokens).states)


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({"rule": "prenorm"}, dict.fromkeys(("o", "down"), 1 / 2)),  # √K = 2
        ({"rule": "postnorm"}, dict.fromkeys(("o", "down"), 1 / 2)),
        ({"rule": "prenorm:shrink=off"}, {}),
        ({"rule": "averaged"}, {}),
        ({"rule": "factored"}, {}),
        ({}, dict.fromkeys(BRANCH, 1 / 8)),  # β = (8·8)^-½
        ({"rule": "deeploop:gate=off"}, dict.fromkeys(BRANCH - {"gate"}, 1 / 8)),
        ({"rule": "deeploop:shrink=on"}, dict.fromkeys(BRANCH, 1 / 8) | dict.fromkeys(("o", "down"), 1 / 16)),
        ({"rule": "deepnorm"}, dict.fromkeys(BRANCH, 8**-0.5)),
        ({"rule": "flat"}, {}),
        ({"rule": "deeploop:beta=off"}, {}),
        ({"rule": "deeploop:alpha=flat"}, dict.fromkeys(BRANCH, 1 / 8)),
    ],
)
def test_standard_deviations(fields, scales):
    """N(0, 0.02²) for the embedding, N(0, (0.5/√width)²) times the stated scale for the matrices."""
    model = LoopedGPT(replace(CONFIG, **fields))
    found = matrices(model)
    assert set(found) == MATRICES | {"embedding"}
    for role, group in found.items():
        expected = 0.02 if role == "embedding" else 0.5 / 8 * scales.get(role, 1.0)
        values = torch.cat([m.flatten() for m in group])
        assert values.std().item() == pytest.approx(expected, rel=0.03), (
            role
        )  # ≥ 16,384 draws: σ of the std 0.6 %
        assert abs(values.mean().item()) < 0.05 * expected, role


def test_beta_is_in_exactly_the_value_output_and_feed_forward_matrices():
    """Same seed, another β: the same underlying numbers, scaled in the branch matrices alone."""
    small, large = LoopedGPT(CONFIG), LoopedGPT(replace(CONFIG, rounds=8))
    for role, group in matrices(small).items():
        ratio = 1 / 2 if role in BRANCH else 1.0  # β ∝ R^-½
        for a, b in zip(group, matrices(large)[role], strict=True):
            torch.testing.assert_close(b, ratio * a)


def test_gains_start_at_one():
    gains = [p for p in LoopedGPT(CONFIG).parameters() if p.ndim == 1]
    assert len(gains) == 4 * 6 + 2
    assert all(torch.equal(gain, torch.ones_like(gain)) for gain in gains)


def test_the_first_state_has_rms_0_988():
    """Embeddings of std 0.02 under a norm with ε = 1e-5: √(4e-4 / 4.1e-4), as docs/paper.md says."""
    config = replace(CONFIG, width=768, heads=12)
    model = LoopedGPT(config)
    with torch.no_grad():
        x = model.input_norm(model.embedding(torch.arange(300)))
    assert x.square().mean().sqrt().item() == pytest.approx(math.sqrt(4e-4 / 4.1e-4), abs=1e-3)
    assert math.sqrt(4e-4 / 4.1e-4) == pytest.approx(0.988, abs=5e-4)
