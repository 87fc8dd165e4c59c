"""Parameter and FLOP counts by formula, against built models and published numbers."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from deeploop.models import GPTConfig, LoopedGPT, flops_per_token, parameter_count

SMALL = GPTConfig()
MEDIUM = GPTConfig(blocks=24, width=1024, heads=8, hidden=2730)


def built(config):
    with torch.device("meta"):
        return sum(p.numel() for p in LoopedGPT(config).parameters())


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (replace(SMALL, rule="prenorm"), 123_591_168),
        (SMALL, 123_609_600),
        (replace(MEDIUM, rule="prenorm"), 353_509_376),
        (MEDIUM, 353_558_528),
    ],
)
def test_the_papers_models_have_the_stated_parameters(config, count):
    assert parameter_count(config) == built(config) == count
    assert parameter_count(replace(config, rounds=7)) == count


@pytest.mark.parametrize(
    ("rule", "final_norm"),
    [
        *product(("postnorm", "deeploop", "deeploop:inner_norm=off"), (True, False)),
        ("averaged", True),
        ("flat", False),
    ],
)
def test_the_formula_follows_the_switches(rule, final_norm):
    config = GPTConfig(
        blocks=3, width=32, heads=2, hidden=40, vocabulary=100, context=4,
        rule=rule, final_norm=final_norm, unigram_bias=not final_norm,
    )  # fmt: skip
    assert parameter_count(config) == built(config)


@pytest.mark.parametrize("inner_norm", ["on", "off"])
def test_an_outer_norm_without_a_gain_has_no_parameter(inner_norm):
    config = replace(SMALL, rule=f"deeploop:inner_norm={inner_norm}")
    without = replace(SMALL, rule=f"deeploop:inner_norm={inner_norm},outer_gain=off")
    assert parameter_count(without) == built(without) == parameter_count(config) - 2 * 12 * 768


def test_flops_a_token():
    """Counted by hand for the small model at R=1; more rounds add visits of the blocks and nothing else."""
    matrices = 12 * (4 * 768 * 768 + 3 * 768 * 2048)
    attention = 12 * 6 * 1024 * 768
    assert flops_per_token(SMALL, rounds=1) == 6 * (matrices + 50304 * 768) + attention
    assert flops_per_token(SMALL) - flops_per_token(SMALL, rounds=2) == 6 * matrices + attention
    assert flops_per_token(replace(SMALL, rounds=1)) == flops_per_token(SMALL, rounds=1)


def test_flops_agree_with_torchs_counter():
    """Torch counts attention in full, so the causal half is added before comparing."""
    from torch.utils.flop_counter import FlopCounterMode

    config = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=128, context=16)
    model = LoopedGPT(config)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(tokens, tokens).loss.backward()
    other_half = 6 * 6 * 16 * 32
    assert counter.get_total_flops() == 2 * 16 * (flops_per_token(config) + other_half)
