"""`deeploop export`: the folder says what the run says, and is never half an export."""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import deeploop
from deeploop.cli import main
from deeploop.data.bpe import find_tokenizer
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.eval.generation import generate
from deeploop.export.folder import PART
from deeploop.export.run import save_model
from deeploop.files import lock_folder
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.chat.template import DEFAULT, encode_segments, find_template
from deeploop.tasks.iterate.load import load_iterate
from deeploop.tasks.iterate.problems.examples import held_out
from deeploop.train.from_export import load_export, read_export
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from iterate_runs import make_iterate_config
from llama_family import save_tokenizer

pytest.importorskip("transformers", reason='needs transformers: pip install -c constraints.txt -e ".[hf]"')

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import deeploop.models.hf


@pytest.fixture(scope="module")
def config(make_config, tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("export") / "looped")
    train(replace(config, optim=replace(config.optim, peak_lr=1e-2)))
    return config


@pytest.fixture(scope="module")
def folder(config):
    folder = config.out.parent / "exported"
    assert main(["export", str(config.out), str(folder)]) == 0
    return folder


def test_an_iterated_task_is_exported_without_a_tokenizer(tmp_path, capsys):
    run = make_iterate_config(tmp_path / "run", model={"rule": "averaged"})
    train(run, quiet=True)
    folder = tmp_path / "exported"
    assert main(["export", str(run.out), str(folder)]) == 0
    assert "AutoTokenizer" not in capsys.readouterr().out
    card = (folder / "README.md").read_text()
    assert "automaton of rule 86, 1 to 3 steps, length 10" in card
    assert "| residual rule | averaged (`--rule averaged`) |\n| ε | 0.333333 |" in card
    assert "α" not in card
    assert "DeepLoop" not in card
    assert "rounds=200" in card
    model, config = load_iterate(run.out)
    tokens = torch.from_numpy(config.examples.task.inputs(held_out(config.examples.task, 4)))
    for rounds in (3, 7):  # deeper than trained too
        theirs = AutoModelForCausalLM.from_pretrained(folder, rounds=rounds)
        model.set_rounds(rounds)
        torch.testing.assert_close(theirs(tokens).logits, model.logits(model(tokens).states))


@pytest.fixture
def refused(capsys):
    def run(*words):
        capsys.readouterr()
        assert main(["export", *map(str, words)]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        return captured.err.strip().removeprefix("deeploop export: error: ")

    return run


def test_the_weights_are_hashed_once(config, tmp_path, hashed):
    assert main(["export", str(config.out), str(tmp_path / "exported")]) == 0
    assert hashed == ["model.safetensors"]


def test_the_code_that_is_printed_says_what_both_lines_need_without_deeploop(config, tmp_path, capsys):
    assert main(["export", str(config.out), str(tmp_path / "out")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "from_pretrained(" in line]
    assert len(lines) == 2
    assert all(line.endswith("# without deeploop: add trust_remote_code=True") for line in lines)


def test_the_same_validation_loss_in_training_validate_and_the_folder(config, folder, capsys):
    capsys.readouterr()
    assert main(["validate", str(config.out), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rounds"]
    inputs, targets = validation_windows(Corpus.open(config.data.path).validation, 32, 15)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        log_probabilities = model(inputs).logits.log_softmax(-1)
    loss = -log_probabilities.gather(-1, targets[..., None]).mean().item()
    assert loss == pytest.approx(row["loss"], abs=1e-4)
    assert loss == pytest.approx(read_metrics(config.out, "validation")[-1]["loss"], abs=1e-4)


def test_text_in_text_out(config, folder):
    gpt, ours = deeploop.load(config.out)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("the loop", return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    ids = list(generate(gpt, ours.encode("the loop"), max_tokens=20, stop=ours.end_of_text))
    assert tokenizer.decode(out[0]) == "the loop" + ours.decode(ids)
    assert model.generation_config.eos_token_id == ours.end_of_text


def test_bfloat16_halves_the_weights(config, folder, tmp_path, capsys):
    more = ["--dtype", "bfloat16", "--context", "999"]
    assert main(["export", str(config.out), str(tmp_path / "half"), *more]) == 0
    assert f"context 999: more than the {config.model.context} tokens" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    whole, half = ((f / "model.safetensors").stat().st_size for f in (folder, tmp_path / "half"))
    assert half == pytest.approx(whole / 2, rel=0.05)


def test_the_card_says_what_it_is(folder):
    card = (folder / "README.md").read_text()
    for fact in (
        "stored blocks K | 2",
        "rounds R | 3",
        "α, β | 3.4641, 0.144338 (p = 0.5)",
        "data | words",
        "6 steps",
    ):
        assert fact in card
    assert "| residual rule | DeepLoop p=0.5 (`--rule deeploop`) |" in card
    assert "validation loss | " in card
    assert "key-value cache | 6 slots: one per (round, block), 3 × 2 |" in card
    assert "one slot per stored layer writes wrong text" in card


def test_a_recurrent_run_trained_at_sampled_rounds_is_exported_with_its_budget(
    make_config, tmp_path, refused
):
    parts = {"prelude": 1, "coda": 1, "injection": "linear", "first_state": "noise", "rule": "flat"}
    config = make_config(tmp_path / "run", model=parts, rounds={"sample": "poisson-lognormal", "backprop": 2})
    train(config, quiet=True)
    assert "cache_rounds=0: must be at least 1" in refused(
        config.out, tmp_path / "none", "--cache-rounds", "0"
    )
    assert main(["export", str(config.out), str(tmp_path / "folder"), "--cache-rounds", "1"]) == 0
    card = (tmp_path / "folder" / "README.md").read_text()
    assert (
        "4 slots: one per (round, block), 1 × 2, round r in those of r mod 1, tokens read one by one" in card
    )
    assert "one by one, and 1 of the prelude + 1 of the coda" in card
    gpt, tokenizer = deeploop.load(config.out)
    tokens = torch.tensor([tokenizer.encode("the loop")])
    for budget, given in ((1, {}), (None, {"cache_rounds": None})):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", **given)
        gpt.set_cache_rounds(budget)
        with torch.no_grad():
            assert torch.equal(model(tokens, use_cache=False).logits, gpt.logits(gpt(tokens).states))
        out = model.generate(tokens, max_new_tokens=8, do_sample=False)
        assert out[0, tokens.shape[1] :].tolist() == list(generate(gpt, tokens[0].tolist(), max_tokens=8))


def test_every_file_is_there_and_readable(folder):
    expected = {"config.json", "generation_config.json", "model.safetensors", "README.md", "tokenizer.json"}
    assert expected <= {file.name for file in folder.iterdir()}
    assert not (folder / PART).exists()
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir())
    text = "".join(f.read_text() for f in folder.iterdir() if f.suffix in (".json", ".md", ".py"))
    assert str(folder.parent) not in text  # no path of the machine


def test_an_earlier_export_is_replaced_and_nothing_else_touched(config, folder, tmp_path):
    target = shutil.copytree(folder, tmp_path / "target")
    (target / "notes.txt").write_text("mine")
    (target / "model.safetensors").write_bytes(b"old")
    assert main(["export", str(config.out), str(target)]) == 0
    assert (target / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (target / "notes.txt").read_text() == "mine"


def test_nothing_that_transformers_loads_is_left_of_an_earlier_export(config, folder, tmp_path):
    """A chat of a pretrained tokenizer, then bytes, then an iterated task: each as if it were alone."""
    out, run = tmp_path / "out", make_iterate_config(tmp_path / "run", model={"rule": "averaged"})
    shutil.copytree(folder, out)
    (out / "chat_template.jinja").write_text("of an earlier export")
    (out / "additional_chat_templates").mkdir()
    (out / "additional_chat_templates" / "tool.jinja").write_text("of an earlier export")
    (out / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    (out / "LICENSE").write_text("of the weights")
    assert main(["export", str(config.out), str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()} | {"LICENSE"}
    assert AutoTokenizer.from_pretrained(out).chat_template is None
    train(run, quiet=True)
    assert main(["export", str(run.out), str(out)]) == 0
    assert main(["export", str(run.out), str(tmp_path / "alone")]) == 0
    alone = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in out.iterdir()} == alone | {"LICENSE"}


def test_half_an_export_is_not_taken_for_a_whole_one(config, folder, tmp_path, monkeypatch):
    target = tmp_path / "target"

    move = os.replace

    def full(source, destination):
        if Path(source).name == "model.safetensors":
            raise OSError("disk full")
        move(source, destination)

    monkeypatch.setattr(os, "replace", full)
    assert main(["export", str(config.out), str(target)]) == 2
    with pytest.raises(ValueError, match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(target)
    monkeypatch.undo()
    assert main(["export", str(config.out), str(target)]) == 0
    assert AutoModelForCausalLM.from_pretrained(target)


def test_mistakes_are_one_line(config, refused, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    expected = "is not empty and not an earlier export; name another folder"
    assert refused(config.out, tmp_path / "full").endswith(expected)
    assert refused(config.out, config.out).endswith(expected)  # the run itself
    assert refused(config.out, tmp_path / "full" / "thesis.tex").endswith("is a file; name a folder")
    assert refused(tmp_path / "none", tmp_path / "new").startswith(f"{tmp_path / 'none'}: no such run folder")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(config.out, tmp_path / "new").endswith(
        'run: pip install -c constraints.txt -e ".[hf]" in the clone'
    )
    assert not (tmp_path / "new").exists()


def test_a_part_folder_and_a_readme_of_somebody_else_stay(config, folder, refused, tmp_path, capsys):
    mine = tmp_path / "mine"
    (mine / ".part").mkdir(parents=True)
    (mine / ".part" / "thesis.tex").write_text("x")
    assert refused(config.out, mine).endswith("is not empty and not an earlier export; name another folder")
    assert (mine / ".part" / "thesis.tex").read_text() == "x"
    target = shutil.copytree(folder, tmp_path / "target")
    (target / "README.md").write_text("# My model")
    (target / ".part").mkdir()
    assert main(["export", str(config.out), str(target)]) == 0
    assert "is not of an export, and stays" in capsys.readouterr().out
    assert (target / "README.md").read_text() == "# My model"
    assert (target / ".part").is_dir()


def test_a_second_export_into_one_folder_is_refused(config, refused, tmp_path):
    with lock_folder(tmp_path / "target"):
        said = refused(config.out, tmp_path / "target")
    assert said == f"folder={tmp_path / 'target'}: another run is writing there; choose another folder"


def test_weights_that_are_not_finite_are_not_exported(config, refused, tmp_path):
    copy = shutil.copytree(config.out, tmp_path / "run", ignore=shutil.ignore_patterns("validation.json"))
    checkpoint = last_checkpoint(copy)
    weights = load_file(checkpoint / "model.safetensors")
    next(iter(weights.values())).fill_(float("nan"))
    save_file(weights, checkpoint / "model.safetensors")
    state = json.loads((checkpoint / "state.json").read_text())
    raw = (checkpoint / "model.safetensors").read_bytes()
    state["sha256"]["model.safetensors"] = hashlib.sha256(raw).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert "holds numbers that are not finite" in refused(copy, tmp_path / "new")
    for command in (["validate", str(copy)], ["generate", str(copy), "--prompt", "x"]):
        assert main(command) == 2
    assert not (copy / "validation.json").exists()


def test_an_exported_chat_of_a_pretrained_tokenizer_ends_answers_as_in_training(tmp_path):
    tokenizer = find_tokenizer(str(save_tokenizer(tmp_path / "tokenizer")))
    shape = {"blocks": 1, "rounds": 2, "width": 16, "heads": 2, "hidden": 16, "context": 32}
    model = LoopedGPT(GPTConfig(**shape, vocabulary=tokenizer.vocabulary))
    save_model(model, tokenizer, tmp_path / "out", DEFAULT)
    end, named = tokenizer.end_of_text, 1  # <s> and </s>
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [named, end]
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "loops"}]
    trained, _ = encode_segments(find_template("default").segments(messages), tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = theirs.apply_chat_template(messages, tokenize=False)
    assert text.removesuffix("\n") == theirs.decode(trained)
    assert trained[-1] == end


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [257, 300])
def test_a_resized_export_can_be_started_from(words, dtype, tmp_path):
    """Its file has a row for each word, the trained model has padding beyond them."""
    shape = {"width": 32, "heads": 2, "hidden": 32, "context": 16, "tied_head": False, "unigram_bias": True}
    gpt = LoopedGPT(GPTConfig(blocks=1, rounds=2, vocabulary=257, **shape), seed=1)
    gpt.output_bias.normal_()
    resized = deeploop.models.hf.DeepLoopForCausalLM.from_gpt(gpt).to(dtype)
    resized.resize_token_embeddings(words)
    resized.save_pretrained(tmp_path)
    model = LoopedGPT(read_export(tmp_path), seed=2)
    load_export(model, tmp_path, None)
    assert model.embedding.weight.shape == (320, 32)
    tokens = torch.arange(16)[None]
    ours, theirs = model.logits(model(tokens).states), resized.float()(tokens).logits
    torch.testing.assert_close(ours[..., :words], theirs)
    assert (model.output_bias[words:] == model.output_bias[:words].min()).all()
