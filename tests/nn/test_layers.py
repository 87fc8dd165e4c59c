"""RMSNorm, rotary, attention and SwiGLU against independent references; the paper's RMSNorm lemmas."""

import itertools
import math

import pytest
import torch
from torch import nn

from deeploop.nn import CausalSelfAttention, RMSNorm, SwiGLU, apply_rotary, rotary_table


def rms(x):
    return x.square().mean(-1, keepdim=True).sqrt()


def unit_norm(width):
    """RMSNorm as the lemmas have it: no eps, gain 1, float64."""
    return RMSNorm(width, eps=0.0).double()


def rotate_by_complex(x):
    """Rotary by complex multiplication, an independent writing of the half-split form. x (B, H, T, D)."""
    T, D = x.shape[-2:]
    frequency = torch.tensor([10000 ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    rotated = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def random_attention(width=16, heads=2):
    torch.manual_seed(0)
    attention = CausalSelfAttention(width, heads).double()
    for norm in (attention.q_norm, attention.k_norm):
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    return attention


def attention_reference(attention, x, *, norm_first):
    """softmax(q kᵀ/√D) v with an explicit mask, in the two orders of rotary and QK-norm."""
    B, T, width = x.shape
    D = attention.head_size

    def heads(matrix):
        return (x @ matrix.weight.T).reshape(B, T, width // D, D).transpose(1, 2)

    def finish(y, gain):
        def normalise(z):
            return z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

        return rotate_by_complex(normalise(y)) if norm_first else normalise(rotate_by_complex(y))

    q = finish(heads(attention.q), attention.q_norm.weight)
    k = finish(heads(attention.k), attention.k_norm.weight)
    scores = q @ k.mT / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    y = scores.softmax(-1) @ heads(attention.v)
    return y.transpose(1, 2).reshape(B, T, width) @ attention.o.weight.T


def double_rotary(T, D):
    cos, sin = rotary_table(T, D)
    return cos.double(), sin.double()


def test_rmsnorm_divides_by_the_rms_and_multiplies_the_gain():
    torch.manual_seed(0)
    norm = RMSNorm(7).double()
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(3, 7, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=0)


def test_rmsnorm_computes_in_fp32_and_keeps_the_dtype():
    torch.manual_seed(0)
    x = (300 * torch.randn(4, 64)).bfloat16()
    norm = RMSNorm(64)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


@pytest.mark.parametrize("seed", range(3))
def test_lemma_branch_is_exposed_through_one_over_alpha(seed):
    """Lemma rmsnorm-local: R(αx+z) = x + (z − ⟨x,z⟩x)/α + O(1/α²)."""
    generator = torch.Generator().manual_seed(seed)
    x, z = torch.randn(2, 32, dtype=torch.float64, generator=generator)
    norm = unit_norm(32)
    x = norm(x)
    first_order = z - (x @ z / 32) * x

    def remainder(alpha):
        return (norm(alpha * x + z) - x - first_order / alpha).norm().item()

    remainders = [remainder(alpha) for alpha in (50.0, 100.0, 200.0, 400.0)]
    ratios = [a / b for a, b in itertools.pairwise(remainders)]
    assert ratios == pytest.approx([4.0, 4.0, 4.0], rel=0.05)  # α doubles: the remainder falls fourfold
    assert remainders[0] < 0.5 * (first_order / 50).norm()


def test_lemma_inner_norm_is_the_identity_on_a_unit_stream():
    """Lemma inner-norm (i)."""
    norm = unit_norm(32)
    x = norm(torch.randn(5, 32, dtype=torch.float64))
    torch.testing.assert_close(rms(x), torch.ones_like(rms(x)), rtol=1e-14, atol=0)
    torch.testing.assert_close(norm(x), x, rtol=1e-14, atol=0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 7.0])
def test_lemma_jacobian_is_a_projection_over_the_rms(scale):
    """Lemma inner-norm (ii): ∂R = (I − x̂x̂ᵀ)/RMS(x), of operator norm 1/RMS(x)."""
    torch.manual_seed(0)
    x = scale * torch.randn(12, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(unit_norm(12), x)
    unit = x / x.norm()
    expected = (torch.eye(12, dtype=torch.float64) - torch.outer(unit, unit)) / rms(x)
    torch.testing.assert_close(jacobian, expected, rtol=1e-12, atol=1e-14)
    assert torch.linalg.matrix_norm(jacobian, 2) == pytest.approx(1 / rms(x).item(), rel=1e-12)


def test_rotary_is_complex_multiplication_in_half_split_pairs():
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(apply_rotary(x, double_rotary(9, 8)), rotate_by_complex(x), rtol=0, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rotary = double_rotary(20, 8)
    q, k = (apply_rotary(y.expand(20, 8), rotary) for y in (q, k))
    assert (q[3] @ k[1]).item() == pytest.approx((q[17] @ k[15]).item(), abs=1e-6)
    assert (q[3] @ k[1]).item() != pytest.approx((q[3] @ k[2]).item(), abs=1e-3)


def test_rotary_rejects_an_odd_head():
    with pytest.raises(ValueError, match="head_size=7"):
        rotary_table(4, 7)


def test_attention_rotates_then_normalises():
    """The two orders agree while the gains are 1, so the gains are random here."""
    attention = random_attention()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    y = attention(x, double_rotary(6, 8))
    torch.testing.assert_close(y, attention_reference(attention, x, norm_first=False), rtol=0, atol=1e-6)
    assert not torch.allclose(y, attention_reference(attention, x, norm_first=True), rtol=0, atol=1e-3)


def test_attention_rejects_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="heads=3: must divide width=16"):
        CausalSelfAttention(16, 3)


def test_swiglu_is_its_formula():
    torch.manual_seed(0)
    mlp = SwiGLU(6, 10).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    expected = (gate / (1 + (-gate).exp()) * up) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=1e-10, atol=1e-12)
