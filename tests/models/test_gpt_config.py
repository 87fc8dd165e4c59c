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
    assert config.scales.alpha == pytest.approx(alpha, abs=5e-4)
    assert config.scales.beta == pytest.approx(beta, abs=5e-6)


def test_epsilon_of_the_blocks_that_scale_their_branches():
    assert GPTConfig(block="factored").scales.epsilon == pytest.approx(1 / (3 * 12**0.5))
    assert GPTConfig(block="factored", factored_gain=2.5).scales.epsilon == pytest.approx(2.5 / (3 * 12**0.5))
    assert GPTConfig(block="averaged").scales.epsilon == pytest.approx(1 / 36)
    assert GPTConfig().scales.epsilon == GPTConfig(block="prenorm").scales.epsilon == 1.0


def test_epsilon_of_a_trained_stack_that_is_looped():
    config = GPTConfig(block="prenorm", rounds=4, epsilon_exponent=0.5, prelude=2)
    assert config.scales.epsilon == 0.5
    assert config.part("prelude").scales.epsilon == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 4}, r"model\.kv_heads=4: must be 0 or a divisor of model\.heads=6"),
        ({"head_width": 33}, r"model\.head_width=33: must be 0 \(width / heads\), or even"),
        ({"rotary_scaling": (8.0, 4.0, 1.0, 64.0)}, r"model\.rotary_scaling=.*: must be empty, a factor"),
        ({"norm_eps": 0.0}, r"model\.norm_eps=0\.0: must be positive"),
        ({"qk_norm": "both"}, r"model\.qk_norm=both: must be one of after-rotary, before-rotary, none"),
        ({"epsilon_exponent": 0.5}, r"model\.epsilon_exponent=0\.5: must be 0 with model\.block=sandwich"),
    ],
)
def test_fields_of_pretrained_models_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)


def test_the_flat_block_is_a_sandwich_of_three_parts():
    flat = GPTConfig(block="flat", flat_gain=0.5)
    parts = GPTConfig(alpha="flat", beta="off", outer_gain=False, flat_gain=0.5)
    assert flat.scales == parts.scales == (0.5 * 3 * 12**0.5, 1.0, 1.0)
    assert flat.init_rule == parts.init_rule
    assert flat.init_rule.output_divisor == 1.0
    assert flat.rule is parts.rule is None


def test_the_parts_of_a_sandwich_are_set_one_by_one():
    alpha, beta, _ = GPTConfig().scales
    assert GPTConfig(alpha="flat").scales == (3 * 12**0.5, beta, 1.0)
    assert GPTConfig(beta="off").scales == (alpha, 1.0, 1.0)
    assert GPTConfig(beta="off").init_rule.output_divisor == 1.0
    assert GPTConfig(outer_gain=False).scales == GPTConfig().scales
    assert GPTConfig(outer_gain=False).rule == GPTConfig().rule
    assert GPTConfig(alpha="flat").rule is GPTConfig(beta="off").rule is None


@pytest.mark.parametrize("block", ["prenorm", "postnorm", "factored", "averaged"])
def test_unscaled_blocks_have_no_rule(block):
    config = GPTConfig(block=block)
    assert (config.scales.alpha, config.scales.beta, config.rule) == (1.0, 1.0, None)


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
            "model.block=norm: must be one of prenorm, postnorm, sandwich, factored, averaged, flat",
        ),
        ({"p": 0.0}, "model.p=0.0: must be positive and finite"),
        ({"p": float("inf")}, "model.p=inf: must be positive and finite"),
        *(
            (
                {"block": block, "p": 0.75},
                f"model.p=0.75: must be 0.5 with model.block={block}; only the sandwich has a rule",
            )
            for block in ("prenorm", "postnorm", "factored", "averaged", "flat")
        ),
        ({"alpha": "deep"}, "model.alpha=deep: must be paper or flat"),
        ({"beta": "1"}, "model.beta=1: must be on or off"),
        *(
            (
                {"block": block, name: value},
                f"model.{name}={value}: must be left at {default} with model.block={block}, which settles it",
            )
            for block in ("prenorm", "flat")
            for name, value, default in (
                ("alpha", "flat", "paper"),
                ("beta", "off", "on"),
                ("outer_gain", False, True),
            )
        ),
        (
            {"alpha": "flat", "beta": "off", "p": 0.25},
            "model.p=0.25: must be 0.5 with model.alpha=flat, beta=off",
        ),
        ({"flat_gain": 2.0}, "model.flat_gain=2.0: must be 1 with model.block=sandwich, model.alpha=paper"),
        (
            {"block": "prenorm", "flat_gain": 2.0},
            "model.flat_gain=2.0: must be 1 with model.block=prenorm, model.alpha=paper",
        ),
        ({"block": "flat", "flat_gain": 1e-300}, "model.flat_gain=1e-300: must be 1e-9 to 1e9"),
        (
            {"block": "flat", "inner_norm": False},
            "model.inner_norm=False: must be True with model.block=flat",
        ),
        (
            {"block": "prenorm", "inner_norm": False},
            "model.inner_norm=False: must be True with model.block=prenorm",
        ),
        ({"factored_gain": 2.0}, "model.factored_gain=2.0: must be 1 with model.block=sandwich"),
        (
            {"block": "factored", "factored_gain": 0.0},
            "model.factored_gain=0.0: must be 1e-9 to 1e9",
        ),
        ({"mup_base_width": -1}, "model.mup_base_width=-1: must be 0 (off) or a width"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError) as error:
        GPTConfig(**fields)
    assert str(error.value) == message
