"""The schedule at points computed by hand, and which parameter learns at what rate and decay."""

import math
from dataclasses import replace

import pytest
import torch

from deeploop.config.optim import OptimConfig
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.train.optim import (
    clipped_step,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    supports_conditional_step,
)

SCHEDULE = OptimConfig(steps=110, warmup_steps=10, peak_lr=1e-3, floor_lr=1e-4)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1e-4),  # a tenth of the ramp: no step at rate zero
        (4, 5e-4),
        (9, 1e-3),
        (10, 1e-3),  # the cosine begins at the peak
        (35, 1e-4 + 9e-4 * (2 + math.sqrt(2)) / 4),  # a quarter: cos 45° = √2 / 2
        (60, 5.5e-4),  # half way between peak and floor
        (85, 1e-4 + 9e-4 * (2 - math.sqrt(2)) / 4),
        (110, 1e-4),
        (500, 1e-4),  # and never below the floor
    ],
)
def test_ramp_and_cosine(step, rate):
    assert learning_rate(step, SCHEDULE) == pytest.approx(rate, rel=1e-12)


def test_the_rate_rises_then_falls():
    rates = [learning_rate(step, SCHEDULE) for step in range(110)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == SCHEDULE.peak_lr


def test_without_warmup_the_peak_comes_first():
    assert learning_rate(0, OptimConfig(steps=10, warmup_steps=0, peak_lr=2e-3)) == 2e-3


def test_a_run_shorter_than_its_warmup_stays_on_the_ramp():
    short = OptimConfig(steps=50, warmup_steps=100, peak_lr=1e-3)
    assert learning_rate(49, short) == pytest.approx(5e-4)


@pytest.fixture
def model():
    config = GPTConfig(
        blocks=2, rounds=2, width=32, heads=2, hidden=64, vocabulary=257, context=16, mup_base_width=64,
        unigram_bias=True,
    )  # fmt: skip
    return LoopedGPT(config)


def grouped(model, **options):
    """The optimizer, and each parameter's name → its group."""
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.1), fused=False, **options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    listed = [(names[p], group) for group in optimizer.param_groups for p in group["params"]]
    return optimizer, listed


def test_every_parameter_is_in_exactly_one_group(model):
    _, listed = grouped(model)
    assert sorted(name for name, _ in listed) == sorted(name for name, _ in model.named_parameters())


def test_gains_are_not_decayed_and_everything_else_is(model):
    _, listed = grouped(model)
    for name, group in listed:
        gain = any(word in name for word in ("norm", "inner", "outer", "output_bias"))
        assert gain == (model.get_parameter(name).ndim == 1)
        assert group["weight_decay"] == (0.0 if gain else 0.1), name


def test_width_mup_multiplies_the_rate_of_block_matrices_alone(model):
    optimizer, listed = grouped(model, matrix_lr_multiplier=model.config.matrix_lr_multiplier)
    set_learning_rate(optimizer, 3e-4)
    for name, group in listed:
        matrix = ".branch." in name and model.get_parameter(name).ndim == 2
        assert group["lr"] == pytest.approx(6e-4 if matrix else 3e-4), name


def test_matrices_come_first(model):
    """The diagnosis takes its rate from there."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    first, *_ = make_optimizer(model, OptimConfig(), fused=False).param_groups
    roles = {names[parameter].split(".")[-2] for parameter in first["params"]}
    assert roles == {"q", "k", "v", "o", "gate", "up", "down"}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_biases_of_the_branch_are_with_the_gains(model, kind):
    model = LoopedGPT(replace(model.config, attention_bias="qkvo", mlp_bias=True))
    optimizer = make_optimizer(model, OptimConfig(kind=kind), fused=False)
    biases = {parameter for name, parameter in model.named_parameters() if name.endswith("bias")}
    for group in optimizer.param_groups:
        if not biases.isdisjoint(group["params"]):
            assert (group["weight_decay"], group["lr_multiplier"]) == (0.0, 1.0)


def test_an_injection_has_a_rate_of_its_own_where_it_is_asked_for():
    shape = {"blocks": 1, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 64, "context": 8}
    model = LoopedGPT(GPTConfig(prelude=1, injection="linear", tied_head=False, **shape))
    optimizer = make_optimizer(model, OptimConfig(injection_lr=10.0), fused=False)
    set_learning_rate(optimizer, 1e-3)
    *_, embedding, _, injection = optimizer.param_groups
    assert injection["params"] == [model.injection.weight]
    assert injection["lr"] == pytest.approx(1e-2)
    assert injection["weight_decay"] == 0
    assert embedding["params"] == [model.embedding.weight, model.head.weight]  # not for Muon


def test_settings_reach_adamw(model):
    config = OptimConfig(betas=(0.8, 0.9), eps=1e-6)
    optimizer = make_optimizer(model, config, fused=False)
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 0), ("batch", 0), ("peak_lr", math.nan), ("clip", -1.0), ("betas", (0.9, 1.0))],
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(ValueError) as error:
        OptimConfig(**{field: value})
    assert str(error.value).startswith(f"optim.{field}={value}: ")


def step_pair(model, scale, fused):
    """Weights after two steps at a norm beyond the clip; the second may be spoiled."""
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.1), fused=fused)
    generator = torch.Generator().manual_seed(0)
    for factor in (1.0, scale):
        for parameter in model.parameters():
            parameter.grad = factor * torch.randn(parameter.shape, generator=generator)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        values = torch.stack([norm, torch.zeros(())])
        if supports_conditional_step(optimizer):
            clipped_step(optimizer, norm, 0.5, only_if=values.isfinite().all())
        else:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()["state"]


@pytest.mark.parametrize("second", [None, 0.4])  # the norm of the second step: as it is, or below the clip
def test_a_guarded_step_clips_and_steps_as_the_plain_one(model, second):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    scale = second / math.sqrt(sum(p.numel() for p in model.parameters())) if second else 1.0
    ours, _ = step_pair(model, scale, fused=True)
    model.load_state_dict(start)
    theirs, _ = step_pair(model, scale, fused=False)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_guarded_step_that_is_not_finite_changes_nothing(model, bad):
    optimizer = make_optimizer(model, OptimConfig(), fused=True)
    one = torch.ones(())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert supports_conditional_step(optimizer)
    clipped_step(optimizer, one, 1.0, only_if=one.isfinite())
    before = [p.detach().clone() for p in model.parameters()]
    moments = {k: {n: t.clone() for n, t in s.items()} for k, s in optimizer.state_dict()["state"].items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, bad)
    clipped_step(optimizer, one * bad, 1.0, only_if=(one * bad).isfinite())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, moments[key][name]) for name, tensor in state.items())
