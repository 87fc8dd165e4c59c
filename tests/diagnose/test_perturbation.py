"""A real AdamW step undone from its state, and its effect on the output against first order."""

import pytest
import torch

from deeploop.diagnose.perturbation import AdamState, step_effect
from deeploop.diagnose.visit_grads import residual_sublayers
from deeploop.models import GPTConfig, LoopedGPT

SHAPE = {"blocks": 2, "rounds": 2, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 30, "context": 8}


def stepped(lr, steps=3):
    """A model after a few real steps, the weights before the last one, and the optimizer's state."""
    torch.manual_seed(0)
    net = LoopedGPT(GPTConfig(**SHAPE)).double()
    tokens, targets = torch.randint(0, 30, (2, 2, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(steps):
        before = {name: value.detach().clone() for name, value in net.named_parameters()}
        optimizer.zero_grad()
        net(tokens, targets).loss.backward()
        optimizer.step()
    moments = [
        {name: optimizer.state[value][key] for name, value in net.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq")
    ]
    state = AdamState(*moments, step=steps, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return net, before, state, tokens


def test_the_last_step_can_be_undone():
    net, before, state, _ = stepped(1e-2)
    for name, value in net.named_parameters():
        assert (value - before[name]).abs().max() > 1e-4
        torch.testing.assert_close(
            state.before_last_step(name, value.detach()), before[name], rtol=1e-9, atol=1e-12
        )
    with pytest.raises(ValueError, match=r"other: .* no moments"):
        state.before_last_step("other", torch.ones(1))


def test_the_effect_is_that_of_the_branches_step_alone():
    net, before, state, tokens = stepped(1e-2)
    sublayers = residual_sublayers(net)
    found = step_effect(sublayers, lambda: net(tokens).states, state)
    names = [f"{s.name}.{name}" for s in sublayers for name in s.parameters]
    after = net(tokens).states.detach()
    kept = {name: net.get_parameter(name).detach().clone() for name in names}
    with torch.no_grad():
        for name in names:
            net.get_parameter(name).copy_(before[name])
    old = net(tokens).states.detach()
    assert found.measured == pytest.approx(float((after - old).norm() / old.norm()), rel=1e-9)
    assert found.output_norm == pytest.approx(float(old.norm()))
    down = [name for name in names if name.startswith("blocks.1.mlp")]
    moved = torch.stack([(kept[name] - before[name]).norm() for name in down]).norm()
    assert found.update_norms["blocks.1.mlp"] == pytest.approx(float(moved))
    size = torch.stack([before[name].norm() for name in down]).norm()
    assert found.update_to_weight["blocks.1.mlp"] == pytest.approx(float(moved / size))


def test_first_order_is_what_remains_as_the_rate_falls():
    errors = []
    for lr in (1e-3, 1e-4):
        net, _, state, tokens = stepped(lr, steps=1)
        errors.append(step_effect(residual_sublayers(net), lambda n=net, t=tokens: n(t).states, state))
    assert errors[0].measured == pytest.approx(errors[0].first_order, rel=0.1)
    # The part beyond first order is of second order: ten times smaller against the change itself.
    assert errors[1].error == pytest.approx(errors[0].error / 10, rel=0.2)
