"""The small trained model in the package: it is small, it has learned, and nothing changes it."""

import argparse
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import deeploop
from deeploop.cli import main
from deeploop.files import resolve
from deeploop.report import results
from deeploop.runs.folder import last_checkpoint, load_config, results_folder
from deeploop.train.checkpoint import copy_weights, read_state
from deeploop.train.loop import train

FOLDER = Path(deeploop.__file__).parent / "assets" / "tiny"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_small_and_names_no_place_of_the_machine_that_made_it():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 2_000_000
    for file in files:
        if file.suffix != ".safetensors":
            assert '"/' not in file.read_text(), file


@torch.no_grad()
def test_it_has_learned_python(elsewhere):
    model, tokenizer = deeploop.load("shipped")
    ids = torch.tensor(tokenizer.encode(inspect.getsource(argparse))[: 64 * 129])
    windows = ids.view(64, 129)
    loss = model(windows[:, :-1], windows[:, 1:]).loss / windows[:, 1:].numel()
    reported = read_state(last_checkpoint(FOLDER))["validation"]
    assert reported["verdict"] == "escaped"
    assert loss < 1.8 < reported["floor"]  # the floor: the best without looking at the context


@torch.no_grad()
@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_cached_logits_equal_uncached(elsewhere, rounds):
    model, tokenizer = deeploop.load("shipped")
    model.set_rounds(rounds)
    tokens = torch.tensor([tokenizer.encode(inspect.getsource(argparse.Action))[:128]])
    cache = model.new_cache()
    pieces = [model(piece, cache=cache).states for piece in tokens.split(17, dim=1)]
    difference = model.logits(torch.cat(pieces, dim=1)) - model.logits(model(tokens).states)
    assert difference.abs().max() < 1e-4


def test_generate_needs_no_run(elsewhere, capsys):
    assert main(["generate", "--prompt", "def ", "--max-tokens", "30"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("def ")
    assert len(captured.out) > 20
    assert captured.err.startswith("the small model that comes with deeploop; ")
    assert main(["generate", "shipped", "--prompt", "def ", "--max-tokens", "30"]) == 0
    assert capsys.readouterr().out == captured.out


def test_a_cache_of_fewer_rounds_is_warned_of(elsewhere, capsys, caplog):
    words = ["generate", "--prompt", "def ", "--max-tokens", "3", "--cache-rounds"]
    warning = (
        "cache_rounds=1: a loop without injection may write much worse text without all 3 rounds; "
        "deeploop validate RUN --cache-rounds 1 all measures it"
    )
    assert main([*words, "1"]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == [f"warning: {warning}"]
    assert main([*words, "3"]) == 0
    assert "warning" not in capsys.readouterr().err
    pytest.importorskip(
        "transformers", reason='needs transformers: pip install -c constraints.txt -e ".[hf]"'
    )
    assert main(["export", "shipped", "exported", "--cache-rounds", "1"]) == 0
    assert caplog.messages.count(warning) == 1


def test_a_folder_of_that_name_comes_first(elsewhere):
    assert resolve("shipped") == FOLDER
    (elsewhere / "shipped").mkdir()
    assert resolve("shipped") == Path("shipped")
    assert results_folder(Path("shipped")) == Path("shipped")


def test_results_about_it_are_written_elsewhere(elsewhere, corpus, capsys):
    before = {file: file.read_bytes() for file in FOLDER.rglob("*") if file.is_file()}
    assert main(["validate", "shipped", "--data", str(corpus), "--sequences", "3"]) == 0
    (written,) = results.read(elsewhere / "runs" / "shipped" / "validation.json")
    assert written["checkpoint"] == last_checkpoint(FOLDER).name
    assert {file: file.read_bytes() for file in FOLDER.rglob("*") if file.is_file()} == before


def test_it_is_the_recipe_that_the_makefile_names(monkeypatch, tmp_path):
    makefile = FOLDER.parents[3] / "Makefile"
    if not makefile.exists():
        pytest.skip("not in a checkout")
    text = makefile.read_text().replace("\\\n", " ")
    words = re.search(r"deeploop (train tiny .*)", text)[1].split()
    started = []
    # Reads the words without a corpus and without training.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deeploop.train.loop.train", lambda config, **more: started.append(config))
    main(words)
    shipped = load_config(FOLDER)
    assert [replace(config, resume=shipped.resume) for config in started] == [shipped]


def test_weights_alone_are_loaded_and_not_resumed(tiny_config, tmp_path):
    config = tiny_config()
    train(config)
    whole = last_checkpoint(config.out)
    bare = tmp_path / "bare" / whole.name
    copy_weights(whole, bare)
    assert sorted(file.name for file in bare.iterdir()) == ["model.safetensors", "state.json"]
    assert read_state(bare) == read_state(whole)
    (bare / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        read_state(bare)
