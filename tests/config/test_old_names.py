"""Configs of 0.2.0: each field of a rule is read as the rule that it described."""

import pytest

from deeploop.config import old_names
from deeploop.config.json import from_dict
from deeploop.models import GPTConfig, HRMConfig


@pytest.mark.parametrize(
    ("old", "rule"),
    [
        ({"block": "sandwich"}, "deeploop"),
        ({"p": 0.25}, "deepnorm"),
        ({"block": "sandwich", "p": 0.3, "scale_gate": False}, "deeploop:p=0.3,gate=off"),
        ({"p": 0.25, "inner_norm": False}, "deepnorm:inner_norm=off"),
        ({"block": "flat", "flat_gain": 2.0}, "flat:gain=2"),
        ({"flat_gain": 2.0}, "flat:gain=2"),
        ({"alpha": "flat", "flat_gain": 2.0}, "deeploop:alpha=flat,gain=2"),
        ({"alpha": "flat", "beta": "off", "outer_gain": False}, "flat"),
        ({"block": "prenorm", "epsilon_exponent": 0.5}, "prenorm:q=0.5"),
        ({"block": "prenorm", "shrink_outputs": False}, "prenorm:shrink=off"),
        ({"block": "prenorm", "shrink_outputs": True, "scale_gate": False}, "prenorm"),
        ({"block": "factored", "factored_gain": 2.5}, "factored:gain=2.5"),
        ({"block": "averaged", "p": 0.5, "alpha": "paper"}, "averaged"),
        ({"block": "postnorm"}, "postnorm"),
    ],
)
def test_the_fields_of_a_rule_are_one(old, rule):
    assert from_dict(GPTConfig, {"width": 12, **old}) == GPTConfig(width=12, rule=rule)
    fields = {f"model.{name}": value for name, value in old.items()}
    assert old_names.fields({"seed": 1, **fields}, "language") == {"seed": 1, "model.rule": rule}


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ({"block": "round"}, "model.block='round': must be one of sandwich, flat"),
        ({"block": ["flat"]}, "model.block=['flat']: must be one of sandwich, flat"),
        ({"block": "flat", "p": 0.3}, "model.p=0.3: must be 0.5 with model.block=flat"),
        ({"p": "half"}, "model.rule=deeploop:p=half: p=half: must be a number"),
        ({"p": {}}, "model.rule=deeploop:p={}: p={}: must be a number"),
    ],
)
def test_what_0_2_0_refused_still_is(old, message):
    with pytest.raises(ValueError) as error:
        from_dict(GPTConfig, old)
    assert str(error.value).startswith(message)


def test_what_is_not_old_stays():
    new = {"width": 8, "rule": "flat"}
    assert old_names.model_section(new) == new
    assert old_names.model_section({"width": 8}) == {"width": 8}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"p": 0.0, "high_p": None, "flat": False, "flat_gain": 1.0}, {"rule": "postnorm", "high_rule": ""}),
        ({"p": 0.5, "high_p": 0.25}, {"rule": "deeploop", "high_rule": "deepnorm"}),
        ({"p": 0.3, "high_p": 0.0}, {"rule": "deeploop:p=0.3", "high_rule": "postnorm"}),
        ({"flat": True, "flat_gain": 2.0, "p": 0.0}, {"rule": "flat:gain=2"}),
        ({"p": 0.5, "depth": 0}, {"rule": "deeploop", "depth": 0, "depth_from": "graph"}),
        ({"p": 0.5, "depth": 7}, {"rule": "deeploop", "depth": 7}),
        ({"rule": "flat", "width": 16}, {"rule": "flat", "width": 16}),
    ],
)
def test_the_rule_of_a_reasoner_is_one_too(old, new):
    assert old_names.reasoner_section(old) == new
    config = from_dict(HRMConfig, old)
    assert config == HRMConfig(**new)
    fields = {f"model.{name}": value for name, value in {"depth_from": "cycles", **old}.items()}
    expected = {f"model.{name}": value for name, value in {"depth_from": "cycles", **new}.items()}
    if "depth_from" not in new:
        assert old_names.fields({"seed": 1, **fields}, "hrm") == {"seed": 1, **expected}
    assert old_names.settings({"model.p": 0.25, "model.high_p": 0.5}, "hrm-sudoku4") == {
        "model.rule": "deepnorm",
        "model.high_rule": "deeploop",
    }


def test_the_rule_takes_the_place_of_the_first_old_field():
    found = old_names.fields({"seed": 0, "model.block": "flat", "optim.steps": 1, "model.p": 0.5}, "language")
    assert [*found] == ["seed", "model.rule", "optim.steps"]


def test_settings_of_a_cell_are_canonical():
    assert old_names.settings({"model.rule": "deeploop:p=0.25"}, "tiny") == {"model.rule": "deepnorm"}
    assert old_names.settings({"model.p": 0.25, "seed": 1}, "tiny") == {"model.rule": "deepnorm", "seed": 1}


def test_a_recorded_cell_has_the_unigram_bias_that_its_recipe_had():
    bias = {"model.unigram_bias": True}
    assert old_names.cell({"seed": 1}, "tiny") == ("tiny", {"model.unigram_bias": False, "seed": 1})
    assert old_names.cell({"seed": 1}, "tiny-stable") == ("tiny", {**bias, "seed": 1})
    flat = {"model.rule": "flat", **bias}
    assert old_names.cell({}, "gpt2-small-flat") == ("gpt2-small", flat)
    assert old_names.cell(bias, "gpt2-small") == ("gpt2-small", bias)
    for other in ("hrm-sudoku4", "automaton", "tiny-recurrent"):
        assert old_names.cell({}, other) == (other, {})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--model.block sandwich --model.p 0.25",
            "--model.block sandwich --model.p 0.25: is now --rule deepnorm",
        ),
        ("--seed 1 --model.flat-gain=2", "--model.flat-gain=2: is now --rule flat:gain=2"),
        ("--model.no-outer-gain", "--model.no-outer-gain: is now --rule deeploop:outer_gain=off"),
        ("--model.no_scale_gate", "--model.no_scale_gate: is now --rule deeploop:gate=off"),
        ("--model.block flat", "--model.block flat: is now --rule flat"),
    ],
)
def test_old_flags_are_answered_with_the_new_one(words, says):
    with pytest.raises(ValueError) as error:
        old_names.require_new_flags(words.split())
    assert str(error.value) == says


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model.p 0.5", "--model.p 0.5: is now --rule deeploop"),
        ("--model.p=0.5 --model.high-p 0.25", "is now --rule deeploop --model.high-rule deepnorm"),
        ("--model.flat --seed 2", "--model.flat: is now --rule flat"),
        ("--model.flat --model.flat-gain 2", "is now --rule flat:gain=2"),
    ],
)
def test_old_flags_of_reasoners_are_answered_too(words, says):
    with pytest.raises(ValueError) as error:
        old_names.require_new_flags(words.split(), "hrm")
    assert str(error.value).endswith(says)


def test_new_flags_pass():
    old_names.require_new_flags("--model.rule flat --model.width 8 --out model.p --seed 1".split())  # noqa: SIM905


@pytest.mark.parametrize(
    "word", ["--optim.wait-for-escape", "--optim.no-wait_for_escape", "--optim.branch-lr=0.1"]
)
def test_removed_flags_are_answered_with_what_to_use(word):
    with pytest.raises(ValueError, match=r"^--optim\.[a-z_-]+: was removed; use --model\.unigram-bias"):
        old_names.require_new_flags([word])


def test_a_removed_option_tells_runs_apart_only_where_it_was_used():
    unused = {"optim.branch_lr": 1.0, "optim.branch_release_steps": 0, "optim.wait_for_escape": False}
    used = unused | {"optim.branch_lr": 0.1}
    assert old_names.fields({"seed": 1, **unused}, "language") == {"seed": 1}
    assert old_names.fields({"seed": 1, **used}, "language") == {"seed": 1, "optim.branch_lr": 0.1}
