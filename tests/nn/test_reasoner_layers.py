"""The parts of a reasoner's block: norm without gain, full attention, truncated initialization."""

import math

import torch

from deeploop.nn import RMSNorm, SelfAttention, apply_rotary, init_truncated_, rotary_table


def test_the_norm_without_gain_has_no_parameter_and_the_same_values():
    x = 3 * torch.randn(4, 16)
    bare = RMSNorm(16, gain=False)
    assert list(bare.parameters()) == []
    assert torch.equal(bare(x), RMSNorm(16)(x))


def test_attention_is_softmax_over_all_positions():
    torch.manual_seed(0)
    attention, x, rotary = SelfAttention(12, 3).double(), torch.randn(2, 5, 12).double(), rotary_table(5, 4)
    q, k, v = (
        project(x).view(2, 5, 3, 4).transpose(1, 2) for project in (attention.q, attention.k, attention.v)
    )
    q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
    mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
    expected = attention.o(mixed.transpose(1, 2).reshape(2, 5, 12))
    torch.testing.assert_close(attention(x, rotary), expected, rtol=1e-6, atol=1e-8)


def test_a_truncated_draw_has_the_std_asked_for_and_ends_at_two_sigma():
    draw = torch.empty(1000, 1000)
    init_truncated_([draw], std=0.5, beta=0.1, generator=torch.Generator().manual_seed(0))
    cut = 2 / math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
    assert abs(draw.std() / 0.05 - 1) < 0.005
    assert 0.999 < draw.abs().max() / (0.05 * cut) <= 1 + 1e-6


def test_beta_scales_the_same_numbers():
    plain, scaled = torch.empty(50, 50), torch.empty(50, 50)
    init_truncated_([plain], std=1.0, generator=torch.Generator().manual_seed(3))
    init_truncated_([scaled], std=1.0, beta=0.125, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(scaled, plain / 8)
