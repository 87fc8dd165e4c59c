"""`deeploop recommend`: the best rule of long training, and rates that follow shape and batch smoothly."""

import itertools
import json
import math
import shlex
from dataclasses import replace

import pytest

import deeploop
from deeploop.cli import main
from deeploop.commands import train as train_command
from deeploop.config.json import leaf_hints
from deeploop.config.short_names import full_words
from deeploop.report import recommend as module
from deeploop.report.recommend import Line, Order, read_lines, recommend
from deeploop.tasks.recipes import get_recipe

SHAPE = {"blocks": 4, "rounds": 7, "width": 128, "tokens": 126_000_000, "batch_tokens": 32_768}
LINE = Line(
    base=4e-3,
    slope=-0.5,
    spread=0.5,
    points=8,
    blocks=(2, 8),
    rounds=(1, 16),
    width=(128, 512),
    batch_tokens=(4096, 32_768),
    tokens=(10**6, 10**9),
    highest=64e-3,
    folders=("docs/results/a",),
)
ORDER = Order(
    "docs/results/long",
    "K = 4",
    rounds=7,
    tokens=10**9,
    blocks=4,
    width=256,
    losses={"deeploop": 1.0, "flat": 1.001, "prenorm": 1.2},
    level=("deeploop", "flat"),
)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(module, "read_lines", lambda: ({"deeploop": LINE, "prenorm": LINE}, ORDER))


def test_the_rule_is_the_best_of_long_training():
    _, order = read_lines()
    assert recommend(**SHAPE).rule == order.level[0] == min(order.losses, key=order.losses.__getitem__)


def test_the_rate_is_the_line_at_the_nearest_octave(known):
    found = recommend(4, 14, 256, 10**9, 16_384)
    line = 4e-3 * 14**-0.5 * 384 / 256 * 2
    assert found.rates == pytest.approx((2e-3, 4e-3, 8e-3))
    assert abs(math.log2(found.rates[1] / line)) <= 0.5
    assert found.notes == ()


def test_neighbours_differ_by_an_octave_at_most():
    """One step in any of the five numbers moves the rates by an octave or not at all."""
    steps = {
        "blocks": (1, 2, 3, 4, 6, 8, 12, 16),
        "rounds": (1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
        "width": (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536),
        "batch_tokens": tuple(1024 * 2**n for n in range(8)),
        "tokens": (10**6, 10**8, 10**10),
    }
    for name, values in steps.items():
        for one, other in itertools.pairwise(values):
            answers = [recommend(**{**SHAPE, name: value}) for value in (one, other)]
            assert answers[0].rule == answers[1].rule
            assert abs(math.log2(answers[0].rates[1] / answers[1].rates[1])) <= 1 + 1e-9, (name, one, other)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("blocks", None, 32), ("width", 32, 2048), ("batch_tokens", 1024, 131_072), ("rounds", None, 64)],
)
def test_beyond_four_times_the_runs_there_is_no_answer(known, name, low, high):
    asked = {**SHAPE, "width": 256}
    assert recommend(**{**asked, name: high}).notes
    for value in (high + 1, *([low - 1] if low else [])):
        with pytest.raises(ValueError, match=rf"{name}={value} \(.*our runs: .* 4 times beyond"):
            recommend(**{**asked, name: value})


def test_the_papers_models_are_beyond_the_runs_and_every_reason_is_named():
    with pytest.raises(ValueError, match="4 times beyond our runs, so no rate is named") as refused:
        recommend(24, 3, 1024, 49_152_000_000, 480 * 1024)
    assert str(refused.value).startswith(
        "blocks=24 (our runs: 4), batch_tokens=491520 (batch × context; our runs: 4,096 to 32,768): "
    )
    optim = get_recipe("gpt2-medium").optim
    assert f"{optim.peak_lr * 1e3:g}e-3 at {optim.batch} × 1,024 tokens" in str(refused.value)


def test_what_differs_from_the_runs_is_said(known):
    found = recommend(16, 7, 256, 10**10, 16_384)
    assert found.notes == (
        "blocks 16: our runs have 2 to 8",
        "tokens 10,000,000,000: our runs have 1,000,000 to 1,000,000,000",
    )


# Shapes where the evidence says less than rates and a rule: what an answer must say there.
@pytest.mark.parametrize(
    ("asked", "rule", "said"),
    [
        ({"rounds": 1}, None, "at R = 1 deeploop and prenorm cannot be told apart"),
        ({"rounds": 16}, None, "ranked at R = 7; in short runs at R = 16 flat was ahead"),
        ({"rounds": 64}, None, "rounds 64: our runs have 1 to 16"),
        ({"width": 384, "tokens": 2_900_000}, None, "here 0.41; in short runs the order is another"),
        ({"tokens": 10**10}, None, "tokens 10,000,000,000: our runs have"),
        ({"tokens": 10**5}, "flat", "tokens 100,000: our runs have"),
        ({"blocks": 12}, "prenorm", "blocks 12: our runs have 4"),
        ({"width": 32}, None, "none above 0.064 was run"),
        ({"width": 32}, "prenorm", "none above 0.032 was run"),
        ({"batch_tokens": 1024}, None, "batch tokens 1,024: our runs have"),
    ],
)
def test_where_our_runs_say_less_the_answer_says_so(asked, rule, said):
    assert said in " | ".join(recommend(**{**SHAPE, **asked}, rule=rule).notes)


def test_inside_our_runs_nothing_is_held_back():
    assert recommend(**SHAPE).notes == recommend(**SHAPE | {"rounds": 3}).notes == ()


def test_rates_that_our_runs_lost_are_not_the_middle():
    """Flat at width 768 and R = 4 (docs/results/shapes): 1e-3 trains, 2e-3 is lost."""
    assert recommend(4, 4, 768, 2_870_000, 4096, rule="flat").rates[1] == 1e-3


def test_less_than_one_step_is_refused():
    with pytest.raises(ValueError, match=r"tokens=1,000: fewer than the 32,768 of one step"):
        recommend(**SHAPE | {"tokens": 1000})


@pytest.mark.parametrize("name", SHAPE)
def test_a_number_below_1_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        recommend(**{**SHAPE, name: 0})


def test_a_rule_without_runs_is_refused():
    with pytest.raises(ValueError, match=r"rule=deeploop:p=0.3: none of our runs has it; they have averaged"):
        recommend(**SHAPE, rule="deeploop:p=0.3")


def ask(capsys, *more):
    words = "recommend --blocks 4 --rounds 7 --width 256 --tokens 1e8 --batch 64 --context 256"
    assert main([*words.split(), *more]) == 0
    return capsys.readouterr().out


def test_the_command_says_where_the_rule_stands_and_what_to_type(known, capsys):
    text = ask(capsys)
    assert "cannot be told apart from flat; ahead by 0.200 of prenorm" in text
    assert "compare 2e-3, 4e-3, 8e-3" in text
    assert "0.200 behind deeploop" in ask(capsys, "--rule", "prenorm")


def test_the_printed_command_is_a_run(capsys, tmp_path):
    words = shlex.split(ask(capsys).splitlines()[-1])
    assert words[:3] == ["deeploop", "train", "gpt2-small"]
    base = get_recipe("gpt2-small")
    config = train_command.parse(
        type(base), full_words(words[3:], leaf_hints(type(base))), prog="deeploop train", default=base
    )
    assert (config.model.blocks, config.model.rounds, config.model.width) == (4, 7, 256)
    assert config.optim.steps * config.optim.batch * config.model.context >= 1e8
    assert config.optim.peak_lr == recommend(4, 7, 256, 10**8, 64 * 256).rates[1]


def test_json_has_the_same(capsys):
    record = json.loads(ask(capsys, "--json"))
    found = deeploop.recommend(4, 7, 256, 10**8, 64 * 256)
    assert record["rates"] == list(found.rates)
    assert record["command"].startswith("deeploop train ")


def test_auto_lr_is_the_same_answer():
    base = get_recipe("tiny")
    config = replace(base, model=replace(base.model, unigram_bias=True))
    found, (told,) = train_command.with_measured_rate(config, [])
    model, optim = config.model, config.optim
    tokens = optim.batch * model.context
    wanted = recommend(model.blocks, model.rounds, model.width, optim.steps * tokens, tokens, rule=model.rule)
    assert found.optim.peak_lr == wanted.rates[1]
    assert f"peak rate {wanted.rates[1]:g}" in told


def test_auto_lr_is_for_adamw():
    config = get_recipe("tiny")
    with pytest.raises(ValueError, match=r"optim\.kind=muon: our rates are AdamW's; or leave --auto-lr out"):
        train_command.with_measured_rate(replace(config, optim=replace(config.optim, kind="muon")), [])
