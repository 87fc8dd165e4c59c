"""Tiny runs of drawn configurations, and what must agree about each of them, whatever was drawn.

A resume is the uninterrupted run, with any micro-batch and on two ranks; with another batch and more steps it
keeps to what the header promised. A start from its weights has its loss, from a run or an export; validation
says what training said; the export computes what the run does.

python tests/faults/consistency.py 100 1     so many draws, of this seed
python tests/faults/consistency.py 10 1 2    the same on two ranks
"""

import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from deeploop.cli import main
from deeploop.commands import export
from deeploop.config.json import to_dict
from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, DeviceConfig, LogConfig
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.models.gpt_config import GPTConfig
from deeploop.rules import NAMED
from deeploop.runs.folder import last_checkpoint, list_checkpoints
from deeploop.tasks.language import validate
from deeploop.tasks.language.config import DataConfig, RoundsConfig, TrainConfig
from deeploop.train.checkpoint import read_state
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.rundir import load_model

STEPS, SAVED, CONTEXT, HELD_OUT = 4, 2, 16, 4
LAST = 0.25  # the share of the last phase
IN_WORDS = 0.2  # of the starts are given as words of the command line, which takes longer
WORKER = Path(__file__).parents[1] / "train" / "two_ranks_worker.py"
RULES = (*NAMED, "deeploop:p=0.3", "flat:gain=2", "prenorm:q=0.5", "deeploop:beta=off")
MODEL: dict[str, tuple[Any, ...]] = {
    "rule": RULES,
    **{name: (0, 1) for name in ("prelude", "coda")},
    "injection": ("none", "add", "linear", "gated"),
    "first_state": ("embedding", "zeros", "noise"),
    "blocks": (1, 2),
    "rounds": (1, 2, 3),
    "heads": (1, 2),
    "kv_heads": (0, 0, 1),
    "head_width": (0, 0, 6),
    "qk_norm": ("after-rotary", "before-rotary", "none"),
    "attention_bias": ("none", "none", "qkv", "qkvo"),
    "rotary_base": (10000.0, 100.0),
    "rotary_scaling": ((), (), (4.0,)),
    "norm_eps": (1e-5, 0.1),
    "mup_base_width": (0, 0, 16),
    **{name: (True, True, False) for name in ("input_norm", "final_norm", "tied_head", "mask_padding")},
    **{name: (False, False, True) for name in ("exit_gate", "unigram_bias", "recompute_alpha", "mlp_bias")},
}
OTHERWISE = {"rotary_base": 7.0, "norm_eps": 0.5, "rotary_scaling": (3.0,), "mup_base_width": 24}


@dataclass(frozen=True)
class Corpora:
    """Two corpora of bytes."""

    first: Path
    last: Path


def make_corpora(folder: Path) -> Corpora:
    made = Corpora(folder / "first", folder / "last")
    for number, corpus in enumerate((made.first, made.last)):
        draw = random.Random(number)
        texts = ["".join(draw.choices("abcdefgh ", k=300)) for _ in range(12)]
        prepare(texts, get_tokenizer("bytes"), corpus, validation_tokens=300, source="drawn", workers=1)
    return made


def draw_config(draw: random.Random, corpora: Corpora, out: Path) -> TrainConfig:
    """A configuration out of those that are valid, each field drawn by itself."""
    while True:
        own = {name: draw.choice(values) for name, values in MODEL.items()}
        rounds = {
            "sample": draw.choice(("fixed", "uniform", "poisson-lognormal")),
            "ramp": draw.choice(("off", "linear", "sqrt")),
            "ramp_share": draw.choice((0.5, 1.0)),
            "backprop": draw.choice((0, 0, 1, 2)),
        }
        phases = {"mix_last": (f"{corpora.last}=1",), "mix_last_share": LAST}
        mix = {"mix": (f"{corpora.first}=1", f"{corpora.last}=0")} | draw.choice(({}, phases))
        text = draw.choice(({"path": corpora.first}, mix)) | {"mask_documents": draw.random() < 0.2}
        rate = {"peak_lr": 1e-2, "floor_lr": 1e-3, "warmup_steps": 2, "kind": draw.choice(("adamw", "muon"))}
        try:
            return TrainConfig(
                out=out,
                seed=draw.randrange(100),
                model=GPTConfig(width=8, hidden=16, vocabulary=257, context=CONTEXT, **own),
                data=DataConfig(validation_sequences=HELD_OUT, validate_every=SAVED, **text),
                optim=OptimConfig(steps=STEPS, batch=draw.choice((2, 4)), **rate),
                rounds=RoundsConfig(**rounds),
                checkpoint=CheckpointConfig(every=SAVED),
                device=DeviceConfig(kind="cpu", micro_batch=draw.choice((0, 0, 2))),
                log=LogConfig(every=1),
            )
        except ValueError:  # these do not go together
            continue


def check(config: TrainConfig, draw: random.Random) -> None:
    """Everything about one configuration; AssertionError where something does not agree."""
    train(config, quiet=True)
    resumes(config)
    other = replace(otherwise(config), out=halfway(config, "other"))
    train(other, quiet=True)
    keeps_its_promise(config, other)
    loss = losses(config.out, "validation")[-1]
    said = json.loads(validate.run(validate.ValidateArgs(run=config.out, device="cpu", json=True)))
    close(said["rounds"][0]["loss"], loss, "validate")
    starts(config, config.out, loss, in_words=draw.random() < IN_WORDS)
    refuses(config, draw.choice(list(OTHERWISE)))
    if find_spec("transformers") is not None:
        exports(config, loss, in_words=draw.random() < IN_WORDS)


def halfway(config: TrainConfig, name: str) -> Path:
    """A copy of the run as it stood at its first checkpoint."""
    copy = shutil.copytree(config.out, config.out.with_name(name))
    shutil.rmtree(list_checkpoints(copy)[-1])
    return copy


def losses(run: Path, kind: str = "train") -> list[float]:
    return [line["loss"] for line in read_metrics(run, kind)]


def resumes(config: TrainConfig) -> None:
    """Compare bit for bit or, with another micro-batch, up to the order of sums."""
    same = replace(config, out=halfway(config, "same"), resume=True)
    train(same, quiet=True)
    assert losses(same.out) == losses(config.out), "resume: other losses"
    for file in sorted(last_checkpoint(config.out).glob("*.safetensors")):
        ours = last_checkpoint(same.out) / file.name
        assert ours.read_bytes() == file.read_bytes(), f"resume: other {file.name}"
    device = replace(config.device, micro_batch=1)
    pieces = replace(config, out=halfway(config, "pieces"), resume=True, device=device)
    train(pieces, quiet=True)
    alike(pieces.out, config.out, "micro-batch")


def otherwise(config: TrainConfig) -> TrainConfig:
    """A resume with another batch and more steps, which validates and saves at its end alone."""
    optim = replace(config.optim, batch=6 - config.optim.batch, steps=2 * STEPS)
    rarely = {
        "data": replace(config.data, validate_every=2 * STEPS),
        "checkpoint": CheckpointConfig(every=2 * STEPS),
    }
    return replace(config, resume=True, optim=optim, **rarely)


def keeps_its_promise(config: TrainConfig, other: TrainConfig) -> None:
    """Another batch and more steps: the last phase has its share of all steps, and the ramp goes on."""
    batch, steps = other.optim.batch, other.optim.steps
    state = read_state(last_checkpoint(other.out))
    before, after = SAVED * config.optim.batch, (steps - SAVED) * batch
    assert state["drawn"] == before + after, "batch: other sequences drawn"
    if config.data.mix_last:
        lasting = round(LAST * steps) * batch
        windows = [own["position"] for own in state["loader"]["corpora"]]
        assert windows == [before + after - lasting, lasting], f"batch: phases of {windows} windows"
    rounds, whole = (
        [line.get("rounds") for line in read_metrics(run, "train")] for run in (other.out, config.out)
    )
    assert rounds[:STEPS] == whole, "steps: other rounds"


def starting(config: TrainConfig, source: Path) -> TrainConfig:
    """A run of one step from the weights of another."""
    optim = replace(config.optim, steps=1, warmup_steps=1, batch=2)
    rounds = replace(config.rounds, ramp="off")
    out = source.with_name(f"{source.name}-started")
    return replace(config, out=out, init_from=source, optim=optim, rounds=rounds)


def starts(config: TrainConfig, source: Path, loss: float, in_words: bool) -> None:
    """A run that starts from the weights has the loss that they had; in words also from another recipe."""
    started = starting(config, source)
    if not in_words:
        train(started, quiet=True)
    else:
        data = ["--data.mix", *config.data.mix] if config.data.mix else ["--data.path", str(config.data.path)]
        if config.data.mix_last:  # of its corpora are the windows that were held out
            data += ["--data.mix-last", *config.data.mix_last, "--data.mix-last-share", str(LAST)]
        data += ["--data.mask-documents"] if config.data.mask_documents else []
        amount = (
            f"--optim.steps 1 --optim.warmup-steps 1 --optim.batch 2 --data.validation-sequences {HELD_OUT}"
        )
        words = f"train tiny --init-from {source} --out {started.out} {amount} --device.kind cpu --quiet"
        with redirect_stdout(io.StringIO()):
            assert main([*words.split(), *data]) == 0, "init-from: refused"
    close(losses(started.out, "validation")[0], loss, "init-from")


def refuses(config: TrainConfig, field: str) -> None:
    """Weights in a model that computes something else."""
    out = config.out.with_name("refused")
    try:
        model = replace(config.model, **{field: OTHERWISE[field]})
        other = replace(config, out=out, init_from=config.out, model=model)
    except ValueError:  # these do not go together
        return
    said = ""
    try:
        train(other, quiet=True)
    except ValueError as error:
        said = str(error)
    assert f"model.{field}=" in said, f"init-from: another {field} is not refused ({said})"


def exports(config: TrainConfig, loss: float, in_words: bool) -> None:
    from transformers.utils.logging import disable_progress_bar

    from deeploop.models.hf import DeepLoopForCausalLM

    disable_progress_bar()
    folder = config.out.with_name("exported")
    export.run(export.ExportArgs(run=config.out, folder=folder))
    starts(config, folder, loss, in_words)
    tokens = torch.arange(CONTEXT)[None] * 7 % 257
    ours, theirs = load_model(config.out), DeepLoopForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours.logits(ours(tokens).states))


def close(one: float, other: float, what: str, most: float = 1e-5) -> None:
    assert abs(one - other) <= most * abs(other), f"{what}: {one} and {other}"


def alike(run: Path, other: Path, what: str) -> None:
    """Two runs whose sums are taken in another order."""
    for kind in ("train", "validation"):
        for one, two in zip(losses(run, kind), losses(other, kind), strict=True):
            close(one, two, what, 1e-4)


def consistency(draws: int, seed: int) -> list[str]:
    """Checks so many configurations; one line for each that does not agree with itself."""
    draw, found = random.Random(seed), []
    with place_of_draws() as place:
        corpora = make_corpora(place / "data")
        for number in range(draws):
            config = draw_config(draw, corpora, place / "draw" / "run")
            try:
                check(config, draw)
            except (AssertionError, ValueError, RuntimeError) as error:
                found.append(finding(f"{seed}/{number}", error, config))
            shutil.rmtree(place / "draw", ignore_errors=True)
    return found


@contextmanager
def place_of_draws() -> Iterator[Path]:
    """A folder in which nothing is synced to the disk."""
    with tempfile.TemporaryDirectory() as place, patch("os.fsync"):
        yield Path(place)


def finding(number: str, error: Exception, config: TrainConfig) -> str:
    drawn = " ".join(f"{name}={getattr(config.model, name)}" for name in MODEL)
    line = f"consistency {number}: {error}; {drawn}; {config.rounds}; {config.optim}; {config.device}"
    return " ".join(line.split())


def ranks(draws: int, seed: int) -> list[str]:
    """Run on two ranks, replicated or sharded, which torchrun starts once for all draws."""
    draw, found = random.Random(seed), []
    with place_of_draws() as place:
        corpora, jobs = make_corpora(place / "data"), []
        configs = [draw_config(draw, corpora, place / str(number) / "run") for number in range(draws)]
        for config in configs:
            train(config, quiet=True)
            jobs += [
                {"do": "train", "kind": "language", "config": to_dict(job)} for job in on_two(config, draw)
            ]
        (place / "jobs.json").write_text(json.dumps(jobs))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*launch, WORKER, place / "jobs.json"], capture_output=True, text=True)
        if done.returncode:
            return [f"consistency on two ranks, {seed}: exit {done.returncode}: {done.stderr[-2000:]}"]
        for number, config in enumerate(configs):
            try:
                check_ranks(config)
            except (AssertionError, ValueError, RuntimeError) as error:
                found.append(finding(f"on two ranks, {seed}/{number}", error, config))
    return found


def on_two(config: TrainConfig, draw: random.Random) -> list[TrainConfig]:
    """A run from its start on two ranks, resumed there from one, resumed otherwise, and started from it."""
    ways = ("ddp",) if config.optim.kind == "muon" else ("ddp", "fsdp")
    device = replace(config.device, parallel=draw.choice(ways), micro_batch=draw.choice((0, 1)))
    runs = [
        replace(config, out=config.out.with_name("both")),
        replace(config, out=halfway(config, "resumed"), resume=True),
        replace(otherwise(config), out=halfway(config, "other")),
        starting(config, config.out),
    ]
    return [replace(run, device=device) for run in runs]


def check_ranks(config: TrainConfig) -> None:
    for error in sorted(config.out.parent.glob("*/error-*.txt")):
        raise AssertionError(f"{error.parent.name}: {error.read_text()}")
    both, resumed, other = (config.out.with_name(name) for name in ("both", "resumed", "other"))
    alike(both, config.out, "two ranks")
    alike(resumed, config.out, "one rank, then two")
    keeps_its_promise(config, replace(otherwise(config), out=other))
    started, last = starting(config, config.out).out, losses(config.out, "validation")[-1]
    close(losses(started, "validation")[0], last, "init-from on two ranks")
    back = halfway(replace(config, out=both), "back")
    train(replace(config, out=back, resume=True), quiet=True)
    alike(back, config.out, "two ranks, then one")


if __name__ == "__main__":
    import time

    began = time.perf_counter()
    torch.set_num_threads(1)
    draws, seed, *two = map(int, sys.argv[1:])
    print("\n".join((ranks if two else consistency)(draws, seed)))
    print(f"{time.perf_counter() - began:.1f} s")
