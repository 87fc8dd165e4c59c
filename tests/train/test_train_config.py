"""Recipes and configs: valid, to JSON and back, and compared field by field."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import deeploop
from deeploop.config.json import differences, from_dict, to_dict
from deeploop.config.optim import OptimConfig
from deeploop.config.run import DeviceConfig, LogConfig
from deeploop.runs.folder import config_to_resume, load_config
from deeploop.tasks import read_config
from deeploop.tasks.language.config import DataConfig, TrainConfig
from deeploop.tasks.recipes import RECIPES, get_recipe
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.memory import even_splits


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_file_says_by_its_fields_what_is_trained(name, tmp_path):
    config = get_recipe(name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_dict(replace(config, resume=True))))
    assert read_config(path) == config


def test_a_config_in_toml(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('seed = 3\nout = "runs/mine"\n[optim]\nbetas = [0.8, 0.9]\n[model]\nrounds = 5\n')
    expected = replace(TrainConfig(), seed=3, out=Path("runs/mine"))
    model, optim = replace(expected.model, rounds=5), replace(expected.optim, betas=(0.8, 0.9))
    assert read_config(path) == replace(expected, model=model, optim=optim)
    path.write_text("[halting]\nsegments = 3\n[model]\nblocks = 1\n")
    assert (type(read_config(path)).__name__, read_config(path).model.blocks) == ("TRMTrainConfig", 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[model]\nround = 3\n", r"a\.toml: model\.round: unknown field"),
        ("a.toml", "[halting]\nsegments = 3\nlength = 1\n", r"a\.toml: halting\.length: unknown field"),
        ("a.toml", "[model]\nrounds = 0\n", r"a\.toml: model\.rounds=0: must be at least 1"),
        ("a.toml", "model = 3\n", r"a\.toml: model=3: not a value"),
        ("a.toml", "rounds: 3", r"a\.toml: .*Expected '=' after a key"),
        ("a.json", "[]", r"a\.json: must be an object with the fields of a config"),
    ],
)
def test_a_mistake_in_a_config_file_names_file_and_field(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path / name)


def test_every_kind_of_field_survives_json():
    """Paths, tuples, nothing at all, and switches away from their defaults."""
    config = from_dict(
        TrainConfig,
        {
            "init_from": "runs/other",
            "resume": True,
            "model": {"tied_head": False, "rule": "deeploop:p=0.25"},
            "optim": {"betas": [0.8, 0.99]},
        },
    )
    assert config.init_from == Path("runs/other")
    assert config.model.tied_head is False
    assert config.model.rule == "deepnorm"
    assert config.optim.betas == (0.8, 0.99)
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_splits_over_the_ranks_it_is_meant_for(name):
    config = get_recipe(name)
    for ranks in (1, 4, 8):
        limit = config.device.micro_batch or config.optim.batch
        size = even_splits(config.optim.batch, config.device, World(0, ranks, device="cpu"))[0]
        assert size == min(limit, config.optim.batch // ranks)


@pytest.mark.parametrize(("name", "steps", "tokens"), [("gpt2-small", 100_000, 49_152_000_000)])
def test_the_papers_recipe_sees_the_papers_tokens(name, steps, tokens):
    config = get_recipe(name)
    assert config.optim.steps == steps
    assert steps * config.optim.batch * config.model.context == tokens
    assert (config.optim.peak_lr, config.optim.floor_lr, config.optim.warmup_steps) == (1e-3, 5e-5, 2_000)
    assert (config.optim.betas, config.optim.weight_decay, config.optim.clip) == ((0.9, 0.95), 0.1, 1.0)


def test_recipes_of_language_models_have_the_unigram_bias_and_configs_without_the_field_do_not():
    models = [make().model for name, make in RECIPES.items() if type(make()) is TrainConfig]
    assert len(models) == 7
    assert all(model.unigram_bias for model in models)
    assert not from_dict(TrainConfig, {"model": {"rounds": 2}}).model.unigram_bias


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-medium", "tiny"])
def test_recipes_that_are_a_flag_of_another_are_answered_with_it(name):
    for suffix, option in (("stable", ""), ("flat", " --rule flat")):
        with pytest.raises(ValueError, match=f"use `deeploop train {name}{option}`$"):
            get_recipe(f"{name}-{suffix}")


def test_an_unknown_recipe_is_named():
    with pytest.raises(ValueError, match=r"recipe=gpt3: unknown; choose one of gpt2-small, "):
        get_recipe("gpt3")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"modl": {}}, r"config\.modl: unknown field"),
        ({"model": {"depth": 3}}, r"config\.model\.depth: unknown field"),
        ({"model": {"rounds": 0}}, r"model\.rounds=0"),
    ],
)
def test_a_bad_json_config_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        from_dict(TrainConfig, data)


def test_differences_are_listed_leaf_by_leaf():
    old = {"seed": 0, "model": {"rounds": 3, "width": 32}, "gone": 1}
    new = {"seed": 0, "model": {"rounds": 5, "width": 32}, "data": {"path": "x"}}
    assert differences(old, new) == [
        ("data", None, {"path": "x"}),
        ("gone", 1, None),
        ("model.rounds", 3, 5),
    ]
    assert differences(new, new) == []


@pytest.mark.parametrize(
    ("kind", "field"),
    [(DataConfig, "validation_sequences"), (DataConfig, "validate_every"), (LogConfig, "every")],
)
def test_counts_must_be_positive(kind, field):
    with pytest.raises(ValueError, match=rf"{field}=0: must be at least 1"):
        kind(**{field: 0})


def test_micro_batch_must_not_be_negative():
    with pytest.raises(ValueError, match=r"device\.micro_batch=-1"):
        DeviceConfig(micro_batch=-1)


@pytest.mark.parametrize(
    ("batch", "limit", "ranks", "size"),
    [(8, 0, 1, 8), (8, 0, 2, 4), (8, 3, 1, 2), (8, 8, 2, 4), (480, 30, 1, 30), (64, 30, 1, 16), (7, 3, 1, 1)],
)
def test_the_micro_batch_is_the_largest_even_split_within_its_limit(batch, limit, ranks, size):
    assert even_splits(batch, DeviceConfig(micro_batch=limit), World(0, ranks, device="cpu"))[0] == size


def test_the_batch_must_split_over_the_ranks():
    with pytest.raises(ValueError, match=r"optim\.batch=9: must be a multiple of the 2 ranks"):
        even_splits(9, DeviceConfig(), World(0, 2, device="cpu"))


def test_the_floor_rate_must_not_exceed_the_peak():
    with pytest.raises(ValueError, match=r"optim\.floor_lr=5e-05: must be at most optim\.peak_lr=1e-05"):
        OptimConfig(peak_lr=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"rounds": "3"}}, r"config\.model\.rounds='3'"),
        ({"model": {"rule": "round"}}, r"model\.rule=round: must be one of deeploop"),
        ({"optim": {"betas": 1}}, r"config\.optim\.betas=1"),
        ({"model": []}, r"config\.model=\[\]"),
        ({"seed": True}, r"config\.seed=True"),
        ({"colour": 1}, r"config\.colour: unknown field"),
    ],
)
def test_json_of_the_wrong_kind_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_dict(TrainConfig, change)


def test_a_config_from_before_there_were_rules_still_loads(tiny_config):
    data = to_dict(tiny_config())
    del data["model"]["rule"]
    data["model"] |= {"block": "sandwich", "p": 0.5}
    assert from_dict(TrainConfig, data) == tiny_config()


@pytest.mark.parametrize("block", ["prenorm", "postnorm", "deeploop", "factored", "averaged", "flat"])
def test_every_block_trains_a_few_steps(tiny_config, block):
    result = train(tiny_config(model={"rule": block}))
    assert result["ended"] == "finished"
    assert result["loss"] < 5.4  # ln 257 = 5.55 at the start


def test_a_field_that_was_one_number_is_read_as_a_list(tiny_config):
    data = to_dict(tiny_config())
    for old, new in ((0, ()), (2, (2,))):
        data["data"] |= {"max_epochs": old, "mix": ["a=1", "b=1"] if old else []}
        assert from_dict(TrainConfig, data).data.max_epochs == new


def test_folders_may_be_given_as_texts():
    config = TrainConfig(out="runs/mine", init_from="runs/other")
    assert (config.out, config.init_from) == (Path("runs/mine"), Path("runs/other"))
    assert TrainConfig(out="runs/mine") == TrainConfig(out=Path("runs/mine"))


def test_a_run_that_used_a_removed_option_is_read_but_not_resumed(tiny_config):
    config = tiny_config(optim={"steps": 2})
    train(config)
    path = config.out / "config.json"
    data = json.loads(path.read_text())
    data["optim"] |= {"wait_for_escape": False, "branch_release_steps": 0, "branch_lr": 1.0}
    path.write_text(json.dumps(data))
    assert train(replace(config_to_resume(config.out), optim=replace(config.optim, steps=3)))["step"] == 3
    data["optim"]["branch_lr"] = 0.1
    path.write_text(json.dumps(data))
    assert load_config(config.out).optim == config.optim
    assert deeploop.load(config.out)[0].config == config.model
    with pytest.raises(
        ValueError, match=r"optim\.branch_lr=0\.1: was removed; resume it with deeploop 0\.2\.0"
    ):
        train(config_to_resume(config.out))
    with pytest.raises(ValueError, match=r"optim\.branch_lr=0\.1: was removed; use --model\.unigram-bias"):
        read_config(path)
