"""Large things on a small machine: what a corpus of 10^9 tokens, 10,000 checkpoints and 10^6 metrics cost."""

import json
import random
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from deeploop.data.corpus_writer import CorpusWriter, Settings
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import TokenLoader
from deeploop.data.tokenizers import get_tokenizer
from deeploop.runs.folder import list_checkpoints
from deeploop.train.checkpoint import read_state, save_checkpoint
from deeploop.train.distributed import World


@dataclass(frozen=True)
class Load:
    """One line of the page."""

    what: str
    amount: str
    measured: str


def resident() -> float:
    """MiB of this process's memory that are in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def large_corpus(folder: Path, tokens: int = 10**9) -> Load:
    """Random bytes in shards of 10^8 tokens; opened, and read in a training order."""
    place, tokenizer = folder / "large", get_tokenizer("bytes")
    place.mkdir()
    writer = CorpusWriter(place, Settings("random bytes", "bytes", 10**6, 10**8, None), tokenizer, None)
    document = np.random.default_rng(0).integers(0, 256, 10**6, dtype=np.uint16)
    while writer.tokens < tokens:
        writer.add(document, len(document))
    writer.finish()
    del writer
    before, began = resident(), time.perf_counter()
    corpus = Corpus.open(place)
    loader = TokenLoader(corpus.train, context=1024, batch=32, seed=0, rank=0, world=1)
    loader.step_batch()
    opened = time.perf_counter() - began
    seconds = []
    for _ in range(300):
        began = time.perf_counter()
        loader.step_batch()
        seconds.append(time.perf_counter() - began)
    grown = resident() - before
    if opened > 2 or grown > 64:
        raise AssertionError(f"opened in {opened:.1f} s, memory grew by {grown:.0f} MiB")
    rate = 300 * 32 * 1024 / sum(seconds)
    held = len(corpus.train) + len(corpus.validation)
    return Load(
        "prepared corpus",
        f"{held:,} tokens, {len(corpus.facts['splits']['train']['shards'])} shards",
        f"open and first batch {opened:.2f} s; 300 random batches of 32 × 1024: {rate / 1e6:.0f} M tokens/s, "
        f"the slowest {max(seconds) * 1e3:.0f} ms; memory grew by {grown:.0f} MiB",
    )


def rotation(folder: Path, count: int = 10_000) -> Load:
    """Checkpoint after checkpoint of a small model, two kept."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    world = World(0, 1, torch.device("cpu"))
    began, before = time.perf_counter(), resident()
    for step in range(1, count + 1):
        save_checkpoint(
            folder / "rotation",
            step=step,
            model=model,
            optimizer=optimizer,
            tensors={},
            state={},
            keep=2,
            world=world,
        )
    seconds = time.perf_counter() - began
    names = [path.name for path in (folder / "rotation" / "checkpoints").iterdir()]
    if sorted(names) != [f"step-{count - 1:08d}", f"step-{count:08d}"]:
        raise AssertionError(f"left behind: {names}")
    read_state(list_checkpoints(folder / "rotation")[-1])
    return Load(
        "rotation of checkpoints",
        f"{count:,} saved, two kept",
        f"{seconds / count * 1e3:.1f} ms each; the two newest are left and nothing else; memory grew by "
        f"{resident() - before:.0f} MiB",
    )


def long_metrics(folder: Path, lines: int = 10**6) -> Load:
    """A run whose metrics have a million lines, listed by `deeploop runs`."""
    from victims import small_config  # here: it imports the whole training side

    from deeploop.train.loop import train

    config = small_config(folder, "long")
    train(config)
    path = config.out / "metrics.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()]
    validation = json.dumps(old[-1] | {"step": lines}) + "\n"
    with path.open("w") as file:
        for step in range(lines):
            file.write(f'{{"kind": "train", "step": {step}, "loss": {random.random():.4f}, "lr": 0.001}}\n')
        file.write(validation)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "deeploop", "runs", str(config.out)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - began
    if seconds > 10 or "long" not in done.stdout:
        raise AssertionError(f"{seconds:.1f} s: {done.stdout}{done.stderr}")
    return Load(
        "metrics",
        f"{lines:,} lines, {path.stat().st_size / 2**20:.0f} MiB",
        f"`deeploop runs` in {seconds:.1f} s",
    )


GRID = """
recipe = "tiny"

[settings]
model.blocks = 1
model.rounds = 2
model.width = 32
model.hidden = 32
model.context = 16
data.path = "{corpus}"
data.validation_sequences = 4
optim.steps = 4
optim.batch = 4
checkpoint.keep = 1
device.kind = "cpu"

[axes]
seed = {seeds}
"""


def many_cells(folder: Path, count: int = 200) -> Load:
    """A sweep of many cells of which all but two are finished: those two are run, the others left alone."""
    from victims import small_config

    corpus = small_config(folder).data.path
    grid, out = folder / "grid.toml", folder / "sweep"
    command = [sys.executable, "-m", "deeploop", "sweep", str(grid), "--out", str(out), "--jobs", "2"]
    grid.write_text(GRID.format(corpus=corpus, seeds=[0]))
    subprocess.run(command, capture_output=True, check=True)
    (made,) = [path for path in out.iterdir() if path.is_dir()]
    config = json.loads((made / "config.json").read_text())
    for seed in range(1, count - 2):
        copy = out / made.name.replace("0", str(seed))
        shutil.copytree(made, copy)
        (copy / "config.json").write_text(json.dumps(config | {"seed": seed, "out": str(copy)}))
    (out / "sweep.json").unlink()
    grid.write_text(GRID.format(corpus=corpus, seeds=list(range(count))))
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    began = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    ran = time.perf_counter() - began
    began = time.perf_counter()
    subprocess.run([*command, "--status"], capture_output=True, check=True)
    looked = time.perf_counter() - began
    touched = [path for path, changed in before.items() if path.stat().st_mtime_ns != changed]
    finished = len([*out.glob("*/checkpoints/step-00000004")])
    if touched or finished != count:
        raise AssertionError(
            f"{len(touched)} finished cells were touched, {finished} of {count} are finished"
        )
    return Load(
        "sweep",
        f"{count} cells, all but two finished",
        f"`--status` in {looked:.1f} s; the two were run in {ran:.1f} s and no finished one was touched",
    )


LOADS = (large_corpus, rotation, long_metrics, many_cells)
