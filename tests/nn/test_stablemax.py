"""Stablemax cross-entropy against its formula, cell by cell."""

import math

import pytest
import torch

from deeploop.nn import stablemax_cross_entropy


def by_hand(logits, target):
    s = [x + 1 if x >= 0 else 1 / (1 - x) for x in logits]
    return -math.log(s[target] / sum(s))


def test_every_position_has_the_formulas_value():
    logits = torch.tensor([[[0.0, 2.5, -3.0], [-1.0, -1e4, 7.0]], [[1.0, 1.0, 1.0], [0.0, 0.0, -0.0]]])
    targets = torch.tensor([[2, 1], [0, 1]])
    found = stablemax_cross_entropy(logits, targets)
    assert found.dtype == torch.float64
    for row, own in zip(
        logits.flatten(0, 1).tolist(), zip(targets.flatten(), found.flatten(), strict=True), strict=True
    ):
        assert float(own[1]) == pytest.approx(by_hand(row, int(own[0])), rel=1e-12)


def test_a_negative_target_counts_nothing_and_moves_nothing():
    logits = torch.randn(3, 5, requires_grad=True)
    loss = stablemax_cross_entropy(logits, torch.tensor([1, -1, 4]))
    loss.sum().backward()
    assert loss[1] == 0
    assert logits.grad[1].abs().max() == 0
    assert logits.grad[0].abs().min() > 0


def test_the_gradient_is_finite_at_the_pole_of_the_other_branch_and_right():
    """1 / (1 − x) is infinite at x = 1, where x + 1 is the branch that counts."""
    logits = torch.tensor([[1.0, -2.0, 3.0, 0.5]], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: stablemax_cross_entropy(x, torch.tensor([1])), logits)
