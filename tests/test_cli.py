"""The command line: every mistake is one line that names field and value, and exit code 2."""

import ast
import dataclasses
import io
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import deeploop
from deeploop.cli import main
from deeploop.commands import prepare_puzzles
from deeploop.commands.train import shape_of_width, with_steps_of_corpus, with_vocabulary_of_corpus
from deeploop.config.json import leaf_hints
from deeploop.config.short_names import SHORT
from deeploop.models import LoopedGPT
from deeploop.runs.folder import list_checkpoints, load_config
from deeploop.tasks.puzzles.recipes import PUZZLES
from deeploop.tasks.recipes import RECIPES, get_recipe
from deeploop.terminal import loading_torch
from deeploop.train import loop
from deeploop.train.distributed import World
from deeploop.train.opening import open_run


@pytest.fixture
def refused(capsys):
    """Runs a command that must fail, and gives its one line on stderr."""

    def run(arguments, code=2):
        capsys.readouterr()
        assert main([str(word) for word in arguments]) == code
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1, captured.err
        assert captured.err.endswith("\n")
        assert "Traceback" not in captured.err
        assert captured.err.startswith(f"deeploop {arguments[0]}: error: ")
        return captured.err.strip().removeprefix(f"deeploop {arguments[0]}: error: ")

    return run


@pytest.fixture
def damaged(corpus, tmp_path):
    """A copy of the corpus that a test may damage."""
    return shutil.copytree(corpus, tmp_path / "corpus")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fly", "command 'fly': unknown; choose one of plan, recommend, prepare, data, inspect, "),
        ("recomend --blocks 4", "command 'recomend': unknown; perhaps recommend"),
        ("train gpt3", "recipe 'gpt3': unknown; choose one of gpt2-small, gpt2-medium, tiny"),
        ("train tinny", "recipe 'tinny': unknown; perhaps tiny"),
        ("train --out runs/mine", "--out: the recipe comes first; choose one of gpt2-small, "),
        ("train --resume --out runs/mine", "--resume: names nothing; give --resume RUN, or a recipe as the "),
        ("train --config", "--config: names nothing; give --config FILE, or a recipe as the first word"),
        ("train --resume runs/none", "runs/none: no such run folder"),
        (
            "train --resume shipped",
            "shipped: comes with the package and can't be changed; --init-from shipped ",
        ),
        ("train --resume runs/a --out runs/b", "--out: --resume runs/a writes into runs/a; leave --out out"),
        (
            "train tiny --resume runs/a",
            "--resume runs/a: goes without a recipe; say: deeploop train --resume ",
        ),
        (
            "train tiny --config a.toml",
            "--config a.toml: goes without a recipe; say: deeploop train --config ",
        ),
        ("train --config none.toml", "none.toml: can't be read (No such file or directory)"),
        ("prepare web", "source 'web': unknown; choose one of stdlib, text, fineweb-edu"),
        ("train tiny --model.rounds 0", "model.rounds=0: must be at least 1"),
        ("train tiny --model.heads 3", "model.heads=3: must be a divisor of model.width=128"),
        ("train tiny --lr 1e-3 --auto-lr", "--lr: is what --auto-lr chooses; give one of the two"),
        (
            "train tiny --model.width 100 --model.heads 8",
            "model.heads=8: must be a divisor of model.width=100",
        ),
        ("train tiny --optim.steps 0", "optim.steps=0: must be at least 1"),
        ("train tiny --optim.peak-lr -1", "optim.peak_lr=-1.0: must be a number from 0 to 1e+30"),
        ("train tiny --optim.peak-lr 1e38", "optim.peak_lr=1e+38: must be a number from 0 to 1e+30"),
        ("train tiny --checkpoint.keep 0", "checkpoint.keep=0: must be at least 1"),
        ("plan --blocks 12 --rounds 0", "rounds=0"),
    ],
)
def test_a_mistake_is_one_line(refused, arguments, message):
    assert message in refused(arguments.split())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("train tiny --model.round 3", ["--model.round", "perhaps you meant --model.rounds"]),
        ("train tiny --optim.step 3", ["--optim.step:", "perhaps you meant --optim.steps"]),
        ("train tiny --optim.warmup 3", ["--optim.warmup", "perhaps you meant --warmup"]),
        ("train tiny --optim.lr 1e-3", ["--optim.lr", "perhaps you meant --lr"]),
        ("train hrm-sudoku4 --optim.learning_rate 1e-3", ["perhaps you meant --lr"]),
        ("train tiny --learning-rate=3", ["--learning-rate: ", "perhaps you meant --lr"]),
        ("train tiny --round 3", ["--round:", "perhaps you meant --rounds"]),
        (
            "train tiny --rounds.noise 0.3",
            ["is for an iterated task, such as automaton; tiny trains a language"],
        ),
        (
            "train hrm-sudoku4 --rounds 3",
            ["--rounds: is for a language model", "hrm-sudoku4 trains a reasoner"],
        ),
        ("train tiny-flat", ["use `deeploop train tiny --rule flat`"]),
        ("recommend --round 8 --blocks 6 --width 512", ["--round:", "perhaps you meant --rounds"]),
        ("recommend --blocks 6 --width 512 --foo 3", ["missing: --rounds INT, ", "unknown: --foo"]),
        ("train tiny --rule", ["--rule: a value is missing; give --rule STR"]),
        ("train tiny --optim.betas 0.9 x", ["--optim.betas=0.9 x: must be two numbers"]),
        ("train tiny --device gpu", ["--device=gpu: must be one of auto, cpu, cuda"]),
        ("export shipped out --rounds 8", ["perhaps you meant rounds=… in from_pretrained"]),
        ("train tiny --batch-size 3", ["perhaps you meant --batch"]),
        ("train tiny --model.rounds three", ["--rounds=three: must be a whole number"]),
        ("train tiny --model.rounds 1.5e0", ["--rounds=1.5e0: must be a whole number, such as 1000"]),
        (
            "recommend --blocks 4 --rounds 8 --width 9 --tokens x --batch 8",
            ["--tokens=x: must be a number"],
        ),
        ("recommend --blocks 4 --rounds 8 --width 9999 --tokens 1e9 --batch 8", ["width=9999 (our runs"]),
        ("train tiny --optim.peak-lr fast", ["--lr=fast: must be a number"]),
        ("train tiny --model.rule sideways", ["model.rule=sideways: must be one of deeploop, "]),
        ("train tiny --model.rule averged", ["; perhaps averaged"]),
        ("train tiny --model.rounds", ["--rounds: a value is missing"]),
        ("train tiny --no-unigram-bias", ["perhaps you meant --model.no-unigram-bias"]),
        ("train tiny --noise 3", ["--noise: unknown option; see --help"]),
        ("train tiny surplus", ["surplus"]),
        ("prepare stdlib --tokenizer words", ["tokenizer", "words", "gpt2"]),
        ("plan --blocks many --rounds 3", ["--blocks", "many"]),
    ],
)
def test_a_word_that_cannot_be_parsed_is_named(refused, arguments, parts):
    message = refused(arguments.split())
    for part in parts:
        assert part in message


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("loaded", "rank", "stream", "told"),
    [
        (False, "0", Terminal, True),
        (False, "1", Terminal, False),
        (False, "0", io.StringIO, False),
        (True, "0", Terminal, False),
    ],
)
def test_who_waits_for_torch_is_told_until_it_is_there(loaded, rank, stream, told, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("RANK", rank)
    with loading_torch():
        assert sys.stderr.getvalue() == ("loading PyTorch …\r" if told else "")
    _, *last = sys.stderr.getvalue().split("\r")
    assert last == ([" " * 17, ""] if told else [])  # nothing of it stays


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("UnrecognizedArgs", {"tokens"}),
        ("MissingArgs", {"missing_arguments", "unrecognized_tokens"}),
        ("InvalidChoice", {"argument", "value", "choices"}),
        ("BadValue", {"argument"}),
        ("InstantiationFailure", {"argument", "message"}),
    ],
)
def test_tyro_has_the_private_events_that_parsing_reads(event, fields):
    """Has failed with a new tyro? Change `commands/parsing.py`, and the bounds in pyproject.toml."""
    from tyro import _errors

    assert fields <= {field.name for field in dataclasses.fields(getattr(_errors, event))}
    with _errors.on_parse_error(print):
        pass


@pytest.mark.parametrize("where", ["terminal", "ascii", "utf-8"])
def test_the_line_is_the_same_wherever_it_is_printed(where):
    """tyro frames and colours its errors to suit stdout; nothing of that is left."""
    terminal, stdout = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    if where != "terminal":
        environment["PYTHONIOENCODING"] = where
    done = subprocess.run(
        [sys.executable, "-m", "deeploop", "plan", "--block", "2"],
        stdout=stdout if where == "terminal" else subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        timeout=60,
    )
    os.close(terminal)
    os.close(stdout)
    assert done.returncode == 2
    line = "deeploop plan: error: --block: unknown option; perhaps you meant --blocks\n"
    assert done.stderr == line


def test_a_batch_that_does_not_split_over_the_ranks(make_config, tmp_path):
    config = make_config(tmp_path / "run", optim={"batch": 7})
    with pytest.raises(ValueError, match=r"^optim\.batch=7: must be a multiple of the 2 ranks$"):
        open_run(config, World(0, 2, torch.device("cpu")))
    assert not config.out.exists()


@pytest.mark.parametrize(("name", "source"), [("stdlib", "stdlib"), ("mine", "text FILE…")])
def test_a_missing_corpus(refused, train_arguments, tmp_path, name, source):
    """The command that makes it, to be copied."""
    path = tmp_path / name
    message = refused(train_arguments(tmp_path / "run", "--data.path", path))
    made = f"`deeploop prepare {source} --out {path}`"
    assert message == f"data.path={path}: no such corpus; make it with {made}"


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith(("hrm", "trm"))])
def test_missing_puzzles_of_a_recipe(refused, tmp_path, monkeypatch, recipe):
    """The command that makes them, to be copied: it builds the board that the recipe expects."""
    monkeypatch.chdir(tmp_path)
    message = refused(["train", recipe, "--device.kind", "cpu"])
    path = RECIPES[recipe]().data.path
    found = re.fullmatch(rf"data.path={path}: no such .*; make it with `deeploop (prepare .+)`", message)
    source, *words = found[1].split()[1:]
    assert words[-2:] == ["--out", str(path)]
    size = int(words[words.index("--size") + 1]) if "--size" in words else {"sudoku": 9}.get(source, 30)
    assert PUZZLES[path.name].shape.length == size**2


def test_a_missing_shard(refused, train_arguments, tmp_path, damaged):
    (damaged / "train_000000.bin").unlink()
    message = refused(train_arguments(tmp_path / "run", "--data.path", damaged))
    assert message == f"data.path={damaged}: train_000000.bin: missing shard"


@pytest.mark.parametrize("left", [100, 2000])
def test_a_truncated_shard(refused, train_arguments, tmp_path, damaged, left):
    shard = damaged / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:left])
    message = refused(train_arguments(tmp_path / "run", "--data.path", damaged))
    assert message.startswith(f"data.path={damaged}: {shard.name}: truncated shard: {left} bytes")


def test_a_wrong_vocabulary(refused, train_arguments, tmp_path, corpus):
    message = refused(train_arguments(tmp_path / "run", "--model.vocabulary", 50257))
    assert message == (
        f"model.vocabulary=50257: {corpus} holds bytes tokens, which need model.vocabulary=257; "
        "set that, or prepare the text with another --tokenizer"
    )


def test_a_recipe_takes_the_vocabulary_of_its_corpus_unless_told(corpus, tmp_path):
    recipe = get_recipe("gpt2-small")
    config = replace(recipe, data=replace(recipe.data, path=corpus))
    changed, [line] = with_vocabulary_of_corpus(config, ["--model.rounds", "3"])
    assert changed == replace(config, model=replace(config.model, vocabulary=257))
    assert line == f"vocabulary: 257, as {corpus} has it (bytes)"
    assert with_vocabulary_of_corpus(changed, []) == (changed, [])
    assert with_vocabulary_of_corpus(config, ["--model.vocabulary=50257"]) == (config, [])
    absent = replace(recipe, data=replace(recipe.data, path=tmp_path / "absent"))
    assert with_vocabulary_of_corpus(absent, []) == (absent, [])  # the run's opening says what is wrong


def test_steps_of_a_recipe_are_fitted_to_a_small_corpus(corpus):
    """The corpus has 23,510 tokens, of which tiny's 614,400 are 26 epochs."""
    recipe = get_recipe("tiny")
    config = replace(recipe, data=replace(recipe.data, path=corpus))
    assert with_steps_of_corpus(config, ["--optim.steps=300"], "tiny") == (config, [])
    small = replace(config, optim=replace(config.optim, batch=4))
    assert with_steps_of_corpus(small, [], "tiny") == (small, [])  # 6.5 epochs
    long = replace(small, optim=replace(small.optim, steps=1000))
    fitted, [line] = with_steps_of_corpus(long, [], "tiny")
    assert (fitted.optim.steps, fitted.optim.warmup_steps) == (10 * 23_510 // 512, 91)
    assert (fitted.data.validate_every, fitted.checkpoint.every) == (45, 45)
    assert line.startswith(
        f"steps: 459, 10 epochs: {corpus} has 23,510 tokens, which the 1,000 steps of tiny "
    )
    kept, _ = with_steps_of_corpus(long, ["--optim.warmup-steps", "200", "--checkpoint.every=7"], "tiny")
    assert (kept.optim.warmup_steps, kept.checkpoint.every) == (200, 100)


def test_steps_of_a_recipe_are_fitted_to_a_small_mixture(refused, corpus, tmp_path):
    """Both have 23,510 tokens; a corpus that is never drawn does not count."""
    other, unused = (shutil.copytree(corpus, tmp_path / name) for name in ("my other", "unused"))
    mix = f"{corpus}=0.5", f"{other}=0", f"{unused}=0"
    recipe = get_recipe("tiny")
    config = replace(recipe, data=replace(recipe.data, mix=mix, mix_last=(f"{other}=1",)))
    config = replace(config, optim=replace(config.optim, steps=1000))
    fitted, [line] = with_steps_of_corpus(config, [], "tiny")
    assert fitted.optim.steps == 10 * 2 * 23_510 // 2048
    assert line.startswith(f"steps: 229, 10 epochs: {' '.join(mix)} have 47,020 tokens, which the 1,000 ")
    shutil.rmtree(other)
    assert with_steps_of_corpus(config, [], "tiny") == (config, [])  # the run's opening says what is wrong

    shutil.copytree(corpus, other)
    message = refused(["train", "gpt2-small", "--data.mix", *mix[:2], "--blocks", "2"])
    first, second = re.findall(r"`deeploop (.*?)`", message)
    assert shlex.split(second) == ["train", "tiny", "--data.mix", *mix[:2]]
    assert shlex.split(first)[:8] == [
        "train",
        "gpt2-small",
        "--data.mix",
        *mix[:2],
        "--model.blocks",
        "2",
        "--batch",
    ]


def test_a_corpus_too_small_for_a_recipe_is_answered_with_commands_to_choose_from(refused, corpus, capsys):
    message = refused(["train", "gpt2-small", "--data", str(corpus)])
    assert (
        f"{corpus} has 23,510 tokens, which the 100,000 steps of gpt2-small repeat 2,090,685 times" in message
    )
    first, second = re.findall(r"`deeploop (.*?)`", message)
    assert first == f"train gpt2-small --data {corpus} --batch 1 --steps 229 --warmup 45"
    assert second == f"train tiny --data {corpus}"
    assert main([*second.split(), "--dry-run", "--device", "cpu"]) == 0
    assert "steps: 114, 10 epochs" in capsys.readouterr().out
    _, elsewhere = re.findall(r"`deeploop (.*?)`", refused([*first.split()[:4], "--out", "runs/mine"]))
    assert elsewhere == f"train tiny --data {corpus} --out runs/mine"
    (once, again) = re.findall(r"`deeploop (.*?)`", refused([*second.split(), "--batch", "32"]))
    assert again == f"train tiny --data {corpus} --optim.batch 32 --steps 300"
    assert main([*once.split(), "--dry-run", "--device", "cpu"]) == 0
    assert "10.0 epochs" in capsys.readouterr().out
    measured = re.findall(r"`deeploop (.*?)`", refused([*second.split(), "--batch", "32", "--auto-lr"]))
    assert measured == [once, f"{again} --auto-lr"]
    assert main([*measured[1].split(), "--dry-run", "--device", "cpu"]) == 0
    assert "--auto-lr: peak rate" in capsys.readouterr().out


def test_text_that_is_not_prepared_is_answered_with_two_commands(
    refused, train_arguments, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("text")
    for path, out in (("books", "data/books"), ("books/a.txt", "data/a")):
        message = refused(["train", "tiny", "--data", path])
        assert message.endswith(f"give --data {out} after `deeploop prepare text {path} --out {out}`")
    (tmp_path / "data" / "books").mkdir(parents=True)
    assert "--out data/books-tokens`" in refused(["train", "tiny", "--data", "books"])


def test_a_context_longer_than_the_corpus(refused, train_arguments, tmp_path):
    message = refused(train_arguments(tmp_path / "run", "--model.context", 1_000_000))
    assert message.startswith("context 1000000: a window needs 1000001 tokens")


def test_an_unwritable_folder(refused, train_arguments, tmp_path):
    """Below a regular file nobody can write, whoever runs the test."""
    (tmp_path / "file").write_text("")
    message = refused(train_arguments(tmp_path / "file" / "run"))
    assert message.startswith(f"out={tmp_path / 'file' / 'run'}: can't be written (")
    assert "(Not a directory)" in message


def test_a_device_that_is_not_there(refused, train_arguments, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = refused(train_arguments(tmp_path / "run", "--device.kind", "cuda"))
    assert message == "device.kind=cuda: this machine has no CUDA device; use auto or cpu"


@pytest.mark.parametrize("recipe", ["gpt2-small", "hrm-arc1-deeploop", "trm-sudoku"])
def test_a_dry_run_does_without_the_data(recipe, tmp_path, capsys):
    """Describe a run on the paper's text or puzzles, before there is any."""
    assert main(["train", recipe, "--data.path", str(tmp_path / "text"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'text'}: not there yet, make it with `deeploop prepare`" in said
    if recipe == "gpt2-small":
        assert "123,659,904 parameters; K = 12 blocks × R = 3 rounds, N = 36" in said
        assert "49,152,000,000 tokens planned" in said
    if recipe == "hrm-arc1-deeploop":
        assert "N = 12 (the paper's N_g): α = 4.899, β = 0.1021" in said


def test_a_folder_that_holds_a_run(refused, train_arguments, tmp_path):
    out = tmp_path / "run"
    assert main(train_arguments(out)) == 0
    kept = [path.name for path in list_checkpoints(out)]

    assert refused(train_arguments(out)) == (
        f"out={out}: already holds a run at step-00000006; "
        "add --resume to continue it, or choose another --out"
    )
    assert "already holds a run" in refused(train_arguments(out, "--dry-run"))
    assert "already holds a run" in refused(train_arguments(out, "--dry-run", "--data.path", "nowhere"))
    for field, value, old in [("hidden", 96, 64), ("rounds", 5, 3), ("rule", "prenorm", "deeploop")]:
        message = refused(train_arguments(out, "--resume", f"--model.{field}", value))
        name = f"model.{field}"
        assert message.startswith(f"{name}={value}: the run in {out} was started with {name}={old}; `deep")
    assert refused(train_arguments(out, "--resume", "--seed", 1, "--optim.steps", 9)) == (
        f"seed=1: the run in {out} was started with seed=0; `deeploop train --resume {out}` keeps that; "
        "or choose another --out"
    )
    assert [path.name for path in list_checkpoints(out)] == kept


def test_a_run_prints_how_it_ended(train_arguments, tmp_path, capsys):
    assert main(train_arguments(tmp_path / "run")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    *header, first, _, last = captured.out.splitlines()
    names = [
        "run:",
        "model:",
        "rule:",
        "data:",
        "optimizer:",
        "cost:",
        "device:",
        "execution:",
        "floor:",
        "verdict:",
    ]
    assert [line.split()[0] for line in header] == names
    assert header[0] == f"run:       {tmp_path / 'run'}, 6 steps (deeploop train tiny)"
    assert header[-3] == "execution: eager modules, fp32"
    assert first.startswith("step      0  validation ")
    assert last.startswith(f"finished at step 6: {tmp_path / 'run'}, last validation ")


def test_a_quiet_run_prints_its_last_line(train_arguments, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(train_arguments(out, "--quiet")) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert re.fullmatch(rf"finished at step 6: {out}, last validation \d\.\d{{4}}, (escaped|undecided)", line)
    assert captured.err == ""
    assert main(train_arguments(out, "--quiet")) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(train_arguments, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(train_arguments(out, "--dry-run")) == 0
    planned = capsys.readouterr().out
    assert not any(tmp_path.iterdir())
    assert main(train_arguments(out)) == 0
    assert capsys.readouterr().out.startswith(planned)

    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(out), "--optim.steps", "9", "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert planned.startswith(f"run:       {out}, step 6 of 9 (deeploop train --resume {out})\n")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    assert main(["train", "--resume", str(out), "--optim.steps", "9"]) == 0
    assert capsys.readouterr().out.startswith(planned)


def test_debugging_shows_where_an_error_came_from(monkeypatch):
    monkeypatch.setenv("DEEPLOOP_TRACEBACK", "1")
    with pytest.raises(ValueError, match="recipe 'gpt3'"):
        main(["train", "gpt3"])


def test_ctrl_c_outside_training_is_quiet(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("deeploop.commands.plan.run", interrupt)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_prepare_that_is_told_to_stop_closes_its_pool(monkeypatch):
    """Workers of one that just ends would wait for it for ever."""
    previous, closed = signal.getsignal(signal.SIGTERM), []

    def stopped(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            closed.append(True)

    monkeypatch.setattr(prepare_puzzles, "run", stopped)
    with pytest.raises(SystemExit) as leaving:
        main(["prepare", "sudoku"])
    assert leaving.value.code == 128 + signal.SIGTERM
    assert closed
    assert signal.getsignal(signal.SIGTERM) == previous


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train"], ["train", "--help"], ["prepare"]])
def test_help_lists_what_there_is(capsys, arguments):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for word in ["gpt2-small", "tiny"] if "train" in arguments else ["stdlib", "fineweb-edu"]:
        assert word in out


def test_every_field_is_in_the_recipes_help(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["train", "tiny", "--help-all"])
    assert not leaving.value.code
    out = capsys.readouterr().out
    for flag in (
        "--model.rounds",
        "--optim.peak-lr",
        "--resume",
        "--init-from",
        "--guard.stop",
        "--data.path",
    ):
        assert flag in out


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_options_of_a_recipe_are_one_screen(recipe, capsys):
    assert main(["train", recipe, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 110
    config = get_recipe(recipe)
    shown = {name for name in SHORT if any(line.startswith(f"  --{name} ") for line in lines)}
    assert shown == {name for name, path in SHORT.items() if path in leaf_hints(type(config))}
    assert any(
        line.startswith("  --lr RATE") and line.endswith(f"[{config.optim.peak_lr}]") for line in lines
    )


def test_short_options_are_those_of_the_fields(train_arguments, tmp_path, capsys):
    words = (
        "--rule prenorm --rounds=4 --blocks 1 --steps 7 --batch 2 --lr 2e-3 --warmup 3 --seed 5 --device cpu"
    )
    out = tmp_path / "run"
    assert main([*train_arguments(out), *words.split(), "--width", "64", "--quiet"]) == 0
    config = load_config(out)
    model, optim = config.model, config.optim
    assert (model.rule, model.rounds, model.blocks, model.width) == ("prenorm", 4, 1, 64)
    assert (optim.steps, optim.batch, optim.peak_lr, optim.warmup_steps, config.seed) == (7, 2, 2e-3, 3, 5)
    for option, old in (("--width=250", 64), ("--rounds 5", 4)):
        assert main(["train", "--resume", str(out), *option.split()]) == 2
        field = f"model.{option[2:].replace(' ', '=')}"
        assert f"{field}: the run in {out} was started with" in (said := capsys.readouterr().err)
        assert f"={old}; `deeploop train --resume {out}` keeps that; or choose another --out" in said


@pytest.mark.parametrize(
    ("width", "heads", "hidden"),
    [(256, 4, 688), (200, 5, 544), (96, 2, 272), (6, 1, 32), (7, None, None), ("2e2", 5, 544)],
)
def test_heads_and_hidden_width_follow_a_width_that_is_given_alone(width, heads, hidden):
    words, _ = shape_of_width(get_recipe("tiny"), ["--width", "64", "--width", str(width)])
    expected = [] if heads is None else ["--model.heads", str(heads), "--model.hidden", str(hidden)]
    assert words == expected
    for other in ("--model.heads=2", "--model.hidden=64", "--init-from=runs/a"):
        assert shape_of_width(get_recipe("tiny"), [other, "--width", str(width)]) == ([], [])
    assert shape_of_width(get_recipe("tiny"), ["--model.width", str(width)]) == ([], [])


def test_help_breaks_lines_by_itself():
    """tyro keeps a line break of a field's docstring, and the frame then breaks the text a second time."""
    for path in Path(deeploop.__file__).parent.rglob("*.py"):
        for body in (
            node.body for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
        ):
            for field, text in pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert "\n" not in ast.literal_eval(text.value), (path.name, ast.unparse(field))


def test_a_file_that_cannot_be_written_is_named(refused, tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "corpus"
    assert refused(["prepare", "stdlib", "--out", place]).startswith(f"out={place}: can't be written")


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(capsys, flag):
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"deeploop {deeploop.__version__}\n"
    root = Path(__file__).parents[1]
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"] == deeploop.__version__
    assert f"\nversion: {deeploop.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## [{deeploop.__version__}] - " in (root / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", ["--help", "plan --blocks 2 --rounds 3"])
def test_a_reader_that_left_is_no_error(arguments):
    """`deeploop … | true`, with stdout buffered as it is for most people."""
    done = subprocess.run(
        f"{sys.executable} -m deeploop {arguments} | true",
        shell=True,
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        timeout=60,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling …"),
    ],
)
@pytest.mark.parametrize(("size", "tried"), [(0, "N with an N below the one printed at the start"), (6, "3")])
def test_a_full_gpu_is_told_what_to_try(refused, monkeypatch, tmp_path, size, tried, error):
    def full(config, **options):
        raise error

    monkeypatch.setattr("deeploop.train.loop.train", full)
    words = ["train", "tiny", "--out", tmp_path / "run", "--device.micro-batch", size]
    assert refused(words, code=75) == (
        "the GPU's memory is full; try --device.no-graph, --device.recompute block, or "
        f"--device.micro-batch {tried}"
    )


@pytest.mark.parametrize(
    ("command", "method", "advice"),
    [
        ("validate", "forward", "try --device cpu"),
        ("generate", "forward", "try --device cpu, or a smaller --max-tokens"),
        ("diagnose", "forward", "try --device cpu, or --sequences 1"),
        ("export", "state_dict", "a smaller model, batch or context needs less"),
    ],
)
def test_a_full_gpu_is_one_line_in_other_commands_too(
    refused, monkeypatch, make_config, tmp_path, command, method, advice
):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    loop.train(make_config(tmp_path / "run", optim={"steps": 1}))
    monkeypatch.setattr(LoopedGPT, method, full)
    more = {"export": [tmp_path / "folder"], "diagnose": ["--sequences", 2]}
    words = [command, tmp_path / "run", *more.get(command, [])]
    assert refused(words, code=75) == f"the GPU's memory is full; {advice}"


def test_control_characters_in_an_error_are_shown_not_obeyed(capsys):
    assert main(["runs", "\x1b[2J\x1b]0;owned\x07\u202egood"]) == 2
    error = capsys.readouterr().err
    assert r"\x1b[2J\x1b]0;owned\x07\u202egood: no such folder" in error
    assert error[:-1].isprintable()


def test_more_memory_than_there_is_is_one_line(train_arguments, tmp_path, capsys):
    huge = ("--model.width", 2**31, "--model.heads", 2)
    assert main(train_arguments(tmp_path / "run", *huge)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "more memory than there is (" in error
    assert not (tmp_path / "run").exists()
