"""The run folder: what is in it, starting from another one, and `deeploop.load`."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

import deeploop
from deeploop.cli import main
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.eval.validation import validate
from deeploop.files import lock_folder
from deeploop.runs.folder import git_revision, last_checkpoint, load_config
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics


@pytest.fixture(scope="module")
def config(make_config, tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("source") / "run")
    train(config)
    return config


@pytest.fixture
def copied(config, tmp_path):
    return shutil.copytree(config.out, tmp_path / "copied")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_anatomy(config):
    assert {path.name for path in config.out.iterdir()} == {
        "run.json",
        "config.json",
        "metrics.jsonl",
        "checkpoints",
        ".lock",
    }
    stamp = json.loads((config.out / "run.json").read_text())
    assert stamp["format"] == 1
    assert stamp["tokenizer"] == "bytes"
    assert stamp["deeploop"] == deeploop.__version__
    assert stamp["torch"] == torch.__version__
    assert stamp["git"] == git_revision()
    assert stamp.keys() >= {"python", "command", "written"}
    assert load_config(config.out) == config


def test_load_gives_the_model_that_was_validated_last(config):
    model, tokenizer = deeploop.load(config.out)
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("loop")) == "loop"
    windows = validation_windows(Corpus.open(config.data.path).validation, 32, 15)
    result = validate(model, *windows, batch=8)
    assert result.loss / result.targets == read_metrics(config.out, "validation")[-1]["loss"]


def test_load_does_not_need_the_corpus(copied):
    edit(copied / "config.json", data={"path": "nowhere"})
    model, _ = deeploop.load(str(copied))
    assert model(torch.zeros(1, 4, dtype=torch.long)).states.isfinite().all()


def test_init_from_starts_where_the_other_run_ended(config, tiny_config):
    fresh = tiny_config("next", init_from=config.out, seed=5)
    train(fresh)
    first, last = read_metrics(fresh.out, "validation")[0], read_metrics(config.out, "validation")[-1]
    assert (first["step"], first["loss"]) == (0, last["loss"])
    assert (read_metrics(fresh.out, "train")[0]["lr"], fresh.seed) == (0.75e-3, 5)  # its own schedule


def test_init_from_may_change_the_rounds(config, tiny_config):
    """The stored weights are the same at every number of rounds."""
    train(tiny_config("deeper", init_from=config.out, model={"rounds": 5}))


OTHERWISE = {  # shapes agree, and the function is another
    "rotary_scaling": (4.0,),
    "rotary_base": 100.0,
    "norm_eps": 0.1,
    "mup_base_width": 64,
    "first_state": "zeros",
    "qk_norm": "before-rotary",
    "recompute_alpha": True,
}


@pytest.fixture(scope="module")
def others(make_config, tmp_path_factory):
    """Runs of models that have the shapes of the defaults, and compute something else."""
    out = tmp_path_factory.mktemp("others")
    own = {"rotary_scaling": (4.0,), "rotary_base": 100.0, "norm_eps": 0.1, "mup_base_width": 64}
    made = {}
    for name, model in {
        "scaled": own,
        "averaged": {"rule": "averaged"},
        "lnscale": {"rule": "lnscale"},
        "zeros": {"injection": "add", "first_state": "zeros", "prelude": 1},
    }.items():
        made[name] = make_config(out / name, model=model, optim={"steps": 2})
        train(made[name], quiet=True)
    return made


@pytest.mark.parametrize("name", ["scaled", "averaged", "lnscale", "zeros"])
@pytest.mark.parametrize("is_exported", [False, True])
def test_init_from_takes_the_models_settings(name, is_exported, others, corpus, tmp_path):
    source = run = others[name].out
    if is_exported:
        source = tmp_path / "exported"
        assert main(["export", str(run), str(source)]) == 0
    amount = "--optim.steps 1 --data.validation-sequences 15 --device.kind cpu --quiet"
    words = f"train tiny --init-from {source} --data.path {corpus} --out {tmp_path / 'run'} {amount}"
    assert main(words.split()) == 0
    assert load_config(tmp_path / "run").model == others[name].model
    last = read_metrics(run, "validation")[-1]["loss"]
    assert read_metrics(tmp_path / "run", "validation")[0]["loss"] == pytest.approx(last, rel=1e-6)


def test_what_is_named_differs_and_is_said(others, corpus, tmp_path, capsys):
    source = others["averaged"].out
    file = tmp_path / "own.toml"
    file.write_text(f'init_from = "{source}"\n[model]\nrotary_base = 100.0\n[data]\npath = "{corpus}"\n')
    more = f"--model.rule prenorm --model.rounds 2 --out {tmp_path / 'run'} --optim.batch 8 --dry-run"
    assert main(["train", "--config", str(file), *more.split()]) == 0
    said = capsys.readouterr().out
    for field, ours, theirs in (
        ("rule", "prenorm", "averaged"),
        ("rounds", 2, 3),
        ("rotary_base", "100.0", "10000.0"),
    ):
        assert f"starting from {source} with model.{field}={ours} (it has {theirs})" in said
    assert said.count("starting from") == 3


@pytest.mark.parametrize("field", OTHERWISE)
def test_another_function_of_the_same_shapes_is_refused(config, tiny_config, field):
    model = {field: OTHERWISE[field]} | ({"injection": "add"} if field == "first_state" else {})
    fresh = tiny_config("other", init_from=config.out, model=model)
    with pytest.raises(ValueError, match=rf"^init_from=.*model\.{field}=.*\(this run .*; add --model\."):
        train(fresh)
    assert not fresh.out.exists()
    changed = train(
        replace(fresh, optim=replace(fresh.optim, steps=1)), named={f"model.{name}" for name in model}
    )
    assert changed["step"] == 1


def test_a_rule_of_the_same_shapes_is_refused(others, tiny_config):
    for theirs, ours in (("averaged", "prenorm"), ("lnscale", "prenorm"), ("averaged", "factored")):
        with pytest.raises(
            ValueError, match=rf"model\.rule={theirs} \(this run {ours}\); add --model.rule {theirs}$"
        ):
            train(tiny_config("other", init_from=others[theirs].out, model={"rule": ours}))


def test_spellings_of_one_function_are_taken(config, tiny_config, capsys):
    model = {"context": 16, "head_width": 16, "kv_heads": 2}
    train(tiny_config("same", init_from=config.out, model=model), source="a test")
    assert "starting from" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"width": 64}, "has model.width=32 (this run 64); add --model.width 32"),
        (
            {"rule": "averaged", "exit_gate": True},
            "has model.rule=deeploop (this run averaged); add --model.rule deeploop",
        ),
        (
            {"tied_head": False, "unigram_bias": True},
            "has model.tied_head=True (this run False), model.unigram_bias=False (this run True); "
            "add --model.tied-head --model.no-unigram-bias",
        ),
    ],
)
def test_init_from_another_model_says_what_to_add(config, tiny_config, model, says):
    with pytest.raises(ValueError, match=f"^{re.escape(f'init_from={config.out}: {says}')}$"):
        train(tiny_config("other", init_from=config.out, model=model))


def test_init_from_no_run_is_refused(tiny_config, tmp_path):
    with pytest.raises(ValueError, match="nothing: no such run folder"):
        train(tiny_config(init_from=tmp_path / "nothing"))
    (tmp_path / "corpus.json").touch()
    with pytest.raises(ValueError, match=f"{tmp_path}: is a corpus, not a run folder; `deeploop data "):
        train(tiny_config(init_from=tmp_path))


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"not a run folder \(no run\.json\)"):
        deeploop.load(tmp_path)


def test_a_folder_of_runs_names_them(copied):
    with pytest.raises(
        ValueError, match=rf"{copied.parent}: a folder of runs; name one of them: .*{copied.name}"
    ):
        deeploop.load(copied.parent)


def test_another_version_of_the_folder_is_refused(copied):
    edit(copied / "run.json", format=2)
    with pytest.raises(ValueError, match="run format 2, this deeploop reads 1"):
        deeploop.load(copied)


def test_a_field_this_version_does_not_know_is_named(copied):
    edit(copied / "config.json", novelty=1)
    with pytest.raises(ValueError, match=r"config\.novelty: unknown field"):
        deeploop.load(copied)


@pytest.mark.parametrize("file", ["run.json", "config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"])
def test_an_unreadable_file_is_named(copied, file, content):
    (copied / file).write_bytes(content)
    with pytest.raises(ValueError) as error:
        deeploop.load(copied)
    assert str(error.value).startswith(f"{copied / file}: ")


@pytest.mark.parametrize(("field", "factor"), [("width", 16), ("blocks", 16), ("context", 2**20)])
def test_a_model_larger_than_its_weights_is_refused_before_it_is_built(copied, field, factor):
    config = json.loads((copied / "config.json").read_text())
    config["model"][field] *= factor
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"model\.safetensors: [\d,]+ bytes, but the run describes a model of"
    ):
        deeploop.load(copied)


def test_load_checks_the_weights(copied):
    weights = last_checkpoint(copied) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        deeploop.load(copied)


def test_a_second_run_is_kept_out_of_the_folder(tiny_config):
    config = tiny_config()
    with (
        lock_folder(config.out),
        pytest.raises(ValueError, match=r"out=.*run: another run is writing there"),
    ):
        train(config)
    assert not (config.out / "run.json").exists()
    train(config)  # the lock went with its holder


def test_a_folder_with_somebody_elses_config_is_refused(tiny_config):
    config = tiny_config()
    config.out.mkdir()
    (config.out / "config.json").write_text('{"my": "own"}')
    with pytest.raises(ValueError, match=r"holds a config\.json that is not a run's"):
        train(config)
    assert json.loads((config.out / "config.json").read_text()) == {"my": "own"}


@pytest.mark.parametrize("text", ["[]", "null", "5", "{", ""])
def test_a_stamp_that_is_no_object_is_named(tiny_config, text):
    config = tiny_config()
    config.out.mkdir()
    (config.out / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: can't be read"):
        deeploop.load(config.out)
