"""The header: what is about to be trained, from the config and a few facts."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from deeploop.models.accounting import flops_per_token, parameter_count
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.language.task import LanguageTask
from deeploop.tasks.puzzles.task import PuzzleTask
from deeploop.tasks.recipes import get_recipe
from deeploop.train.distributed import World
from deeploop.train.header import header, legend
from deeploop.train.memory import memory_of
from deeploop.train.opening import preview_run

ALONE = World(0, 1, torch.device("cpu"))
FACTS = {
    "parameters": 437_760,
    "examples": 120_940,
    "flops_per_step": 2_000_000_000,
    "step_bytes": 3 * 2**29,
    "device": "2 CPU threads",
}

EQUATION = "no inner norm, x ← Norm(α·x + f(x))"


def lines(config, **facts):
    found = dict(line.split(":", 1) for line in header(config, "tiny", **FACTS | facts))
    return {name: text.strip() for name, text in found.items()}


def test_the_header_of_a_language_model():
    config = get_recipe("tiny")
    config = replace(config, optim=replace(config.optim, steps=100))
    assert header(config, "tiny", **FACTS) == [
        "run:       runs/tiny, 100 steps (deeploop train tiny)",
        "model:     437,760 parameters; K = 2 blocks × R = 3 rounds, N = 6; "
        "unigram bias (the paper has none)",
        "rule:      DeepLoop p=0.5, x ← Norm(α·x + f(Norm(x))): α = 3.464, β = 0.1443",  # √12, 1/√48
        "data:      204,800 tokens planned, the corpus has 120,940: 1.7 epochs",
        "optimizer: AdamW, peak rate 0.001 after 200 steps of warm-up",
        "cost:      2e+11 FLOPs; memory about 1.5 GiB (estimate)",
        "device:    2 CPU threads",
    ]
    assert legend(LanguageTask) == [
        "floor:     best loss without context, by token frequencies; "
        "similarity 1 means one state at all positions",
        "verdict:   escaped: loss below the floor by 0.1, and similarity below 0.95; collapsed: neither; "
        "undecided: only one of the two",
    ]
    assert legend(PuzzleTask) == []


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"rule": "prenorm"}, "pre-norm, x ← x + f(Norm(x)): no scales"),
        ({"rule": "flat", "blocks": 4, "rounds": 5}, "flat, x ← Norm(α·x + f(Norm(x)·g)): α = 10"),
        ({"rule": "factored", "blocks": 4, "rounds": 5}, "factored, x ← x + ε·f(Norm(x)): ε = 0.1"),
        ({"rule": "averaged", "blocks": 4, "rounds": 5}, "averaged, x ← x + ε·f(Norm(x)): ε = 0.05"),
        (
            {"rule": "deeploop:beta=off", "blocks": 2, "rounds": 4},
            "DeepLoop p=0.5, no β, x ← Norm(α·x + f(Norm(x))): α = 4",
        ),
        (
            {"rule": "flat", "blocks": 4, "rounds": 5, "prelude": 1},
            "flat, x ← Norm(α·x + f(Norm(x)·g)): α = 10; prelude (R = 1) α = 1",
        ),
        ({"rule": "averaged", "blocks": 1, "rounds": 1}, "averaged, x ← x + ε·f(Norm(x)): ε = 1"),
    ],
)
def test_the_rule_of_a_block(fields, rule):
    config = get_recipe("tiny")
    assert lines(replace(config, model=GPTConfig(**fields)))["rule"] == rule


@pytest.mark.parametrize(("examples", "text"), [(614_400, "1.0"), (12_288_000, "0.05"), (6_144, "100.0")])
def test_epochs_of_the_corpus(examples, text):
    data = lines(get_recipe("tiny"), examples=examples)["data"]
    assert data == f"614,400 tokens planned, the corpus has {examples:,}: {text} epochs"


def test_documents_kept_apart_are_said():
    tiny = get_recipe("tiny")
    masked = replace(tiny, data=replace(tiny.data, mask_documents=True))
    assert lines(masked)["data"] == f"{lines(tiny)['data']}; documents kept apart"
    assert lines(get_recipe("chat"))["data"].endswith("; conversations kept apart")


def test_the_header_of_reasoners():
    hrm = lines(get_recipe("hrm-sudoku4-deeploop"))
    model = get_recipe("hrm-sudoku4-deeploop").model
    plan = model.schedule
    assert hrm["model"].endswith(f"; N = {plan.N}, {plan.N_g} blocks in the graph")
    alpha, beta = (2 * model.N) ** 0.5, (8 * model.N) ** -0.5
    assert (
        hrm["rule"]
        == f"DeepLoop p=0.5, {EQUATION} at N = 6 (the paper's N_g): α = {alpha:.4g}, β = {beta:.4g}"
    )
    assert hrm["data"].endswith("per puzzle; 120,940 training examples")
    assert hrm["optimizer"].startswith("AdamATan2, peak rate ")
    assert lines(get_recipe("trm-sudoku4"))["rule"] == "post-norm, x ← Norm(x + f(x)): no scales"


@pytest.mark.parametrize(
    ("recipe", "N", "alpha", "beta"),
    [
        ("hrm-arc1-deeploop", 12, 4.899, 0.1021),  # section 5.3: N_g = 12
        ("hrm-sudoku", 12, 4.899, 0.1021),
        ("hrm-sudoku4-deeploop", 6, 3.464, 0.1443),  # 2 + 2 blocks
    ],
)
def test_recipes_take_the_papers_depth(recipe, N, alpha, beta):
    config = get_recipe(recipe)
    rule = lines(replace(config, model=replace(config.model, rule="deeploop")))["rule"]
    assert rule.endswith(f"at N = {N} (the paper's N_g): α = {alpha}, β = {beta}")


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, f"DeepLoop p=0.5, {EQUATION} at N = 12 (the paper's N_g): α = 4.899, β = 0.1021"),
        (
            {"depth_from": "graph"},
            f"DeepLoop p=0.5, {EQUATION} at N = 8 (the blocks in the graph): α = 4, β = 0.125",
        ),
        ({"depth": 2}, f"DeepLoop p=0.5, {EQUATION} at N = 2 (model.depth): α = 2, β = 0.25"),
        (
            {"high_rule": "deepnorm", "depth": 2},
            f"H: DeepNorm p=0.25, {EQUATION} at N = 2 (model.depth): α = 1.414, β = 0.5; "
            f"L: DeepLoop p=0.5, {EQUATION} at N = 2 (model.depth): α = 2, β = 0.25",
        ),
    ],
)
def test_the_header_says_the_exponent_and_the_depth_of_alpha(fields, rule):
    config = get_recipe("hrm-arc1-deeploop")
    assert lines(replace(config, model=replace(config.model, **fields)))["rule"] == rule


def test_time_and_ranks_where_they_are_known():
    config = get_recipe("tiny")
    assert "time" not in lines(config)
    found = lines(config, ranks=4, step=100, seconds=2000.0)  # 200 of 300 are left
    assert found["run"].startswith("runs/tiny, step 100 of 300 (")
    assert found["time"] == "1:06:40 left at the speed so far, validation not counted"
    assert found["device"] == "2 CPU threads × 4 ranks"
    assert found["cost"].endswith("memory about 1.5 GiB per rank (estimate)")
    assert "time" not in lines(config, step=300, seconds=2000.0)


def test_a_plan_that_makes_little_sense_is_warned_of(tiny_config, monkeypatch):
    def warnings(**changes):
        return [line for line in preview_run(tiny_config(**changes), ALONE, "tiny") if "warning" in line]

    (line,) = warnings()
    assert "without the unigram bias deeploop may collapse" in line
    assert "--model.unigram-bias" in line
    assert warnings(model={"rule": "prenorm"}) == []
    assert warnings(model={"unigram_bias": True}) == []
    tiny_config = partial(tiny_config, model={"unigram_bias": True})
    steps = 10 * 23_510 // (8 * 32)  # the corpus has 23,510 tokens
    assert warnings(optim={"steps": steps}) == []
    (line,) = warnings(optim={"steps": 40 * steps})
    assert line == f"warning: the corpus is repeated 400 times; for 10 epochs use --steps {steps}"

    # 15 of 8 sequences, forward only, in 3 + 96 rounds in place of 3.
    rounds = 15 / 8 / 3 * (3 + 96) / 3
    for every, count in ((int(rounds), 1), (int(rounds) + 1, 0)):
        found = warnings(data={"validation_rounds": (96,), "validate_every": every})
        assert len(found) == count
    (line,) = warnings(data={"validation_rounds": (96,), "validate_every": 2})
    assert line.startswith("warning: a validation costs 21 steps, and there is one every 2; set ")

    ranks = memory_of(ALONE.device)[0] // LanguageTask(tiny_config(), ALONE).step_bytes  # that fit beside it
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert warnings() == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks + 1))
    (line,) = warnings()
    assert "this machine has " in line
    assert "--device.micro-batch (now 8)" in line


def test_the_cost_of_a_validation_where_it_is_more_than_a_step():
    cost = lines(get_recipe("tiny"))["cost"]
    for steps, text in ((1.4, ""), (1234.0, "; a validation costs 1,234 steps")):
        found = lines(get_recipe("tiny"), validation_steps=steps)["cost"]
        assert found == cost + text


def test_the_facts_of_a_run(tiny_config, make_puzzle_config, tmp_path):
    config = tiny_config()
    found = preview_run(config, ALONE, "tiny")
    flops = 6 * 8 * 32 * flops_per_token(config.model)
    assert found[1].startswith(f"model:     {parameter_count(config.model):,} parameters; ")
    assert found[5].startswith(f"cost:      {flops:.2g} FLOPs; memory about ")
    assert preview_run(make_puzzle_config(tmp_path), ALONE, "")[3].startswith(
        "data:      80 segments planned"
    )
    assert not any(tmp_path.iterdir())
