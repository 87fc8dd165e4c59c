"""κ_R on constructed loops whose alignment is known, and Adam's share of it."""

import math
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from deeploop.diagnose.alignment import adam_updates, kappa, kappas, measure
from deeploop.diagnose.sensitivity import sensitivity
from deeploop.diagnose.visit_grads import Sublayer, flat, residual_sublayers, visit_gradients
from deeploop.models import GPTConfig, LoopedGPT

R = 4
EXACT = {"iterations": 50, "tolerance": 1e-12}


def constructed(inputs, slots, signs=(1,) * R, cotangents=None):
    """Visit r applies one matrix to input r and adds the result to slot r of the output, with a sign."""
    linear = nn.Linear(8, 8, bias=False).double()

    def output():
        out = [torch.zeros(8, dtype=torch.float64) for _ in range(max(slots) + 1)]
        for x, slot, sign in zip(inputs, slots, signs, strict=True):
            out[slot] = out[slot] + sign * linear(x)
        return torch.stack(out)

    weights = torch.ones(max(slots) + 1, 8).double() if cotangents is None else cotangents
    return measure(
        [Sublayer.of("loop", linear)], loss=lambda: (output() * weights).sum(), output=output, **EXACT
    )


def basis(n):
    return torch.eye(8, dtype=torch.float64)[n]


def test_identical_visits_give_R():
    (found,) = constructed([basis(0)] * R, [0] * R)
    assert kappa([found]) == pytest.approx(R, rel=1e-6)
    assert [*found.update_cosines[0], *found.sensitivity_cosines[1]] == pytest.approx([1.0] * 2 * R)


def test_cancelling_visits_give_0():
    (found,) = constructed([basis(0)] * R, [0] * R, signs=(1, -1, 1, -1))
    assert kappa([found]) == pytest.approx(0, abs=1e-9)
    assert found.sensitivity_cosines[0][1] == pytest.approx(-1)


def test_orthogonal_updates_and_outputs_on_one_input_give_1():
    (found,) = constructed([basis(0)] * R, range(R), cotangents=torch.eye(8, dtype=torch.float64)[:R])
    assert found.update_sum == pytest.approx(math.sqrt(R))
    assert found.sensitivity_sum == pytest.approx(math.sqrt(R))
    assert kappa([found]) == pytest.approx(1, rel=1e-6)


def test_orthogonal_in_input_and_output_gives_one_over_root_R():
    (found,) = constructed([basis(r) for r in range(R)], range(R))
    assert kappa([found]) == pytest.approx(1 / math.sqrt(R), rel=1e-6)


def test_the_largest_visit_is_the_measure():
    """‖G_r‖ = 1, 2, 3, 4 in orthogonal directions: ‖ΣG_r‖ = √30 against R times the largest."""
    weights = torch.diag(torch.arange(1.0, 9)).double()[:R]
    (found,) = constructed([basis(0)] * R, range(R), cotangents=weights)
    assert found.update_norms == pytest.approx((1, 2, 3, 4))
    assert kappa([found]) == pytest.approx(math.sqrt(R) * math.sqrt(30) / (4 * R), rel=1e-6)


def test_constants_are_shared_by_all_sublayers():
    """Small visits can't reach R under the constants of a large sublayer; by their own they can."""
    small, large = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
    x = torch.ones(4, dtype=torch.float64)

    def output():
        return 0.1 * (small(x) + small(x)) + large(x) + large(x)

    found = measure(
        [Sublayer.of("small", small), Sublayer.of("large", large)],
        loss=lambda: output().sum(),
        output=output,
        **EXACT,
    )
    assert kappas(found) == pytest.approx({"small": 2 * 0.1**2, "large": 2.0}, rel=1e-6)
    assert kappa(found) == pytest.approx(2.0)
    assert [one.own_kappa for one in found] == pytest.approx([2, 2], rel=1e-6)


def test_settings_reach_the_sensitivity():
    linear = nn.Linear(4, 4, bias=False).double()

    def output():
        return linear(linear(torch.ones(4, dtype=torch.float64)).tanh())

    sublayer = Sublayer.of("loop", linear)
    for settings in ({"samples": 1}, {"iterations": 1}, {"tolerance": 0.5}):
        (found,) = measure([sublayer], loss=lambda: output().sum(), output=output, **settings)
        asked, default = sensitivity(sublayer, output, **settings), sensitivity(sublayer, output)
        assert found.sensitivity_cosines[0][1] == pytest.approx(float(asked.cosines[0, 1]))
        assert found.sensitivity_sum == pytest.approx(asked.tied.value)
        assert (found.sensitivity_cosines[0][1], found.sensitivity_sum) != pytest.approx(
            (float(default.cosines[0, 1]), default.tied.value), rel=1e-4
        )


@pytest.mark.parametrize("block", ["deeploop", "prenorm"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_models_kappa_lies_between_0_and_R(block, rounds):
    torch.manual_seed(rounds)
    shape = {"blocks": 2, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 30, "context": 8}
    net = LoopedGPT(GPTConfig(**shape, rounds=rounds, rule=block))
    tokens, targets = torch.randint(0, 30, (2, 2, 8))
    found = measure(
        residual_sublayers(net),
        loss=lambda: net(tokens, targets).loss,
        output=lambda: net(tokens).states,
        iterations=6,
    )
    assert 0 < kappa(found) <= rounds * 1.01  # a norm from an unfinished iteration is a little small
    assert len(found) == 4
    if rounds == 1:
        assert all(one.own_kappa == pytest.approx(1, rel=1e-3) for one in found)


def test_adams_updates_add_up_to_its_real_step():
    """Without momentum, lr · Σ_r D G_r is what torch's AdamW subtracts."""
    torch.manual_seed(0)
    shape = {"blocks": 1, "rounds": 2, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 30, "context": 8}
    net = LoopedGPT(GPTConfig(**shape)).double()
    tokens, targets = torch.randint(0, 30, (2, 2, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.0, 0.9), weight_decay=0.0)

    def loss():
        return net(tokens, targets).loss

    for _ in range(3):
        gradients = visit_gradients(residual_sublayers(net), loss)
        before = {name: value.detach().clone() for name, value in net.named_parameters()}
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    moments = {name: optimizer.state[value]["exp_avg_sq"] for name, value in net.named_parameters()}
    precondition = adam_updates(moments, step=3, beta2=0.9, eps=1e-8)
    for sublayer in residual_sublayers(net):
        names = [f"{sublayer.name}.{name}" for name in sublayer.parameters]
        step = flat([before[name] - net.get_parameter(name).detach() for name in names])
        updates = precondition(sublayer, gradients[sublayer.name])
        torch.testing.assert_close(1e-3 * updates.sum(0), step, rtol=1e-7, atol=1e-12)
    with pytest.raises(ValueError, match="no second moment"):
        adam_updates({}, step=1, beta2=0.9, eps=1e-8)(sublayer, updates)


def test_blocks_may_be_modules_and_their_number_of_visits_is_checked():
    linear = nn.Linear(3, 3, bias=False)
    x = torch.ones(3)

    def output():
        return linear(x) + linear(x)

    (found,) = measure({"loop": linear}, rounds=2, loss=lambda: output().sum(), output=output)
    assert found.rounds == 2
    with pytest.raises(ValueError, match="'loop': 2 visits with gradients, not rounds=3"):
        measure({"loop": linear}, rounds=3, loss=lambda: output().sum(), output=output)


def test_the_example_of_somebody_elses_model(capsys):
    example = Path(__file__).parents[2] / "examples" / "own_alignment.py"
    assert len(example.read_text().splitlines()) <= 35
    runpy.run_path(str(example), run_name="__main__")
    assert 1 < float(re.search(r"κ_R = (\S+) of at most 6", capsys.readouterr().out)[1]) < 6


def test_nothing_to_measure():
    with pytest.raises(ValueError, match="at least one"):
        kappa([])
