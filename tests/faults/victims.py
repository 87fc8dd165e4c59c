"""Small runs to be disturbed, the processes they run in, and the comparison with an undisturbed one."""

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.recipes import tiny
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

CLOCKS = ("seconds", "tokens_per_s", "mfu")
STEPS = 30


def small_config(folder: Path, name: str = "run", **optim: object) -> TrainConfig:
    """A run of half a second that saves at every second step: a good part of it is spent inside a save."""
    corpus = folder / "corpus"
    draw = random.Random(0)
    words = "the loop visits one block again and then another until every round is done".split()  # noqa: SIM905
    documents = [" ".join(draw.choices(words, k=80)) for _ in range(60)]
    prepare(documents, get_tokenizer("bytes"), corpus, validation_tokens=800, source="words", workers=1)
    base = tiny()
    return replace(
        base,
        out=folder / name,
        resume=True,
        model=replace(base.model, blocks=1, rounds=2, width=32, hidden=32, context=16),
        data=replace(base.data, path=corpus, validation_sequences=4, validate_every=10),
        optim=replace(base.optim, **{"steps": STEPS, "batch": 4, "warmup_steps": 10, **optim}),
        checkpoint=replace(base.checkpoint, every=2),
        device=replace(base.device, kind="cpu"),
        log=replace(base.log, every=1),
    )


def start(work: Callable[[], object], log: Path) -> int:
    """Runs `work` in a process of its own, forked so that nothing is imported again; its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))  # not a test's capture
        torch.set_num_threads(1)
        # Its own lock would be shared by all forks, and one killed while it holds it stops those after it.
        tqdm.set_lock(threading.RLock())
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(pid: int, seconds: float = 120.0) -> int:
    """Waits for a process; its exit code, negative for a signal."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} was still running after {seconds:.0f} s")


def undisturbed(folder: Path, **optim: object) -> Path:
    config = small_config(folder, "undisturbed", **optim)
    if finish(start(lambda: train(config), folder / "undisturbed.log")):
        raise RuntimeError((folder / "undisturbed.log").read_text())
    return config.out


def differences(run: Path, reference: Path) -> list[str]:
    """Where a run's losses, weights, moments and generators are not those of the reference, bit for bit."""
    found = []
    mine, theirs = (repeatable(folder) for folder in (run, reference))
    if mine != theirs:
        steps = [a.get("step") for a, b in zip(mine, theirs, strict=False) if a != b]
        found.append(f"metrics differ ({len(mine)} lines, {len(theirs)} expected; first at step {steps[:1]})")
    checkpoint, expected = last_checkpoint(run), last_checkpoint(reference)
    if checkpoint is None or expected is None or checkpoint.name != expected.name:
        return [*found, f"last checkpoint {checkpoint}, expected {expected}"]
    for file in sorted(expected.glob("*.safetensors")):
        if file.read_bytes() != (checkpoint / file.name).read_bytes():
            found.append(f"{file.name} differs")
    return found


def repeatable(folder: Path) -> list[dict[str, object]]:
    """The metrics of a run, without times."""
    records = [record for record in read_metrics(folder) if record["kind"] in ("train", "validation")]
    return [{key: value for key, value in record.items() if key not in CLOCKS} for record in records]
