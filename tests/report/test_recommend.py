"""`deeploop recommend` and `train --auto-lr`: a rule and a rate by measured ones, or a line that refuses."""

import functools
import json
from dataclasses import replace

import pytest

import deeploop
from deeploop.cli import main
from deeploop.commands import recommend as command
from deeploop.report.evidence import Evidence, Measured, Rate, read_evidence
from deeploop.report.recommend import recommend
from deeploop.tasks.recipes import get_recipe
from deeploop.theory import flat_alpha

DEEPLOOP = {"model.rule": "deeploop", "model.unigram_bias": True}


def measured(rule, settings, rates, *, transfers=True, marks=(), octave=0.05):
    """rates: R → (peak, loss)."""
    found = tuple(
        Rate(R, peak, (peak / 1.1, peak * 1.1), mark, loss, None if mark else octave, 3, (f"{rule}-r{R}",))
        for R, (peak, loss) in rates.items()
        for mark in ["cliff" if R in marks else ""]
    )
    return Measured(
        rule, settings, found, 0.0, None, 0.0, transfers, "transfers" if transfers else "does not"
    )


def block(name):
    return {"model.rule": name, "model.unigram_bias": True}


FLAT = measured("flat", block("flat"), {1: (4e-3, 4.90), 4: (4e-3, 4.87), 16: (4e-3, 4.88)})
PRENORM = measured("pre-norm", block("prenorm"), {1: (4e-3, 4.93), 16: (1e-3, 4.98)}, transfers=False)
SANDWICH = measured("DeepLoop", DEEPLOOP, {1: (4e-3, 4.80), 16: (4e-3, 4.92)}, marks=(16,))
TRANSFER = Evidence(
    "docs/results/transfer", blocks=4, width=384, context=512, batch=8, steps=700, warmup_steps=140,
    optimizer="adamw", corpus="words", rules=(FLAT, PRENORM, SANDWICH),
)  # fmt: skip
ask = functools.partial(recommend, evidence=[TRANSFER])


@pytest.fixture
def known(monkeypatch):
    """The commands with this evidence."""
    monkeypatch.setattr(command, "recommend", ask)
    monkeypatch.setattr("deeploop.report.recommend.recommend", ask)


def test_a_measured_point():
    found = ask(4, 16, 384, TRANSFER.tokens)
    assert (found.rule, found.peak_lr, found.warmup) == ("flat", 4e-3, 0.2)
    assert found.interval == pytest.approx((4e-3 / 1.1, 4.4e-3))
    assert found.scales == (flat_alpha(4, 16), 1.0, 1.0)
    assert found.runs == ("flat-r16",)
    assert found.extrapolated == ()
    assert [one.rule for one in found.compared] == ["flat", "DeepLoop", "pre-norm"]


def test_the_best_rule_at_r_wins_but_for_a_cliff_and_for_one_that_transfers():
    assert ask(4, 1, 384).rule == "DeepLoop"
    assert ask(4, 16, 384).rule == "flat"  # DeepLoop is beside a cliff there
    near = replace(PRENORM, rates=(replace(PRENORM.rates[0], loss=4.872, rounds=4),))
    level = replace(TRANSFER, rules=(replace(near, rates=(replace(near.rates[0], loss=4.852),)), FLAT))
    assert recommend(4, 4, 384, evidence=[level]).rule == "flat"  # within 0.02, and it keeps its rate
    ahead = replace(TRANSFER, rules=(replace(near, rates=(replace(near.rates[0], loss=4.848),)), FLAT))
    assert recommend(4, 4, 384, evidence=[ahead]).rule == "pre-norm"
    behind = tuple(replace(rate, loss=rate.loss + 0.019, octave=0.04) for rate in FLAT.rates)
    forgiving = replace(FLAT, rule="forgiving", settings=block("prenorm"), rates=behind)
    both = replace(TRANSFER, rules=(FLAT, forgiving))
    assert recommend(4, 4, 384, evidence=[both]).rule == "forgiving"  # level, and an octave off costs less
    averaged = replace(TRANSFER, rules=(FLAT, replace(forgiving, settings=block("averaged"))))
    assert recommend(4, 4, 384, evidence=[averaged]).rule == "flat"  # averaged is behind in long training
    wider = replace(TRANSFER, folder="wide", width=768, rules=(replace(FLAT, rates=FLAT.rates[:1]),))
    (other,) = recommend(4, 1, 512, evidence=[TRANSFER, wider], settings=block("flat")).other_widths
    assert other == "0.004 at width 768, K = 4 (wide)"


def test_between_two_rounds_the_rate_is_a_geometric_mean():
    found = ask(4, 4, 384, settings=block("prenorm"))
    assert found.peak_lr == 2e-3  # halfway between R = 1 and 16 in ln R
    assert found.interval is None
    assert found.runs == ("pre-norm-r1", "pre-norm-r16")
    assert any("between the measured 1 and 16" in text for text in found.extrapolated)


def test_what_differs_is_said():
    found = ask(12, 64, 768, 4 * TRANSFER.tokens)
    assert found.rule == "flat"
    assert found.scales.alpha == flat_alpha(12, 64)
    assert ask(4, 16, 768).interval is ask(12, 16, 384).interval is None  # of seeds of another shape
    assert found.extrapolated == (
        "blocks 12: the runs have 4; their rate is taken as it is",
        "width 768: the runs have 384; their rate is taken as it is",
        f"tokens {4 * TRANSFER.tokens:,}: the runs have {TRANSFER.tokens:,}; their rate is taken as it is",
        "rounds 64: as at R = 16",
    )
    (tokens,) = ask(4, 16, 384).extrapolated
    assert tokens == "tokens: of 2.9 M only; name yours with --tokens"
    (bias, _) = ask(4, 16, 384, settings={"model.rule": "flat", "model.unigram_bias": False}).extrapolated
    assert bias == "the runs were with the unigram bias (--model.unigram-bias)"


def test_the_nearest_runs_that_have_the_rule_give_the_rate():
    wide = replace(TRANSFER, folder="docs/results/wide", width=768, rules=(measured(
        "flat", block("flat"), {4: (2e-3, 4.5)}, transfers=None),))  # fmt: skip
    both = functools.partial(recommend, evidence=[TRANSFER, wide])
    assert both(4, 4, 768).peak_lr == 2e-3
    assert both(4, 4, 768).chosen_in == TRANSFER.conditions  # one rule alone compares nothing
    assert both(4, 16, 768).folder == "docs/results/transfer"  # which has that R
    assert both(4, 4, 400).peak_lr == 4e-3
    # A study that compares rules is carried over R where another study says that the rule transfers.
    other = measured("pre-norm", block("prenorm"), {4: (1e-3, 4.7)}, transfers=None)
    compares = functools.partial(recommend, evidence=[TRANSFER, replace(wide, rules=(*wide.rules, other))])
    assert compares(4, 3, 768).peak_lr == 2e-3
    assert "rounds 3: as at R = 4" in compares(4, 3, 768).extrapolated
    for R in (1, 64):  # as far as it is carried there
        rates = [compares(4, R, width, settings=block("flat")).peak_lr for width in (768, 384)]
        assert rates == [2e-3, 4e-3]
    with pytest.raises(ValueError, match="rounds=65: no evidence"):
        compares(4, 65, 768)


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ((17, 4, 384), ["blocks=17: no evidence", "have 4", "--set model.blocks=17`"]),
        ((4, 4, 2000), ["width=2000: no evidence", "have 384", "--set model.width=2000 model.heads"]),
        (
            (4, 65, 384),
            [
                "rounds=65: no evidence",
                "flat at R = 1, 4, 16 (docs/results/transfer)",
                "model.rounds = [1, 65]",
            ],
        ),
        (
            (4, 4, 384, 10**9),
            ["tokens=1000000000: no evidence", "a sweep of runs that long"],
        ),
        ((0, 4, 384), ["blocks=0: must be at least 1"]),
    ],
)
def test_it_refuses_what_it_has_no_evidence_for(question, told):
    with pytest.raises(ValueError) as caught:
        ask(*question)
    for text in told:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rule_that_does_not_transfer_is_not_carried_further():
    with pytest.raises(ValueError, match="rounds=32: no evidence"):
        ask(4, 32, 384, settings=block("prenorm"))
    assert ask(4, 32, 384, settings=block("flat")).peak_lr == 4e-3
    with pytest.raises(ValueError, match="DeepLoop: its best rate is beside a cliff at K = 4, width 384"):
        ask(4, 16, 384, settings=DEEPLOOP)
    with pytest.raises(ValueError, match=r"model\.rule=postnorm: no evidence for this rule"):
        ask(4, 4, 384, settings=block("postnorm"))
    with pytest.raises(ValueError, match="no evidence for this rule"):
        ask(4, 1, 384, settings=DEEPLOOP | {"model.rule": "deepnorm"})


def test_a_cliff_at_a_nearby_shape_is_a_warning():
    cliff = replace(FLAT, rates=(replace(FLAT.rates[1], mark="cliff", peak=1e-3),), transfers=None)
    averaged = measured("1/N", block("averaged"), {4: (4e-3, 5.1)}, transfers=None)
    wide = replace(TRANSFER, folder="wide", width=768, rules=(cliff, averaged))
    at = functools.partial(recommend, evidence=[TRANSFER, wide])
    assert at(4, 4, 768).rule == "1/N"  # the rule that trains there, though flat is ahead elsewhere
    assert at(4, 4, 512).rule != "flat"  # 768 is an octave from 384, and less than that from 512
    for R in (3, 64):  # a warning at R = 4 reaches as far as the rule would be carried
        with pytest.raises(ValueError, match="flat: its best rate is beside a cliff"):
            at(4, R, 768, settings=block("flat"))
    assert at(4, 4, 384).rule == at(4, 4, 300).rule == "flat" == ask(4, 4, 768).rule
    with pytest.raises(ValueError, match="flat: its best rate is beside a cliff at K = 4, width 768"):
        at(4, 4, 768, settings=block("flat"))
    # A study that is too far for a rate still warns, and a rate from beside a cliff is not taken from afar.
    deep = replace(
        TRANSFER, folder="deep", blocks=12, width=256, rules=(replace(FLAT, rates=FLAT.rates[1:2]),)
    )
    with pytest.raises(ValueError, match="beside a cliff at K = 4, width 768"):
        recommend(17, 4, 768, evidence=[deep, wide], settings=block("flat"))
    marked = replace(FLAT, rates=(*FLAT.rates[:2], replace(FLAT.rates[2], mark="cliff")))
    single = replace(
        TRANSFER,
        folder="single",
        blocks=1,
        width=256,
        rules=(replace(FLAT, rates=FLAT.rates[1:2], transfers=None),),
    )
    few = [replace(TRANSFER, rules=(marked,)), single]
    assert recommend(1, 4, 128, evidence=few, settings=block("flat")).folder == "single"
    with pytest.raises(ValueError, match="beside a cliff at K = 4, width 384"):
        recommend(1, 16, 128, evidence=few, settings=block("flat"))


def test_without_runs_it_says_which_command_gives_them():
    for evidence, optimizer in (([], "adamw"), ([TRANSFER], "muon")):
        with pytest.raises(ValueError, match=f"no runs with {optimizer}; `deeploop sweep transfer"):
            recommend(4, 4, 384, evidence=evidence, optimizer=optimizer)


def test_the_command(known, capsys):
    assert main(["recommend", "--blocks", "4", "--rounds", "16", "--width", "384"]) == 0
    out = capsys.readouterr().out
    assert "rule          flat: --model.rule flat --model.unigram-bias\n" in out
    assert "α             32\n" in out
    assert "peak rate     0.004 (95% over seeds: 0.0036 to 0.0044)\n" in out
    assert "docs/results/transfer: flat-r16\n" in out
    assert main(["recommend", "--blocks", "4", "--rounds", "16", "--width", "384", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["peak_lr"], found["scales"]["alpha"]) == (4e-3, 32)
    assert main(["recommend", "--blocks", "99", "--rounds", "16", "--width", "384"]) == 2
    assert "deeploop recommend: error: blocks=99: no evidence" in capsys.readouterr().err


def test_flags_name_the_rule_and_the_bias():
    rule = "deepnorm:beta=off,outer_gain=off"
    found = replace(ask(4, 16, 384), settings=DEEPLOOP | {"model.rule": rule})
    assert command.flags(found) == f"--model.rule {rule} --model.unigram-bias"
    found = replace(found, settings={"model.rule": "flat", "model.unigram_bias": False})
    assert command.flags(found) == "--model.rule flat"


def test_python_has_it_too():
    assert deeploop.recommend is recommend
    assert all(isinstance(one, Evidence) for one in read_evidence())


# ── train --auto-lr ─────────────────────────────────────────────────────────────────────────────────────
SMALL = "--model.blocks 4 --model.width 384 --model.heads 3 --optim.steps 1000 --optim.batch 8"


@pytest.fixture
def trained(monkeypatch):
    """The config that `deeploop train` would have trained."""
    seen = []

    def train(config, **options):
        seen.append(config)
        return {"ended": "finished", "step": 1, "loss": 1.0}

    monkeypatch.setattr("deeploop.train.loop.train", train)
    return seen


def test_auto_lr_sets_peak_and_warmup(known, trained, capsys):
    assert main(f"train gpt2-small-flat --auto-lr --model.rounds 16 {SMALL}".split()) == 0
    (config,) = trained
    assert (config.optim.peak_lr, config.optim.warmup_steps) == (4e-3, 200)
    assert config.optim.floor_lr == get_recipe("gpt2-small-flat").optim.floor_lr
    first, second, *others = capsys.readouterr().out.splitlines()
    assert first == "--auto-lr: peak rate 0.004, 200 steps of warm-up, by docs/results/transfer"
    assert second.startswith("  tokens ")
    assert "the runs were with the unigram bias" in "".join(others) or config.model.unigram_bias


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            f"gpt2-small-flat --auto-lr --optim.peak-lr 1e-3 {SMALL}",
            "--optim.peak-lr: settles what --auto-lr",
        ),
        (f"gpt2-small-flat --auto-lr --optim.warmup_steps=9 {SMALL}", "--optim.warmup_steps=9: settles what"),
        ("hrm-sudoku4 --auto-lr", "--auto-lr: is for language models"),
        ("gpt2-small-flat --auto-lr", "tokens=49152000000: no evidence"),
        (f"gpt2-small --auto-lr --model.rounds 16 {SMALL}", "beside a cliff"),
    ],
)
def test_auto_lr_refuses(known, trained, capsys, words, told):
    assert main(f"train {words}".split()) == 2
    assert told in capsys.readouterr().err
    assert trained == []
