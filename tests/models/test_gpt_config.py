"""GPTConfig: derived numbers, and one-line errors."""

import subprocess
import sys

import pytest

from deeploop.models import GPTConfig
from deeploop.rules import NAMED


def test_epsilon_of_the_blocks_that_scale_their_branches():
    assert GPTConfig(rule="factored").scales.epsilon == pytest.approx(1 / (3 * 12**0.5))
    assert GPTConfig(rule="factored:gain=2.5").scales.epsilon == pytest.approx(2.5 / (3 * 12**0.5))
    assert GPTConfig(rule="averaged").scales.epsilon == pytest.approx(1 / 36)
    assert GPTConfig().scales.epsilon == GPTConfig(rule="prenorm").scales.epsilon == 1.0


def test_epsilon_of_a_trained_stack_that_is_looped():
    config = GPTConfig(rule="prenorm:q=0.5", rounds=4, prelude=2)
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
    ],
)
def test_fields_of_pretrained_models_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)


def test_the_flat_rule_is_deeploop_with_three_parts_changed():
    flat = GPTConfig(rule="flat:gain=0.5")
    parts = GPTConfig(rule="deeploop:alpha=flat,beta=off,outer_gain=off,gain=0.5")
    assert flat == parts
    assert flat.scales == (0.5 * 3 * 12**0.5, 1.0, 1.0)
    assert flat.init_rule.output_divisor == 1.0
    assert flat.residual.law is None


def test_the_parts_of_deeploop_are_set_one_by_one():
    alpha, beta, _ = GPTConfig().scales
    assert GPTConfig(rule="deeploop:alpha=flat").scales == (3 * 12**0.5, beta, 1.0)
    assert GPTConfig(rule="deeploop:beta=off").scales == (alpha, 1.0, 1.0)
    assert GPTConfig(rule="deeploop:beta=off").init_rule.output_divisor == 1.0
    assert GPTConfig(rule="deeploop:outer_gain=off").scales == GPTConfig().scales
    assert GPTConfig(rule="deeploop:outer_gain=off").residual.law == GPTConfig().residual.law
    assert all(GPTConfig(rule=f"deeploop:{part}").residual.law is None for part in ("alpha=flat", "beta=off"))


@pytest.mark.parametrize("rule", ["prenorm", "postnorm", "factored", "averaged"])
def test_unscaled_rules_have_no_law(rule):
    config = GPTConfig(rule=rule)
    assert (config.scales.alpha, config.scales.beta, config.residual.law) == (1.0, 1.0, None)


def test_a_rule_has_one_text():
    assert GPTConfig(rule="deeploop:p=0.25") == GPTConfig(rule="deepnorm")
    assert GPTConfig(rule="deeploop:gate=on").rule == "deeploop"


def test_a_config_is_made_without_torch():
    code = "import deeploop, sys; deeploop.GPTConfig(rule='flat'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_derived_sizes():
    assert GPTConfig().padded_vocabulary == 50304
    assert GPTConfig(vocabulary=257).padded_vocabulary == 320
    assert GPTConfig(vocabulary=320).padded_vocabulary == 320
    assert GPTConfig().head_size == 128


def test_width_mup_multiplier():
    assert GPTConfig().matrix_lr_multiplier == 1.0
    assert GPTConfig(mup_base_width=1024).matrix_lr_multiplier == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": 0}, "model.blocks=0: must be at least 1"),
        ({"rounds": 0}, "model.rounds=0: must be at least 1"),
        ({"rounds": 2.5}, "model.rounds=2.5: must be a whole number"),
        ({"width": -8}, "model.width=-8: must be at least 1"),
        ({"heads": 0}, "model.heads=0: must be at least 1"),
        ({"hidden": 0}, "model.hidden=0: must be at least 1"),
        ({"vocabulary": 0}, "model.vocabulary=0: must be at least 1"),
        ({"context": 0}, "model.context=0: must be at least 1"),
        ({"heads": 5}, "model.heads=5: must be a divisor of model.width=768"),
        ({"width": 6, "heads": 2}, "model.heads=2: must be such that model.width=6 / heads is even"),
        (
            {"rule": "postnrm"},
            f"model.rule=postnrm: must be one of {', '.join(NAMED)}; perhaps postnorm",
        ),
        ({"rule": "deeploop:p=0"}, "model.rule=deeploop:p=0: p=0: must be a positive number"),
        ({"rule": "deeploop:p=inf"}, "model.rule=deeploop:p=inf: p=inf: must be a positive number"),
        *(
            ({"rule": f"{rule}:p=0.75"}, f"model.rule={rule}:p=0.75: p: no parameter of {rule}; it has {has}")
            for rule, has in (
                ("prenorm", "q, shrink"),
                ("postnorm", "shrink"),
                ("factored", "gain, shrink"),
                ("averaged", "shrink"),
                ("flat", "gain, inner_norm, shrink"),
            )
        ),
        (
            {"rule": "deeploop:alpha=deep"},
            "model.rule=deeploop:alpha=deep: alpha=deep: must be paper or flat",
        ),
        ({"rule": "deeploop:beta=1"}, "model.rule=deeploop:beta=1: beta=1: must be on or off"),
        ({"rule": "deeploop:p"}, "model.rule=deeploop:p: p=: must be a number"),
        ({"rule": "deeploop:p=1,p=2"}, "model.rule=deeploop:p=1,p=2: p: is given twice"),
        (
            {"rule": "deeploop:alpha=flat,beta=off,p=0.25"},
            "model.rule=deeploop:alpha=flat,beta=off,p=0.25: p=0.25: must be left out with alpha=flat, "
            "beta=off",
        ),
        (
            {"rule": "deeploop:gain=2"},
            "model.rule=deeploop:gain=2: gain=2: must be 1 without alpha=flat",
        ),
        ({"rule": "flat:gain=1e-300"}, "model.rule=flat:gain=1e-300: gain=1e-300: must be 1e-9 to 1e9"),
        ({"rule": "factored:gain=0"}, "model.rule=factored:gain=0: gain=0: must be 1e-9 to 1e9"),
        ({"rule": "prenorm:q=3"}, "model.rule=prenorm:q=3: q=3: must be 0 to 2"),
        ({"mup_base_width": -1}, "model.mup_base_width=-1: must be 0 (off) or a width"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError) as error:
        GPTConfig(**fields)
    assert str(error.value) == message
