"""The residual equations against the paper's formulas, and what the module refuses."""

import pytest
import torch
from torch import nn

from deeploop.nn import RMSNorm, ScaledResidual, SwiGLU


def build(**options):
    torch.manual_seed(0)
    residual = ScaledResidual(SwiGLU(8, 12), 8, **options).double()
    for module in residual.modules():
        if isinstance(module, RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 2.0)
    return residual


def norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


@pytest.fixture
def x():
    return torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_sandwich_is_the_papers_equation(x):
    """x ← Norm(αx + f(Norm(x))), Eq. (deeploop-block)."""
    residual = build(alpha=3.7)
    f, gains = residual.branch, (residual.inner.weight, residual.outer.weight)
    assert not torch.equal(*gains)
    expected = norm(3.7 * x + f(norm(x, gains[0])), gains[1])
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


def test_sandwich_without_inner_norm_is_deepnorm(x):
    residual = build(alpha=3.7, inner_norm=False)
    expected = norm(3.7 * x + residual.branch(x), residual.outer.weight)
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


def test_prenorm(x):
    residual = build(kind="prenorm")
    expected = x + residual.branch(norm(x, residual.inner.weight))
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


def test_postnorm(x):
    residual = build(kind="postnorm")
    expected = norm(x + residual.branch(x), residual.outer.weight)
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["factored", "averaged"])
def test_prenorm_with_a_scaled_branch(kind, x):
    residual = build(kind=kind, epsilon=0.3)
    expected = x + 0.3 * residual.branch(norm(x, residual.inner.weight))
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)
    residual.epsilon = 1.0
    assert torch.equal(residual(x), build(kind="prenorm")(x))


def test_alpha_can_be_changed_afterwards(x):
    residual = build(alpha=3.7)
    residual.alpha = 5.0
    assert torch.equal(residual(x), build(alpha=5.0)(x))
    assert not torch.equal(residual(x), build(alpha=3.7)(x))


def test_the_branch_receives_further_arguments(x):
    class Shift(nn.Module):
        def forward(self, x, by, *, times):
            return 0 * x + by * times

    residual = ScaledResidual(Shift(), 8, kind="prenorm")
    torch.testing.assert_close(residual(x, 2.0, times=3), x + 6)


def test_another_norm_can_be_given(x):
    residual = ScaledResidual(
        nn.Linear(8, 8), 8, alpha=2.0, norm=lambda width: nn.LayerNorm(width, bias=False)
    )
    assert isinstance(residual.inner, nn.LayerNorm)
    assert residual.double()(x).mean(-1).abs().max() < 1e-7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "norm"}, "kind='norm': must be one of prenorm, postnorm, sandwich, factored, averaged"),
        ({"kind": "prenorm", "alpha": 2.0}, "alpha=2.0: must be 1 with kind='prenorm'"),
        ({"kind": "postnorm", "alpha": 0.5}, "alpha=0.5: must be 1 with kind='postnorm'"),
        ({"alpha": 0.0}, "alpha=0.0: must be a positive number"),
        ({"alpha": float("nan")}, "alpha=nan: must be a positive number"),
        ({"kind": "prenorm", "inner_norm": False}, "inner_norm=False: must be True with kind='prenorm'"),
        (
            {"kind": "averaged", "epsilon": 0.5, "inner_norm": False},
            "inner_norm=False: must be True with kind='averaged'",
        ),
        ({"kind": "averaged", "alpha": 2.0}, "alpha=2.0: must be 1 with kind='averaged'"),
        ({"alpha": 2.0, "epsilon": 0.5}, "epsilon=0.5: must be 1 with kind='sandwich'"),
        ({}, "alpha: must be given with kind='sandwich'; deeploop.theory has it by K and R"),
        ({"kind": "factored"}, "epsilon: must be given with kind='factored'"),
        ({"kind": "factored", "epsilon": -1.0}, "epsilon=-1.0: must be a positive number"),
    ],
)
def test_meaningless_combinations_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        ScaledResidual(nn.Identity(), 8, **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
