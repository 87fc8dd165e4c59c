"""GPTConfig: derived numbers as the paper states them, and one-line errors."""

import pytest

from deeploop.models import GPTConfig


@pytest.mark.parametrize(
    ("blocks", "rounds", "alpha", "beta"),
    [
        (12, 1, 4.899, 0.10206),
        (12, 3, 8.485, 0.05893),
        (12, 5, 10.954, 0.04564),
        (12, 7, 12.961, 0.03858),
        (24, 1, 6.928, 0.07217),
        (24, 3, 12.0, 0.04167),
        (24, 5, 15.492, 0.03227),
        (24, 7, 18.330, 0.02728),
    ],
)
def test_alpha_and_beta_of_the_papers_models(blocks, rounds, alpha, beta):
    config = GPTConfig(blocks=blocks, rounds=rounds)
    assert config.depth == blocks * rounds
    assert config.alpha == pytest.approx(alpha, abs=5e-4)
    assert config.beta == pytest.approx(beta, abs=5e-6)


def test_epsilon_of_the_blocks_that_scale_their_branches():
    assert GPTConfig(block="factored").epsilon == pytest.approx(1 / (3 * 12**0.5))
    assert GPTConfig(block="factored", factored_gain=2.5).epsilon == pytest.approx(2.5 / (3 * 12**0.5))
    assert GPTConfig(block="averaged").epsilon == pytest.approx(1 / 36)
    assert GPTConfig().epsilon == GPTConfig(block="prenorm").epsilon == 1.0


@pytest.mark.parametrize("block", ["prenorm", "postnorm", "factored", "averaged"])
def test_unscaled_blocks_have_no_rule(block):
    config = GPTConfig(block=block)
    assert (config.alpha, config.beta, config.rule) == (1.0, 1.0, None)


def test_derived_sizes():
    assert GPTConfig().padded_vocabulary == 50304
    assert GPTConfig(vocabulary=257).padded_vocabulary == 320
    assert GPTConfig(vocabulary=320).padded_vocabulary == 320
    assert GPTConfig().head_size == 128


def test_outputs_shrink_by_default_only_without_beta_and_epsilon():
    root = 12**0.5
    assert GPTConfig(block="prenorm").init_rule.output_divisor == root
    assert GPTConfig(block="postnorm").init_rule.output_divisor == root
    assert GPTConfig().init_rule.output_divisor == 1.0
    assert GPTConfig(block="factored").init_rule.output_divisor == 1.0
    assert GPTConfig(block="averaged").init_rule.output_divisor == 1.0
    assert GPTConfig(shrink_outputs=True).init_rule.output_divisor == root
    assert GPTConfig(block="prenorm", shrink_outputs=False).init_rule.output_divisor == 1.0


def test_width_mup_multiplier():
    assert GPTConfig().matrix_lr_multiplier == 1.0
    assert GPTConfig(mup_base_width=1024).matrix_lr_multiplier == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": 0}, "model.blocks=0: must be at least 1"),
        ({"rounds": 0}, "model.rounds=0: must be at least 1"),
        ({"width": -8}, "model.width=-8: must be at least 1"),
        ({"heads": 0}, "model.heads=0: must be at least 1"),
        ({"hidden": 0}, "model.hidden=0: must be at least 1"),
        ({"vocabulary": 0}, "model.vocabulary=0: must be at least 1"),
        ({"context": 0}, "model.context=0: must be at least 1"),
        ({"heads": 5}, "model.heads=5: must be a divisor of model.width=768"),
        ({"width": 6, "heads": 2}, "model.heads=2: must be such that model.width=6 / heads is even"),
        (
            {"block": "norm"},
            "model.block=norm: must be one of prenorm, postnorm, sandwich, factored, averaged",
        ),
        ({"p": 0.0}, "model.p=0.0: must be positive and finite"),
        ({"p": float("inf")}, "model.p=inf: must be positive and finite"),
        *(
            (
                {"block": block, "p": 0.75},
                f"model.p=0.75: must be 0.5 with model.block={block}; only the sandwich has a rule",
            )
            for block in ("prenorm", "postnorm", "factored", "averaged")
        ),
        (
            {"block": "prenorm", "inner_norm": False},
            "model.inner_norm=False: must be True with model.block=prenorm",
        ),
        ({"factored_gain": 2.0}, "model.factored_gain=2.0: must be 1 with model.block=sandwich"),
        (
            {"block": "factored", "factored_gain": 0.0},
            "model.factored_gain=0.0: must be positive and finite",
        ),
        ({"mup_base_width": -1}, "model.mup_base_width=-1: must be 0 (off) or a width"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError) as error:
        GPTConfig(**fields)
    assert str(error.value) == message
