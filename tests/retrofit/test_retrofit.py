"""The whole way: read, retrofit, heal, resume, export, load without the package; and mistakes in one line."""

import io
import itertools
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from deeploop.cli import main
from deeploop.data.bpe import find_tokenizer
from deeploop.data.prepare import prepare
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.data.tokenizers import get_tokenizer
from deeploop.models.gpt import LoopedGPT
from deeploop.report.document import make_sections
from deeploop.report.groups import Histories
from deeploop.report.listing import steps_done
from deeploop.report.runs import find_runs
from deeploop.report.tables import Table
from deeploop.retrofit.layers import build, choose_layers, looped_config
from deeploop.retrofit.source import open_source
from deeploop.runs.folder import last_checkpoint, load_config, read_stamp
from deeploop.tasks.chat.data import ChatSet
from deeploop.train.metrics import read_metrics
from deeploop.train.rundir import load
from llama_family import TOKENS, logits_of, make_model, save_model, save_tokenizer

WORDS = ["the", "loop", "of", "loops", "and", "other", "them", "all", "again"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of six layers with a tokenizer of fewer words than it has rows."""
    folder = save_model(make_model("Llama", num_hidden_layers=6), tmp_path_factory.mktemp("llama"))
    return save_tokenizer(folder, vocabulary=290)


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "text"
    texts = [" ".join(WORDS[(7 * n + 3 * i) % len(WORDS)] for i in range(60)) for n in range(300)]
    prepare(texts, find_tokenizer(str(folder)), out, validation_tokens=1500, source="words")
    return out


@torch.no_grad()
def our_logits(model, rounds):
    model.set_rounds(rounds)
    return model.logits(model(TOKENS).states)


@pytest.mark.parametrize("injection", ["none", "linear"])
@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_at_one_round_with_all_layers_it_is_the_source(folder, injection, exponent):
    source = open_source(folder)
    layers = choose_layers(6, "2-3")
    options = {"injection": injection, "epsilon_exponent": exponent}
    model = build(source, layers, looped_config(source.config, layers, rounds=4, **options))
    theirs = make_model("Llama", num_hidden_layers=6)
    torch.testing.assert_close(our_logits(model, 1), logits_of(theirs, TOKENS), atol=1e-4, rtol=1e-5)
    assert model.blocks[0].mlp.epsilon == 1
    looped = our_logits(model, 4)
    assert (looped - our_logits(model, 1)).abs().max() > 0.1
    if not exponent:  # the same layers in a row, by transformers
        stack = theirs.model.layers
        theirs.model.layers = torch.nn.ModuleList([*stack[:2], *[*stack[2:4]] * 4, *stack[4:]])
        torch.testing.assert_close(looped, logits_of_plain(theirs), atol=1e-4, rtol=1e-5)


@torch.no_grad()
def logits_of_plain(model):
    """Without a cache, whose slots go by the layers' own numbers."""
    model.config.num_hidden_layers = len(model.model.layers)
    return model(TOKENS, use_cache=False).logits


def test_layers_are_dropped(folder):
    source = open_source(folder)
    layers = choose_layers(6, "3-4", prelude="0-1", coda="5")
    assert layers.kept == [0, 1, 3, 4, 5]
    assert layers.dropped(6) == [2]
    model = build(source, layers, looped_config(source.config, layers, rounds=2))
    theirs = make_model("Llama", num_hidden_layers=6)
    del theirs.model.layers[2]
    torch.testing.assert_close(our_logits(model, 1), logits_of_plain(theirs), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--core", "4-9"], "core=4-9: the source has 6 layers, 0 to 5"),
        (["--core", "9-3"], "core=9-3: the lower layer comes first: 3-9"),
        (["--core", "2-3", "--prelude", "0-2"], "prelude and core overlap or are out of order: 0-2 and 2-3"),
        (["--core", "2-3", "--coda", "3-5"], "core and coda overlap or are out of order: 2-3 and 3-5"),
        (["--core", "two"], "core=two: must be layers such as 8-15, or none"),
        (["--core", "none"], "core=none: must name at least one layer"),
        ([], "core: must give the layers to loop"),
        (["--core", "2-3", "--injection", "add"], "injection=add: must be none or linear; add would change"),
        (["--core", "2-3", "--rounds", "0"], "rounds=0: must be at least 1"),
        (["--core", "2-3", "--context", "9999"], "context=9999: must be 1 to "),
        (["--suggest", "--data", "nowhere"], "nowhere: no such corpus"),
        (["--suggest", "--tokens", "0"], "tokens=0: must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(folder, tmp_path, capsys, words, message):
    assert main(["retrofit", str(folder), "--out", str(tmp_path / "x"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_suggest_ranks_the_cores_and_dry_run_counts(folder, corpus, capsys):
    words = ["retrofit", str(folder), "--suggest", "--length", "2", "--data", str(corpus), "--tokens", "64"]
    assert main(words) == 0
    out = capsys.readouterr().out
    losses = [float(line.split()[3]) for line in out.splitlines() if line.startswith("    ") and "-" in line]
    context = open_source(folder).config.context  # less than the default of 1,024
    assert out.splitlines()[-1].endswith(f" --data {corpus} --context {context} --out runs/retrofit")
    assert len(losses) == 5
    assert losses == sorted(losses)
    source, layers = open_source(folder), choose_layers(6, "2-3")
    model = build(source, layers, looped_config(source.config, layers, rounds=4))
    inputs, targets = validation_windows(Corpus.open(corpus).validation, 64, 1)
    expected = float(model(inputs, targets).loss.detach()) / 64
    assert (
        next(line for line in out.splitlines() if line.startswith("    2-3")).split()[3] == f"{expected:.3f}"
    )
    assert main(["retrofit", str(folder), "--core", "2-3", "--rounds", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "prelude 0-1, core 2-3, coda 4-5" in out
    assert re.search(r"R = 3 +[1-9]\d*(\.\d+)? kFLOPs  \(1\.\d\d ×\)", out)
    assert main(["retrofit", str(folder), "--core", "2-3", "--rounds", "99", "--dry-run"]) == 0
    assert re.search(r"R = 99 +\d,\d{3} kFLOPs", capsys.readouterr().out)


def test_inspect(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "6 of width 32" in out
    assert "4 heads of 8, 2 of keys, values" in out
    assert "</s>" not in out


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokens = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(tokens).logits, sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
said = [{"role": "user", "content": "the loop"}]
chat = tokenizer.apply_chat_template(said, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**chat, max_new_tokens=3, do_sample=False)[0]))
assert "deeploop" not in sys.modules
"""


def test_the_whole_way(folder, corpus, tmp_path, capsys):
    run, healed, out = tmp_path / "run", tmp_path / "run-healed", tmp_path / "exported"
    words = ["--core", "2-3", "--prelude", "0-1", "--coda", "4-5", "--injection", "linear", "--rounds", "2"]
    words += ["--context", "32", "--data", str(corpus)]
    assert main(["retrofit", str(folder), "--out", str(run), *words]) == 0
    assert "deeploop prepare" not in capsys.readouterr().out  # the corpus is there
    assert main(["retrofit", str(folder), "--out", str(run), *words]) == 2  # is not empty
    assert main(["validate", str(run), "--rounds", "1", "2"]) == 0
    before = float(capsys.readouterr().out.split("2 (trained)")[1].split()[0])
    assert main(["train", "--resume", str(run)]) == 2
    assert f"a retrofit's start; heal it with: deeploop train --config {run}" in capsys.readouterr().err
    train = ["train", "--config", str(run / "config.json"), "--optim.batch", "4", "--optim.injection-lr", "3"]
    train += ["--optim.steps", "20", "--optim.warmup-steps", "2", "--checkpoint.every", "10", "--quiet"]
    train += ["--optim.peak-lr", "1e-3", "--data.validation-sequences", "20"]
    assert main(train) == 0
    straight = load(healed)[0].state_dict()
    assert last_checkpoint(healed).name == "step-00000020"
    validated = [line for line in read_metrics(healed) if line["kind"] == "validation"]
    assert validated[-1]["validation_rounds"] == [1, 2, 4, 8]
    assert validated[-1]["loss"] < 4.5 < before
    assert read_stamp(healed)["retrofit"]["core"] == "2-3"
    runs = find_runs([run, healed])
    assert [(one.state, steps_done(one)) for one in runs] == [("untrained", "–"), ("finished", "20/20")]
    parts = [part for section in make_sections(runs, Histories()) for part in section.parts]
    tables = {part.name: part for part in parts if isinstance(part, Table)}
    assert len(tables["runs"].rows) == 2
    assert tables["depths"].rows[0][4] == "1"  # seed: the losses are of the healed one alone
    # The same from step 10 on.
    shutil.rmtree(last_checkpoint(healed))
    assert main(["train", "--resume", str(healed), "--quiet"]) == 0
    resumed, _ = load(healed)
    assert all(torch.equal(tensor, straight[name]) for name, tensor in resumed.state_dict().items())
    assert resumed.injection.weight[:, 32:].abs().max() > 0
    assert main(["generate", str(healed), "--prompt", "the", "--max-tokens", "3"]) == 0
    longest = open_source(folder).config.context
    assert main(["export", str(healed), str(out), "--context", str(longest + 1)]) == 2
    assert f"must be at most {longest}, the context of the retrofit's source" in capsys.readouterr().err
    assert main(["export", str(healed), str(out), "--context", "64"]) == 0
    assert main(["validate", str(out)]) == 2
    assert f"{out}: is an export, not a run folder" in capsys.readouterr().err
    assert main(["validate", str(corpus)]) == 2
    assert f"{corpus}: is a corpus, not a run folder" in capsys.readouterr().err
    capsys.readouterr()
    tokens, found = tmp_path / "tokens.pt", tmp_path / "logits.pt"
    torch.save(TOKENS[:, :32], tokens)
    command = [sys.executable, "-I", "-c", LOAD, str(out), str(tokens), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<user>the loop</s>" in done.stdout
    with torch.no_grad():
        ours = resumed.logits(resumed(TOKENS[:, :32]).states)
    assert torch.equal(torch.load(found), ours)


def test_a_retrofit_is_fine_tuned_on_conversations(folder, corpus, tmp_path, capsys, monkeypatch):
    """With the template and the special words that came with its tokenizer."""
    run, chat, tuned = tmp_path / "run", tmp_path / "chat", tmp_path / "tuned"
    core = f"retrofit {folder} --out {run} --core 2-3 --rounds 2 --context 64 --data {corpus}"
    assert main(core.split()) == 0
    (tmp_path / "talk.jsonl").write_text('{"prompt": "the <user>", "response": "loop"}\n' * 6)
    words = f"prepare chat {tmp_path / 'talk.jsonl'} --tokenizer {run} --template tokenizer --out {chat}"
    assert main(words.split()) == 0
    words = f"train chat --init-from {run} --data.path {chat} --out {tuned} --device.kind cpu --quiet"
    assert main([*words.split(), "--optim.steps", "2", "--optim.batch", "2"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("the\n"))
    assert main(["chat", str(tuned), "--max-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("\n")
    tokenizer, tokens = find_tokenizer(str(run)), ChatSet.open(chat).train.tokens
    # Before each of two messages, where the template has it; the one in the question is plain text.
    assert (tokens == tokenizer.special_tokens["<user>"]).sum() == 2 * len(ChatSet.open(chat).train)
    # Whatever recipe takes it up, its model is that of the source.
    words = f"train tiny --init-from {run} --data.path {corpus} --out {tmp_path / 'more'} --device.kind cpu"
    assert main([*words.split(), "--optim.steps", "1", "--optim.batch", "2", "--quiet"]) == 0
    assert load_config(tmp_path / "more").model == load_config(run).model
    # From the export, whose tokenizer has another name, on the same conversations.
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    words = f"train chat --init-from {tmp_path / 'exported'} --data.path {chat} --dry-run --device.kind cpu"
    assert main([*words.split(), "--optim.batch", "2"]) == 0


def test_a_killed_retrofit_is_written_by_the_same_command(folder, tmp_path, monkeypatch):
    """Stopped at every file that it moves into place; what is left is no run until all of it is there."""
    move, words = os.replace, f"retrofit {folder} --core 2-3 --rounds 2 --data {tmp_path / 'none'}".split()
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    names = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*")}
    for stop in range(20):
        out, count = tmp_path / f"run-{stop}", itertools.count()

        def stopped(source, destination, stop=stop, count=count):
            if next(count) == stop:
                raise KeyboardInterrupt
            move(source, destination)

        monkeypatch.setattr(os, "replace", stopped)
        code = main([*words, "--out", str(out)])
        monkeypatch.setattr(os, "replace", move)
        if code == 0:
            break
        assert not (out / "run.json").exists()
        assert main([*words, "--out", str(out)]) == 0
        assert {path.relative_to(out) for path in out.rglob("*")} == names
        load(out)
    assert stop > 5


def test_a_corpus_of_another_vocabulary_is_one_line(folder, tmp_path, capsys):
    other = tmp_path / "bytes"
    prepare([" ".join(WORDS)] * 99, get_tokenizer("bytes"), other, validation_tokens=99, source="words")
    run = tmp_path / "run"
    words = ["retrofit", str(folder), "--core", "2-3", "--out", str(run)]
    assert main([*words, "--data", str(other)]) == 2
    error = capsys.readouterr().err
    assert f"data={other}: holds bytes tokens, the source reads " in error
    assert error.endswith(f"--tokenizer {folder} --out FOLDER, and give --data FOLDER\n")
    assert not run.exists()
    assert main([*words, "--data", str(tmp_path / "none")]) == 0
    assert f"--tokenizer {run} --out {tmp_path / 'none'}\n" in capsys.readouterr().out
    assert main(["train", "--config", str(run / "config.json"), "--data.path", str(other)]) == 2
    assert "holds bytes tokens" in capsys.readouterr().err


def test_a_lora_adapter_can_be_trained(folder, tmp_path):
    peft = pytest.importorskip("peft")
    source = open_source(folder)
    layers = choose_layers(6, "2-3")
    from deeploop.models.hf import DeepLoopForCausalLM

    model: LoopedGPT = build(source, layers, looped_config(source.config, layers, rounds=2))
    theirs = peft.get_peft_model(
        DeepLoopForCausalLM.from_gpt(model), peft.LoraConfig(r=2, target_modules=["q", "v"])
    )
    theirs(input_ids=TOKENS, labels=TOKENS).loss.backward()
    trained = [name for name, parameter in theirs.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)
