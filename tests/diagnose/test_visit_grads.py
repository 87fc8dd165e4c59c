"""One gradient per visit: the parts add up to autograd's whole, and nothing is left behind in the model."""

import pytest
import torch
from torch import nn

from deeploop.diagnose.examine import examine
from deeploop.diagnose.visit_grads import Sublayer, flat, residual_sublayers, separate_visits, visit_gradients
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn.written import has_hooks

torch.manual_seed(0)
TOKENS = torch.randint(0, 50, (2, 8))
TARGETS = torch.randint(0, 50, (2, 8))


def model(**changes):
    shape = {"blocks": 2, "rounds": 3, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 50, "context": 8}
    built = LoopedGPT(GPTConfig(**(shape | changes)), seed=1).double()
    with torch.no_grad():
        for parameter in built.parameters():  # away from gains of 1 and tiny branches
            parameter.add_(0.3 * torch.randn_like(parameter))
    return built


def loss_of(net):
    return lambda: net(TOKENS, TARGETS).loss / TARGETS.numel()


@pytest.mark.parametrize("changes", [{}, {"rounds": 1}, {"rule": "prenorm"}, {"rule": "postnorm"}])
def test_visits_add_up_to_the_parameters_gradient(changes):
    net = model(**changes)
    sublayers = residual_sublayers(net)
    found = visit_gradients(sublayers, loss_of(net))
    loss_of(net)().backward()
    assert len(sublayers) == 4
    for sublayer in sublayers:
        whole = flat([net.get_parameter(f"{sublayer.name}.{name}").grad for name in sublayer.parameters])
        assert found[sublayer.name].shape == (net.rounds, whole.numel())
        torch.testing.assert_close(found[sublayer.name].sum(0), whole, rtol=1e-10, atol=1e-13)


def test_a_visits_gradient_is_that_of_the_untied_stack():
    """The loop unrolled into K·R blocks of their own: visit (r, k) is block r·K + k."""
    net = model()
    deep = LoopedGPT(GPTConfig(**(vars(net.config) | {"blocks": 6, "rounds": 1}))).double()
    for index, block in enumerate(deep.blocks):
        block.load_state_dict(net.blocks[index % 2].state_dict())
        for residual in (block.attention, block.mlp):
            residual.alpha = net.config.scales.alpha
    for part in ("embedding", "input_norm", "final_norm"):
        getattr(deep, part).load_state_dict(getattr(net, part).state_dict())
    loss_of(deep)().backward()
    found = visit_gradients(residual_sublayers(net), loss_of(net))["blocks.1.mlp"]
    for r in range(3):
        branch = deep.blocks[r * 2 + 1].mlp.branch
        own = flat([branch.gate.weight.grad, branch.up.weight.grad, branch.down.weight.grad])
        torch.testing.assert_close(found[r], own, rtol=1e-9, atol=1e-12)


def test_probing_in_groups_changes_nothing():
    net = model()
    sublayers = residual_sublayers(net)
    together = visit_gradients(sublayers, loss_of(net))
    for sublayer in sublayers:
        alone = visit_gradients([sublayer], loss_of(net))
        torch.testing.assert_close(alone[sublayer.name], together[sublayer.name], rtol=0, atol=1e-14)


def test_the_scaled_matrices_are_looked_at_and_nothing_else():
    net = model(attention_bias="qkvo", mlp_bias=True)
    names = {name for sublayer in residual_sublayers(net) for name in sublayer.parameters}
    assert names == {f"branch.{role}.weight" for role in ("v", "o", "gate", "up", "down")}


def test_the_model_is_left_as_it_was_even_by_an_error():
    net = model()
    before = dict(net.named_parameters())

    def fails():
        loss_of(net)()
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        visit_gradients(residual_sublayers(net), fails)
    with pytest.raises(IndexError):  # the embedding fails before any block
        visit_gradients(residual_sublayers(net), lambda: net(TOKENS + 10**6).states)

    def breaks(*_):
        raise RuntimeError("inside a visit")

    hook = net.blocks[0].mlp.branch.down.register_forward_pre_hook(breaks)
    with pytest.raises(RuntimeError, match="inside a visit"):
        visit_gradients(residual_sublayers(net), loss_of(net))
    hook.remove()
    after = dict(net.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert not any(map(has_hooks, net.modules()))


def test_an_examination_that_fails_leaves_the_model_as_it_was():
    net = model()
    net.backprop = 2

    def fails(name):
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match="attention"):
        examine(net, TOKENS, TARGETS, progress=fails)
    assert (net.training, net.backprop) == (True, 2)


def test_an_alias_is_the_parameters_own_memory():
    net = model()
    seen = []

    def look(sublayer, call):
        leaves = tuple(value.detach().requires_grad_() for value in sublayer.values())
        seen.append((call, [leaf.data_ptr() for leaf in leaves]))
        return leaves

    (sublayer, *_) = residual_sublayers(net)
    with separate_visits([sublayer], look):
        net(TOKENS)
    assert [call for call, _ in seen] == [0, 1, 2]
    assert all(pointers == [value.data_ptr() for value in sublayer.values()] for _, pointers in seen)


def test_a_call_outside_the_graph_is_no_visit():
    """Gradient horizons run early calls without a graph: nothing comes back from them."""
    linear = nn.Linear(4, 4, bias=False).double()
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss():
        with torch.no_grad():
            y = linear(linear(x))
        return linear(y).square().sum()

    found = visit_gradients([Sublayer.of("loop", linear)], loss)["loop"]
    loss().backward()
    assert found.shape == (1, 16)
    torch.testing.assert_close(found[0], linear.weight.grad.flatten())


def test_mistakes_are_named():
    linear = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="'loop': was never visited"):
        visit_gradients([Sublayer.of("loop", linear)], lambda: torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match="no matrices"):
        Sublayer.of("norm", nn.LayerNorm(4))
    with pytest.raises(ValueError, match="no residual sublayers"):
        residual_sublayers(linear)
