"""AdamATan2 against its formula written out, and the running average beside it."""

import math
from types import SimpleNamespace

import pytest
import torch

from deeploop.config.optim import ReasonerOptimConfig
from deeploop.train.adam_atan2 import AdamATan2, averaged
from deeploop.train.optim import (
    clipped_step,
    learning_rate,
    make_reasoner_optimizer,
    set_learning_rate,
    supports_conditional_step,
)


def reference(p, gradients, lr, beta1, beta2, decay):
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p * (1 - lr * decay)
        p = p - lr / (1 - beta1**t) * math.atan2(m, math.sqrt(v / (1 - beta2**t)))
    return p


def run(gradients, start, **settings):
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = AdamATan2([p], **settings)
    for row in gradients:
        p.grad = torch.tensor(row, dtype=torch.float64)
        optimizer.step()
    return p.detach(), optimizer


def test_steps_are_those_of_the_formula():
    gradients = [[0.5, -2.0, 0.0], [0.25, 3.0, 0.0], [-1e-9, 1e9, 0.0], [4.0, -1.0, 0.0]]
    p, _ = run(gradients, [1.0, -2.0, 3.0], lr=0.1, betas=(0.9, 0.95), weight_decay=0.3)
    for index, start in enumerate([1.0, -2.0, 3.0]):
        own = reference(start, [row[index] for row in gradients], 0.1, 0.9, 0.95, 0.3)
        assert float(p[index]) == pytest.approx(own, rel=1e-12)


def test_the_scale_of_the_loss_does_not_matter():
    gradients = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    small, large = (run((s * gradients).tolist(), [1.0] * 4, lr=0.1)[0] for s in (1e-6, 1e6))
    torch.testing.assert_close(small, large, rtol=1e-12, atol=0)


def test_the_average_follows_and_is_swapped_in_and_out():
    p, optimizer = run([[1.0], [1.0]], [2.0], lr=0.1, ema=0.9)
    first = reference(2.0, [1.0], 0.1, 0.9, 0.95, 0)
    second = reference(2.0, [1.0, 1.0], 0.1, 0.9, 0.95, 0)
    expected = 0.9 * (0.9 * 2.0 + 0.1 * first) + 0.1 * second
    with averaged(optimizer):
        assert float(p) == pytest.approx(expected, rel=1e-12)
    assert float(p) == pytest.approx(second, rel=1e-12)
    with pytest.raises(KeyError), averaged(optimizer):
        raise KeyError
    assert float(p) == pytest.approx(second, rel=1e-12)


def test_without_an_average_nothing_is_swapped():
    p, optimizer = run([[1.0]], [2.0], lr=0.1)
    before = float(p)
    with averaged(optimizer):
        assert float(p) == before


def clipped(clip, gradients, *, conditional):
    """Parameter and state after steps which, if conditional, are taken only where the gradient is finite."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = AdamATan2([p], lr=0.1, weight_decay=0.3, ema=0.9)
    for gradient in gradients:
        p.grad = gradient.clone()
        norm = gradient.norm()
        clipped_step(optimizer, norm, clip, only_if=norm.isfinite() if conditional else None)
        if conditional:  # who looks for what broke finds the gradient as it was
            torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0, equal_nan=True)
    return {"p": p.detach(), **{name: value for name, value in optimizer.state[p].items() if name != "step"}}


@pytest.fixture
def gradients():
    return list(torch.randn(4, 5, generator=torch.Generator().manual_seed(1)))


def test_a_step_that_a_tensor_allows_is_the_step(gradients):
    allowed, plain = (clipped(0.0, gradients, conditional=conditional) for conditional in (True, False))
    assert allowed.keys() == plain.keys() == {"p", "exp_avg", "exp_avg_sq", "average"}
    assert all(torch.equal(allowed[name], plain[name]) for name in plain)


def test_it_is_clipped_as_the_plain_one(gradients):
    allowed, plain, unclipped = (
        clipped(clip, gradients, conditional=conditional)
        for clip, conditional in ((1.0, True), (1.0, False), (0.0, False))
    )
    for name in plain:
        torch.testing.assert_close(allowed[name], plain[name], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(plain["exp_avg"], unclipped["exp_avg"], rtol=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_a_tensor_forbids_leaves_no_trace(gradients, bad, clip):
    spoiled = gradients[0].clone()
    spoiled[2] = bad
    before = clipped(clip, gradients, conditional=True)
    after = clipped(clip, [*gradients, spoiled, torch.full((5,), bad)], conditional=True)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_it_is_for_a_gpu(monkeypatch):
    optimizer = AdamATan2([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert not supports_conditional_step(optimizer)
    monkeypatch.setitem(optimizer.param_groups[0], "params", [SimpleNamespace(is_cuda=True)])
    assert supports_conditional_step(optimizer)


def test_the_rate_is_constant_after_warm_up_and_everything_decays():
    config = ReasonerOptimConfig(steps=100, peak_lr=2e-4, warmup_steps=10)
    assert [learning_rate(step, config) for step in (0, 4, 9, 10, 55, 99)] == pytest.approx(
        [2e-5, 1e-4, 2e-4, 2e-4, 2e-4, 2e-4], rel=1e-12
    )
    optimizer = make_reasoner_optimizer(torch.nn.Linear(3, 2), config)
    set_learning_rate(optimizer, 0.5)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (0.5, 0.1, 2)


@pytest.mark.parametrize("change", [{"ema": 1.0}, {"puzzle_lr": -1.0}, {"puzzle_weight_decay": math.inf}])
def test_a_wrong_setting_is_named(change):
    with pytest.raises(ValueError, match=rf"optim\.{next(iter(change))}="):
        ReasonerOptimConfig(**change)


@pytest.mark.kernels
@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_the_kernel_takes_the_step(ema, divisor, skip):
    from deeploop.nn.kernels.adam_atan2 import adam_atan2_, fits

    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    m, p = torch.randn(2, 3, 1111, generator=draw)
    v, sizes = torch.rand(3, 1111, generator=draw) ** 8, torch.randint(-6, 3, (3, 1111), generator=draw)
    gradient = torch.randn(3, 1111, generator=draw) * 10.0**sizes
    m[0], v[0], gradient[0] = 0, 0, 0  # atan2(0, 0)
    start = [p, m, v, *([p / 2] if ema else [])]
    values = [value.clone().to(device) for value in start]
    told = [None if given is None else torch.tensor(given, device=device) for given in (skip, divisor)]
    assert fits(torch.nn.Parameter(values[0]), gradient.to(device))
    settings = {"decay": 0.97, "rate": 0.2, "root": 0.4, "betas": (0.9, 0.95), "ema": ema}
    adam_atan2_(values, gradient.to(device), **settings, skip=told[0], divisor=told[1])
    wide, g = [value.double() for value in start], gradient.double() / (divisor or 1.0)
    if not skip:
        wide[1] = 0.9 * wide[1] + 0.1 * g
        wide[2] = 0.95 * wide[2] + 0.05 * g * g
        wide[0] = 0.97 * wide[0] - 0.2 * torch.atan2(wide[1], wide[2].sqrt() / 0.4)
        if ema:
            wide[3] = ema * wide[3] + (1 - ema) * wide[0]
    for found, expected in zip(values, wide, strict=True):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-6, atol=2e-6)
