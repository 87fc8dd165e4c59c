"""The residual equations against the paper's formulas, and what the module refuses."""

import pytest
import torch
from torch import nn

from deeploop.nn import CausalSelfAttention, RMSNorm, ScaledResidual, SwiGLU


def build(**options):
    torch.manual_seed(0)
    residual = ScaledResidual(SwiGLU(8, 12), 8, **options).double()
    for module in residual.modules():
        if isinstance(module, RMSNorm) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 2.0)
    return residual


def norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


@pytest.fixture
def x():
    return torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_deeploop_is_the_papers_equation(x):
    """x ← Norm(αx + f(Norm(x))), Eq. (deeploop-block)."""
    residual = build(alpha=3.7)
    f, gains = residual.branch, (residual.inner.weight, residual.outer.weight)
    assert not torch.equal(*gains)
    expected = norm(3.7 * x + f(norm(x, gains[0])), gains[1])
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


def test_deeploop_without_inner_norm_is_deepnorm(x):
    residual = build(rule="deeploop:inner_norm=off", alpha=3.7)
    expected = norm(3.7 * x + residual.branch(x), residual.outer.weight)
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


def test_flat_is_its_equation_and_so_are_its_gradients(x):
    """x ← N(αx + f(N(x)·g)), N without a gain."""
    residual = build(rule="flat", alpha=3.7)
    assert [name for name, _ in residual.named_parameters() if "branch" not in name] == ["inner.weight"]
    x.requires_grad_()
    weights = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    expected = norm(3.7 * x + residual.branch(norm(x, residual.inner.weight)), 1.0)
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)
    inputs = [x, *residual.parameters()]
    ours, exact = (torch.autograd.grad((y * weights).sum(), inputs) for y in (residual(x), expected))
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)


def test_flat_is_deeploop_without_an_outer_gain(x):
    deeploop = build(rule="deeploop:outer_gain=off", alpha=3.7)
    assert deeploop.outer.weight is None
    assert torch.equal(deeploop(x), build(rule="flat", alpha=3.7)(x))


@pytest.mark.parametrize("visits", [1, 6, 40])
def test_an_outer_gain_acts_once_a_visit(visits):
    """∂ log(x_i/x_j) / ∂ log(g_i/g_j) = V in a stream without branches; an inner gain does nothing there."""
    residual = ScaledResidual(nn.Identity(), 8, alpha=6.0).double()
    residual.branch.forward = torch.zeros_like
    x = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    for _ in range(visits):
        x = residual(x)
    ratio = (x[0] / x[1]).log()
    gains = residual.outer.weight, residual.inner.weight
    outer, inner = torch.autograd.grad(ratio, gains, allow_unused=True, materialize_grads=True)
    # At gains of 1 a derivative by g is one by log g.
    expected = torch.tensor([visits, -visits, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(outer, expected, rtol=0, atol=1e-10)
    assert not inner.any()


def test_prenorm(x):
    residual = build(rule="prenorm")
    expected = x + residual.branch(norm(x, residual.inner.weight))
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


def test_postnorm(x):
    residual = build(rule="postnorm")
    expected = norm(x + residual.branch(x), residual.outer.weight)
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", ["factored", "averaged"])
def test_prenorm_with_a_scaled_branch(rule, x):
    residual = build(rule=rule, epsilon=0.3)
    expected = x + 0.3 * residual.branch(norm(x, residual.inner.weight))
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)
    residual.epsilon = 1.0
    assert torch.equal(residual(x), build(rule="prenorm")(x))


def test_alpha_can_be_changed_afterwards(x):
    residual = build(alpha=3.7)
    residual.alpha = 5.0
    assert torch.equal(residual(x), build(alpha=5.0)(x))
    assert not torch.equal(residual(x), build(alpha=3.7)(x))


def test_the_branch_receives_further_arguments(x):
    class Shift(nn.Module):
        def forward(self, x, by, *, times):
            return 0 * x + by * times

    residual = ScaledResidual(Shift(), 8, rule="prenorm")
    torch.testing.assert_close(residual(x, 2.0, times=3), x + 6)


def test_another_norm_can_be_given(x):
    residual = ScaledResidual(
        nn.Linear(8, 8), 8, alpha=2.0, norm=lambda width: nn.LayerNorm(width, bias=False)
    )
    assert isinstance(residual.inner, nn.LayerNorm)
    assert residual.double()(x).mean(-1).abs().max() < 1e-7


def test_a_norm_of_transformers_loses_its_outer_gain_too(x):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    def of_llama(width):
        return llama.LlamaRMSNorm(width, eps=1e-5)

    torch.manual_seed(0)
    branch = SwiGLU(8, 12)
    block, own = (
        ScaledResidual(branch, 8, rule="flat", alpha=3.7, norm=norm).double() for norm in (of_llama, RMSNorm)
    )
    torch.testing.assert_close(block(x), own(x), atol=1e-6, rtol=0)  # Llama's norm computes in fp32
    assert {name for name, _ in block.named_parameters() if "norm" in name or "er.weight" in name} == {
        "inner.weight"
    }
    assert block.state_dict().keys() == own.state_dict().keys()


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_another_norm_loses_its_outer_gain_too(kind, x):
    residual = ScaledResidual(nn.Linear(8, 8), 8, rule="flat", alpha=2.0, norm=kind).double()
    assert residual.inner.weight is not None
    assert residual.outer.weight is None
    expected = residual.double()(x).square().mean(-1)
    torch.testing.assert_close(expected, torch.ones_like(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "norm"}, "rule=norm: must be one of deeploop, deepnorm, prenorm, postnorm, averaged"),
        ({"rule": "prenorm", "alpha": 2.0}, "alpha=2.0: must be 1 with rule=prenorm"),
        ({"rule": "postnorm", "alpha": 0.5}, "alpha=0.5: must be 1 with rule=postnorm"),
        ({"alpha": 0.0}, "alpha=0.0: must be a positive number"),
        ({"alpha": float("nan")}, "alpha=nan: must be a positive number"),
        (
            {"rule": "prenorm:inner_norm=off"},
            "rule=prenorm:inner_norm=off: inner_norm: no parameter of prenorm",
        ),
        ({"rule": "averaged", "alpha": 2.0}, "alpha=2.0: must be 1 with rule=averaged"),
        ({"alpha": 2.0, "epsilon": 0.5}, "epsilon=0.5: must be 1 with rule=deeploop"),
        ({"rule": "flat"}, "blocks: must be given with rule=flat, the stored blocks K"),
        ({"rule": "flat", "alpha": 2.0, "epsilon": 0.5}, "epsilon=0.5: must be 1 with rule=flat"),
        ({"rule": "prenorm:outer_gain=off"}, "rule=prenorm:outer_gain=off: outer_gain: no parameter of"),
        (
            {"rule": "flat", "alpha": 2.0, "norm": lambda width: nn.Identity()},
            "norm: a Identity has no weight",
        ),
        ({}, "blocks: must be given with rule=deeploop, the stored blocks K (and their rounds R); or alpha"),
        ({"rule": "factored"}, "blocks: must be given with rule=factored"),
        ({"rule": "factored", "epsilon": -1.0}, "epsilon=-1.0: must be a positive number"),
        ({"blocks": 2, "alpha": 2.0}, "alpha=2.0: must be left out with blocks=2, which determine it"),
        ({"rule": "lnscale"}, "number=None: must be given with rule=lnscale, the stored block's, from 1"),
        ({"blocks": 0}, "N=0: the depth in blocks must be at least 1"),
    ],
)
def test_meaningless_combinations_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        ScaledResidual(nn.Identity(), 8, **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_of_a_branch_that_returns_a_tuple_the_first_is_taken(x):
    """Return (output, weights), as torch's and transformers' attention do."""

    class Pair(SwiGLU):
        def forward(self, x, *, sign):
            y = super().forward(x)
            return sign * y, y

    plain = build(alpha=3.7)
    pair = ScaledResidual(Pair(8, 12), 8, alpha=3.7).double()
    pair.load_state_dict(plain.state_dict())
    assert torch.equal(pair(x, sign=1), plain(x))
    assert not torch.equal(pair(x, sign=-1), plain(x))


@pytest.mark.parametrize("out", [1, 4])
def test_a_branch_that_changes_the_shape_is_refused(x, out):
    """A single number per position would be broadcast, silently."""
    residual = ScaledResidual(nn.Linear(8, out), 8, rule="prenorm").double()
    with pytest.raises(ValueError, match=r"branch: gave a tensor of .*, as its input"):
        residual(x)


def test_a_varying_epsilon_outlives_the_meta_device(x):
    """Weights are loaded into a model that was made without memory; epsilon is in no checkpoint."""
    whole = build(rule="prenorm:q=0.5", epsilon=0.25)
    with torch.device("meta"):
        empty = ScaledResidual(SwiGLU(8, 12), 8, "prenorm:q=0.5", epsilon=0.25).double()
    empty.to_empty(device="cpu").load_state_dict(whole.state_dict())
    assert empty.scale.item() == 0.25
    assert torch.equal(empty(x), whole(x))


def test_scales_and_beta_follow_blocks_and_rounds(x):
    torch.manual_seed(0)
    drawn = SwiGLU(8, 12, bias=True).double()
    torch.manual_seed(0)
    residual = ScaledResidual(SwiGLU(8, 12, bias=True).double(), 8, "deepnorm", blocks=2, rounds=3)
    assert (residual.alpha, residual.epsilon) == (12**0.25, 1.0)
    for name, parameter in residual.branch.named_parameters():
        expected = drawn.get_parameter(name) * (0 if name.endswith("bias") else 48**-0.25)
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("number", [1, 3])
def test_layernorm_scaling(number, x):
    """x ← x + f(Norm(x)/√k), arXiv 2502.05795."""
    residual = build(rule="lnscale", number=number)
    expected = x + residual.branch(norm(x, residual.inner.weight) / number**0.5)
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-14)


def test_init_can_be_left_out():
    torch.manual_seed(0)
    drawn = SwiGLU(8, 12)
    torch.manual_seed(0)
    residual = ScaledResidual(SwiGLU(8, 12), 8, blocks=2, rounds=3, init=False)
    assert all(map(torch.equal, residual.branch.parameters(), drawn.parameters()))
    assert residual.alpha == 12**0.5


def test_queries_keys_and_an_unscaled_gate_stay_as_they_were_drawn():
    branch = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q_proj", "k", "gate", "v_proj")})
    before = {name: parameter.clone() for name, parameter in branch.named_parameters()}
    ScaledResidual(branch, 8, "deeploop:gate=off", blocks=2)
    kept = {name.split(".")[0] for name, own in branch.named_parameters() if torch.equal(own, before[name])}
    assert kept == {"q_proj", "k", "gate"}


def test_beta_reaches_the_value_rows_of_torchs_attention():
    torch.manual_seed(0)
    branch = nn.MultiheadAttention(8, 2)
    before = branch.in_proj_weight.clone()
    ScaledResidual(branch, 8, blocks=2)
    torch.testing.assert_close(branch.in_proj_weight, before * torch.tensor([1.0] * 16 + [0.25] * 8)[:, None])


def test_a_fused_projection_of_others_is_refused():
    with pytest.raises(ValueError, match=r"branch: qkv\.weight holds queries, keys and values in one"):
        ScaledResidual(nn.ModuleDict({"qkv": nn.Linear(8, 24)}), 8, blocks=2)


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), r"branch\.0 is a LayerNorm: the residual has"),
        (nn.Sequential(RMSNorm(8, gain=False), nn.Linear(8, 8)), r"branch\.0 is a RMSNorm"),
        (
            nn.TransformerEncoderLayer(8, 2),
            r"branch is a TransformerEncoderLayer, which seems to have a skip",
        ),
        (nn.Sequential(ScaledResidual(nn.Linear(8, 8), 8, "prenorm")), r"branch\.0 is a ScaledResidual"),
    ],
)
def test_a_norm_or_a_skip_inside_the_branch_is_warned_of(branch, message):
    with pytest.warns(UserWarning, match=message):
        ScaledResidual(branch, 8, "prenorm")


@pytest.mark.filterwarnings("error")
def test_norms_of_queries_and_keys_are_no_norms_of_the_stream():
    ScaledResidual(CausalSelfAttention(8, 1), 8, "prenorm")
