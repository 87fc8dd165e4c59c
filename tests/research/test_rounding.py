"""Rounded weights: the values that integers can have, one scale for each channel or group."""

import pytest
import torch

from deeploop.models import GPTConfig, LoopedGPT
from research.experiments.rounding import round_matrices_, round_to_nearest


def test_by_hand():
    weight = torch.tensor([[7.0, 3.4, -3.6, 0.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[7.0, 3.0, -4.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(round_to_nearest(weight, 4), expected)
    expected[0, 2] = -3.6  # the largest of its group
    torch.testing.assert_close(round_to_nearest(weight, 4, group=2)[0, 2:], expected[0, 2:])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 8, 32])
def test_errors_are_at_most_half_a_level(bits, group):
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = round_to_nearest(weight, bits, group)
    size = group or 32
    level = weight.unflatten(1, (-1, size)).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    integers = rounded.unflatten(1, (-1, size)) / level
    torch.testing.assert_close(integers, integers.round())
    assert ((rounded - weight).unflatten(1, (-1, size)).abs() <= level * 0.5000001).all()
    torch.testing.assert_close(round_to_nearest(rounded, bits, group), rounded)


def test_only_the_matrices_of_the_part_are_rounded():
    shape = {"blocks": 2, "width": 32, "heads": 2, "hidden": 64, "vocabulary": 70, "context": 16}
    model = LoopedGPT(GPTConfig(**shape), seed=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    round_matrices_(model.blocks, 4, 16)
    changed = {name for name, own in model.named_parameters() if not torch.equal(own, before[name])}
    assert changed == {name for name, own in before.items() if name.startswith("blocks") and own.ndim == 2}


def test_mistakes():
    with pytest.raises(ValueError, match="group=24: must divide the 32 inputs"):
        round_to_nearest(torch.ones(2, 32), 4, 24)
    with pytest.raises(ValueError, match="bits=1: must be at least 2"):
        round_to_nearest(torch.ones(2, 32), 1)
