"""Make the folders beside this file with deeploop 0.2.0 (revision b36da46), which the tests read.

    git worktree add SOURCE b36da46
    PYTHONPATH=SOURCE/src OMP_NUM_THREADS=1 python tests/v0_2_0/make.py

Commands run in this folder, so that every path in the files is relative. Folders are removed and made anew.
Afterwards pictures and locks are deleted, and logs name `python` in place of the interpreter's path.
"""

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file

import deeploop
from deeploop.cli import main

HERE = Path(__file__).parent
FOLDERS = [
    "corpus",
    "puzzles",
    "conversations",
    "words",
    "language",
    "flat",
    "parts",
    "deepnorm",
    "factored",
    "averaged",
    "prenorm",
    "postnorm",
    "recurrent",
    "hrm",
    "trm",
    "iterate",
    "chat",
    "retrofit",
    "retrofit-healed",
    "export",
    "exports",
    "sweep",
    "search",
    "pack",
]
SENTENCE = "the loop visits one block again and then another until every round is done"
PROMPT = "the loop "
STEPS_OF_LANGUAGE = 160
TOKENS = [
    [int(number) for number in torch.arange(24).mul(7).add(97 + row).remainder(256)] for row in range(2)
]

SHAPE = "--model.rounds 2 --model.width 8 --model.heads 2 --model.hidden 16 --model.context 64"
STEPS = "--optim.steps {steps} --optim.warmup-steps 4 --optim.peak-lr 2e-2 --optim.floor-lr 2e-3"
LOG = "--checkpoint.keep 1 --device.kind cpu --quiet"
LANGUAGE = f"{SHAPE} {STEPS} {LOG} --optim.batch 8 --data.path corpus --data.validation-sequences 8 "
LANGUAGE += "--data.validate-every 40 --log.every 20 --model.blocks"
REPEAT = "--optim.steps 3 --optim.warmup-steps 2 --optim.batch 4 --quiet"
EXPORTED = ("flat", "parts", "deepnorm")  # beside the run `language`
SHAPES = ((4, 16, 384), (2, 4, 128), (1, 64, 128))
RULES = {  # each language run's own fields
    "language": "2 --model.unigram-bias --diagnose.every 80 --diagnose.tokens 16 --diagnose.iterations 2",
    "flat": "1 --model.unigram-bias --model.block flat --model.flat-gain 2",
    "parts": "1 --model.unigram-bias --model.alpha flat --model.beta off --model.no-outer-gain "
    "--model.flat-gain 0.5",
    "deepnorm": "1 --model.unigram-bias --model.p 0.25 --model.no-inner-norm --model.no-scale-gate",
    "factored": "1 --model.unigram-bias --model.block factored --model.factored-gain 0.5",
    "averaged": "1 --model.unigram-bias --model.block averaged",
    "prenorm": "1 --model.block prenorm --model.epsilon-exponent 0.5 --model.shrink-outputs False",
    "postnorm": "1 --model.block postnorm --model.no-tied-head",
    "recurrent": "1 --model.unigram-bias --model.prelude 1 --model.coda 1 --model.injection gated "
    "--model.block flat --rounds.sample uniform --rounds.backprop 1 --optim.kind muon",
}
REASONER = "--model.width 8 --model.heads 2 --model.hidden 16 --optim.batch 8 --optim.warmup-steps 2 "
REASONER += f"--data.path puzzles --data.test-examples 8 --data.validate-every 20 {LOG}"
REASONER += " --halting.segments 3 --log.every 10"
REASONERS = {
    "hrm": "hrm-sudoku4 --model.high-blocks 1 --model.low-blocks 1 --model.p 0.5 --model.high-p 0.25",
    "trm": "trm-sudoku4 --model.blocks 1 --model.flat --model.flat-gain 2",
}


def run(command: str) -> str:
    """Run a command as the command line does, and return what it prints."""
    words = command.split()
    out = io.StringIO()
    print("deeploop", command[:70], flush=True)
    with patch.object(sys, "argv", ["deeploop", *words]), redirect_stdout(out):
        if main(words):
            raise SystemExit(f"deeploop {command}: failed")
    return out.getvalue()


def make_data() -> None:
    """Write a corpus, puzzles and conversations."""
    draw = random.Random(0)
    documents = [" ".join(draw.choices(SENTENCE.split(), k=60)) for _ in range(24)]
    for name in ("words.jsonl", "talk.jsonl"):
        Path(name).unlink(missing_ok=True)
    Path("words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    run("prepare text words.jsonl --tokenizer bytes --validation-tokens 900 --workers 1 --out corpus")
    run("prepare sudoku --size 4 --train 24 --test 8 --workers 1 --out puzzles")
    lines = []
    for number in range(20):
        word = SENTENCE.split()[number % 8]
        asked = {"role": "user", "content": f"say {word}"}
        lines.append(json.dumps({"messages": [asked, {"role": "assistant", "content": f"{word}!"}]}))
    Path("talk.jsonl").write_text("\n".join(lines))
    run("prepare chat talk.jsonl --tokenizer bytes --context 64 --validation-share 0.2 --out conversations")
    Path("talk.jsonl").unlink()


def make_llama(folder: Path) -> None:
    """Save a random Llama with a byte-level tokenizer, as transformers keeps them."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    shape = {"vocab_size": 260, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**shape, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", *alphabet])}
    engine = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **named).save_pretrained(folder)


def make_retrofit() -> None:
    """Give the Llama a loop, and heal it."""
    llama = Path("llama")
    make_llama(llama)
    words = "--tokenizer llama --validation-tokens 900 --workers 1 --out words"
    run(f"prepare text words.jsonl {words}")
    run("retrofit llama --core 1 --rounds 2 --injection linear --context 32 --data words --out retrofit")
    heal = f"{STEPS.format(steps=80)} {LOG} --optim.batch 8 --data.validation-sequences 8 --log.every 20"
    run(f"train --config retrofit/config.json {heal} --out retrofit-healed")
    shutil.rmtree(llama)


def make_runs() -> None:
    """Train one run of each kind."""
    for name, fields in RULES.items():
        run(f"train tiny --out {name} {LANGUAGE.format(steps=STEPS_OF_LANGUAGE)} {fields}")
    for name, fields in REASONERS.items():
        run(f"train {fields} --out {name} --optim.steps 40 {REASONER}")
    iterate = f"--model.blocks 1 {SHAPE} {STEPS.format(steps=40)} {LOG} --optim.batch 8 --data.length 10 "
    iterate += (
        "--data.train-steps 3 --data.test-steps 1 2 3 6 --data.test-examples 16 --data.validate-every 20 "
    )
    iterate += "--rounds.noise 0.1"
    run(f"train automaton --out iterate {iterate} --model.context 32 --model.rounds 3")
    chat = f"{STEPS.format(steps=40)} {LOG} --log.every 10 --optim.batch 2"
    run(f"train chat --init-from language --data.path conversations --out chat {chat}")
    make_retrofit()


def make_sweeps() -> None:
    """Run a grid, and a search without its weights, and pack the grid."""
    run("sweep grid.toml --out sweep")
    run("sweep search.toml --out search --no-keep-weights")
    for log in (*Path("sweep").glob("*.log"), *Path("search").glob("*.log")):
        log.write_text(log.read_text().replace(sys.executable, "python"))
    run("pack sweep --out pack")


def expected() -> dict:
    """Evaluate everything, which also leaves validation.json, depth.json, eval.json and diagnose.json."""
    from deeploop.eval.generation import GREEDY, generate

    found: dict = {"validation": {}, "tokens": {}, "depth": {}, "evaluation": {}}
    for name in (
        *RULES,
        "chat",
        "retrofit",
        "retrofit-healed",
        "sweep/sandwich-p0.25",
        "sweep/sandwich-p0.5",
    ):
        record = json.loads(run(f"validate {name} --device cpu --json"))
        found["validation"][name] = record["rounds"][0]["loss"]
        model, tokenizer = deeploop.load(name)
        prompt = tokenizer.encode(PROMPT)
        found["tokens"][name] = list(generate(model, prompt, max_tokens=12, sampling=GREEDY))
    record = json.loads(run("validate language --rounds 1 2 4 --device cpu --json"))
    found["depth"]["language"] = {str(row["rounds"]): row["loss"] for row in record["rounds"]}
    for name in REASONERS:
        record = json.loads(run(f"eval {name} --device cpu --json"))
        found["evaluation"][name] = {key: record[key] for key in ("loss", "exact", "cells", "segments")}
    record = json.loads(run("eval iterate --device cpu --json"))
    found["evaluation"]["iterate"] = {
        key: record[key] for key in ("rounds", "steps", "loss", "cells", "exact")
    }
    run("diagnose language --device cpu")
    run("export language export")
    found["export"] = export_logits()
    for name in EXPORTED:
        run(f"export {name} exports/{name}")
        for source in Path("exports", name).glob("*.py"):  # the same files as those in export/
            assert source.read_text() == Path("export", source.name).read_text()
            source.unlink()
    return found


def recommended() -> dict:
    """Ask `deeploop recommend` for a rule at a few shapes; its source is rules.json."""
    found = {}
    for shape in SHAPES:
        blocks, rounds, width = shape
        words = f"recommend --blocks {blocks} --rounds {rounds} --width {width} --json"
        record = json.loads(run(words))
        found[f"{blocks} {rounds} {width}"] = {key: record[key] for key in ("rule", "settings", "peak_lr")}
    return {"recommended": found}


def continued() -> dict:
    """Repeat the first three steps of every run, and resume it for two, in a copy; the losses after."""
    found: dict = {"repeated": {}, "resumed": {}}
    names = [*RULES, *REASONERS, "iterate", "chat", "retrofit-healed", "sweep/sandwich-p0.25"]
    with tempfile.TemporaryDirectory() as folder, chdir(shutil.copytree(HERE, Path(folder, "copy"))):
        for name in (*RULES, *REASONERS, "iterate", "chat", "retrofit"):
            run(f"train --config {name}/config.json --out again/{name} {REPEAT}")
            found["repeated"][name] = last_loss(Path("again", name))
        run("train --config config.toml --quiet")
        found["repeated"]["config.toml"] = last_loss(Path("from-toml"))
        for name in names:
            steps = json.loads(Path(name, "run.json").read_text())["ended"]["step"]
            run(f"train --resume {name} --optim.steps {steps + 2} --quiet")
            found["resumed"][name] = last_loss(Path(name))
    return found


def last_loss(folder: Path) -> float:
    """Read the last validation loss from a run's metrics."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "validation"][-1]


def as_text(found: dict) -> str:
    """Format as JSON with a line for each run."""
    parts = []
    for part, values in found.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        parts.append(f" {json.dumps(part)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def export_logits() -> dict:
    """Read the export as transformers does, and sum up its logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("export", trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits[..., :257].double()
    weights = load_file("export/model.safetensors")
    return {
        "tokens": TOKENS,
        "sum_of_squares": float(logits.square().sum()),
        "last": [round(float(value), 7) for value in logits[-1, -1, :8]],
        "weights": sum(tensor.numel() for tensor in weights.values()),
    }


def remove_what_is_not_read() -> None:
    """Delete pictures, locks and compiled files."""
    Path("words.jsonl").unlink()
    for pattern in ("*.png", ".lock", "*.html", "__pycache__"):
        for path in HERE.rglob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    assert deeploop.__version__ == "0.2.0", deeploop.__version__
    os.chdir(HERE)
    os.environ.setdefault("HF_MODULES_CACHE", str(HERE / "modules"))
    for name in FOLDERS:
        shutil.rmtree(name, ignore_errors=True)
    shutil.copyfile(Path(deeploop.__file__).parent / "assets" / "rules.json", "rules.json")
    with redirect_stderr(sys.stdout):
        make_data()
        make_runs()
        make_sweeps()
        found = expected() | continued() | recommended()
    Path("expected.json").write_text(as_text(found))
    remove_what_is_not_read()
    shutil.rmtree("modules", ignore_errors=True)
    subprocess.run(["du", "-sk", "--apparent-size", *FOLDERS], check=True)
