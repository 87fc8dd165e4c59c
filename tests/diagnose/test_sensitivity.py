"""Operator norms against dense Jacobians of independent models."""

import pytest
import torch
from torch.func import functional_call, jacrev

from deeploop.diagnose.sensitivity import OutputMap, operator_norms, sensitivity
from deeploop.diagnose.visit_grads import Sublayer, flat, residual_sublayers
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn.residual import ScaledResidual

torch.manual_seed(0)
TOKENS = torch.randint(0, 20, (1, 3))


@pytest.fixture(scope="module")
def net():
    shape = {"blocks": 1, "rounds": 3, "width": 8, "heads": 2, "hidden": 4, "vocabulary": 20, "context": 4}
    built = LoopedGPT(GPTConfig(**shape), seed=1).double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return built


def dense(net, names):
    """d states / d parameters (outputs, P), by reverse-mode Jacobians of the whole, tied model."""
    fixed = {name: value for name, value in net.named_parameters() if name not in names}
    values = tuple(net.get_parameter(name) for name in names)

    def states(*changed):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return functional_call(net, fixed | dict(zip(names, changed, strict=True)), (TOKENS,)).states

    jacobians = jacrev(states, argnums=tuple(range(len(values))))(*values)
    return torch.cat([j.reshape(TOKENS.numel() * 8, -1) for j in jacobians], dim=1).detach()


def unrolled(net):
    """The function with a separate block for every visit."""
    deep = LoopedGPT(GPTConfig(**(vars(net.config) | {"blocks": net.rounds, "rounds": 1}))).double()
    for block in deep.blocks:
        block.load_state_dict(net.blocks[0].state_dict())
    for module in deep.modules():
        if isinstance(module, ScaledResidual):
            module.alpha = net.config.scales.alpha
    for part in ("embedding", "input_norm", "final_norm"):
        getattr(deep, part).load_state_dict(getattr(net, part).state_dict())
    return deep


@pytest.mark.parametrize("index", [0, 1], ids=["attention", "mlp"])
def test_norms_and_cosines_are_those_of_dense_jacobians(net, index):
    sublayer = residual_sublayers(net)[index]
    found = sensitivity(sublayer, lambda: net(TOKENS).states, iterations=60, tolerance=1e-12, samples=800)
    tied = dense(net, [f"{sublayer.name}.{name}" for name in sublayer.parameters])
    assert found.tied.value == pytest.approx(float(torch.linalg.matrix_norm(tied, 2)), rel=1e-6)
    deep, kind = unrolled(net), sublayer.name.rpartition(".")[2]
    maps = [dense(deep, [f"blocks.{r}.{kind}.{name}" for name in sublayer.parameters]) for r in range(3)]
    torch.testing.assert_close(sum(maps), tied, rtol=1e-9, atol=1e-12)
    for norm, own in zip(found.visits, maps, strict=True):
        assert norm.value == pytest.approx(float(torch.linalg.matrix_norm(own, 2)), rel=1e-6)
    for r in range(3):
        for s in range(3):
            cosine = (maps[r] * maps[s]).sum() / maps[r].norm() / maps[s].norm()
            assert float(found.cosines[r, s]) == pytest.approx(float(cosine), abs=0.08)  # 800 samples


def test_push_and_transpose_are_adjoint(net):
    sublayer = residual_sublayers(net)[1]
    linear = OutputMap(sublayer, lambda: net(TOKENS).states)
    v = torch.randn(4, flat(sublayer.values()).numel()).double()
    w = torch.randn(4, *linear.value.shape).double()
    there, back = linear.push(v), linear.transpose(w)
    torch.testing.assert_close((there * w).flatten(1).sum(1), (back * v).sum(1), rtol=1e-9, atol=1e-12)
    same = linear.push(v[:1].expand(4, -1))  # one perturbation in all lanes: the tied map is the sum
    torch.testing.assert_close(same[:3].sum(0), same[3], rtol=1e-9, atol=1e-12)


def test_an_iteration_cut_short_stays_below_and_says_so(net):
    output = OutputMap(residual_sublayers(net)[1], lambda: net(TOKENS).states)
    start = output.transpose(torch.randn(4, *output.value.shape).double())
    short = operator_norms(output, start, iterations=2, tolerance=0)
    full = operator_norms(output, start, iterations=60, tolerance=1e-12)
    for a, b in zip(short, full, strict=True):
        assert a.value <= b.value * (1 + 1e-9)
        assert a.iterations == 2
        assert a.change > 1e-3
        assert b.change < 1e-11


def test_a_visit_that_reaches_nothing_has_norm_zero():
    """The last call's result is thrown away: no way leads from it to the output."""
    linear = torch.nn.Linear(3, 3, bias=False).double()
    x = torch.randn(2, 3, dtype=torch.float64)

    def output():
        y = linear(x)
        linear(y)
        return y

    found = sensitivity(Sublayer.of("loop", linear), output)
    assert found.visits[1].value == 0
    assert found.tied.value == pytest.approx(found.visits[0].value)
    assert found.visits[0].value == pytest.approx(float(torch.linalg.matrix_norm(x, 2)), rel=1e-6)
