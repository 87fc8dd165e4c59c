"""Residual rules: their texts, their equations, what they share and what they refuse."""

from dataclasses import replace

import pytest

from deeploop.rules import DEEPLOOP, DEEPNORM, FLAT, NAMED, RULES, parse

TEXTS = (
    *NAMED,
    *("deeploop:p=0.3", "deepnorm:inner_norm=off", "deeploop:p=0.3,alpha=flat,gain=2,outer_gain=off"),
    *("deeploop:alpha=flat,beta=off", "flat:gain=0.5", "prenorm:q=0.5,shrink=off", "factored:gain=2.5"),
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_the_rule_that_it_names(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("deeploop:p=0.25", "deepnorm"),
        ("deepnorm:beta=on", "deepnorm"),
        ("deeploop:outer_gain=FALSE,p=.5", "deeploop:outer_gain=off"),
        ("deepnorm:alpha=flat,beta=off,outer_gain=off", "flat"),
        ("deepnorm:alpha=flat,beta=off", "deeploop:alpha=flat,beta=off"),
        ("deeploop:alpha=flat,beta=off,outer_gain=off,inner_norm=off,gain=3", "flat:gain=3,inner_norm=off"),
    ],
)
def test_what_computes_the_same_has_one_name(text, canonical):
    assert str(parse(text)) == canonical


def test_rules_are_varied_in_python_too():
    assert DEEPLOOP.vary(p=0.25) == DEEPNORM
    assert str(FLAT.vary(gain=2.0)) == "flat:gain=2"
    with pytest.raises(ValueError, match=r"^p: no parameter of flat; it has gain, inner_norm, shrink$"):
        FLAT.vary(p=0.5)


@pytest.mark.parametrize(
    ("text", "equation", "formula"),
    [
        ("deeploop", "x ← Norm(α·x + f(Norm(x)))", "α = (2N)^p"),
        ("deepnorm:inner_norm=off", "x ← Norm(α·x + f(x))", "α = (2N)^p"),
        ("flat", "x ← Norm(α·x + f(Norm(x)·g))", "α = λ·R·√K"),
        ("prenorm", "x ← x + f(Norm(x))", ""),
        ("prenorm:q=0.5", "x ← x + ε·f(Norm(x))", "ε = R^-q"),
        ("postnorm", "x ← Norm(x + f(x))", ""),
        ("averaged", "x ← x + ε·f(Norm(x))", "ε = 1/N"),
        ("lnscale", "x ← x + f(Norm(x)/√k)", ""),
        ("factored", "x ← x + ε·f(Norm(x))", "ε = λ/(R√K)"),
    ],
)
def test_the_equation_is_written_out(text, equation, formula):
    assert (parse(text).equation, parse(text).formula) == (equation, formula)


def test_who_counts_the_depth_gives_it():
    assert DEEPLOOP.scales(2, 3, N=8)[:2] == (4.0, 1 / 8)
    assert DEEPLOOP.scales(2, 4) == DEEPLOOP.scales(99, 99, N=8)


def test_names_labels_and_colours_differ():
    for field in ("name", "label", "colour"):
        assert len({getattr(rule, field) for rule in RULES}) == len(RULES)


def test_a_rule_is_checked_however_it_is_made():
    with pytest.raises(ValueError, match=r"^p=nan: must be a positive number$"):
        replace(DEEPLOOP, p=float("nan"))
