"""Small runs to be disturbed, and the comparison with an undisturbed one."""

import atexit
import random
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.recipes import tiny
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from forked import finish, start

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


@cache
def undisturbed() -> Path:
    """Train the run whose end the others must reach, once in this process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = small_config(folder)
    if finish(start(lambda: train(config), folder / "log")):
        raise RuntimeError((folder / "log").read_text())
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
