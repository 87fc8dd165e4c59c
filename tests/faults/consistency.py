"""Tiny runs of drawn configurations, and what must agree about each of them, whatever was drawn.

A resume is the uninterrupted run, with any micro-batch; with another batch and more steps it keeps to what
the header promised. A start from its weights has its loss, from a run or an export; validation says what
training said; the export computes what the run does.

python tests/faults/consistency.py 100 1     so many draws, of this seed
"""

import io
import json
import random
import shutil
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from deeploop.cli import main
from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, DeviceConfig, LogConfig
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.models.gpt_config import GPTConfig
from deeploop.rules import NAMED
from deeploop.runs.folder import last_checkpoint, list_checkpoints
from deeploop.tasks.language.config import DataConfig, RoundsConfig, TrainConfig
from deeploop.train.checkpoint import read_state
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.rundir import load_model

STEPS, SAVED, CONTEXT = 4, 2, 16
LAST = 0.25  # the share of the last phase
RULES = (*NAMED, "deeploop:p=0.3", "flat:gain=2", "prenorm:q=0.5", "deeploop:beta=off")
MODEL: dict[str, tuple[Any, ...]] = {
    "rule": RULES,
    **{name: (0, 1) for name in ("prelude", "coda")},
    "injection": ("none", "add", "linear", "gated"),
    "first_state": ("embedding", "zeros", "noise"),
    "blocks": (1, 2),
    "rounds": (1, 2, 3),
    "heads": (1, 2),
    "head_width": (0, 0, 6),
    "qk_norm": ("after-rotary", "before-rotary", "none"),
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
        }
        phases = {"mix_last": (f"{corpora.last}=1",), "mix_last_share": LAST}
        mix = {"mix": (f"{corpora.first}=1", f"{corpora.last}=0")} | draw.choice(({}, phases))
        text = draw.choice(({"path": corpora.first}, mix))
        try:
            return TrainConfig(
                out=out,
                seed=draw.randrange(100),
                model=GPTConfig(width=8, hidden=16, vocabulary=257, context=CONTEXT, **own),
                data=DataConfig(validation_sequences=8, validate_every=SAVED, **text),
                optim=OptimConfig(
                    steps=STEPS, batch=draw.choice((2, 4)), warmup_steps=2, peak_lr=1e-2, floor_lr=1e-3
                ),
                rounds=RoundsConfig(**rounds),
                checkpoint=CheckpointConfig(every=SAVED),
                device=DeviceConfig(kind="cpu"),
                log=LogConfig(every=1),
            )
        except ValueError:  # these do not go together
            continue


def check(config: TrainConfig) -> None:
    """Everything about one configuration; AssertionError where something does not agree."""
    train(config, quiet=True)
    resumes(config)
    resumes_otherwise(config)
    loss = read_metrics(config.out, "validation")[-1]["loss"]
    close(validated(config.out), loss, "validate")
    starts(config, config.out, loss)
    refuses(config)
    if find_spec("transformers") is not None:
        exports(config, loss)


def halfway(config: TrainConfig, name: str) -> Path:
    """A copy of the run as it stood at its first checkpoint."""
    copy = shutil.copytree(config.out, config.out.with_name(name))
    shutil.rmtree(list_checkpoints(copy)[-1])
    return copy


def losses(run: Path, kind: str = "train") -> list[float]:
    return [line["loss"] for line in read_metrics(run, kind)]


def resumes(config: TrainConfig) -> None:
    """As it was, bit for bit; with another micro-batch, up to the order of sums."""
    same = replace(config, out=halfway(config, "same"), resume=True)
    train(same, quiet=True)
    assert losses(same.out) == losses(config.out), "resume: other losses"
    for file in sorted(last_checkpoint(config.out).glob("*.safetensors")):
        ours = last_checkpoint(same.out) / file.name
        assert ours.read_bytes() == file.read_bytes(), f"resume: other {file.name}"
    pieces = replace(
        config, out=halfway(config, "pieces"), resume=True, device=replace(config.device, micro_batch=1)
    )
    train(pieces, quiet=True)
    for one, other in zip(losses(pieces.out), losses(config.out), strict=True):
        close(one, other, "micro-batch", 1e-4)


def resumes_otherwise(config: TrainConfig) -> None:
    """Another batch and more steps: the last phase has its share of all steps, and the ramp goes on."""
    batch, steps = 6 - config.optim.batch, 2 * STEPS
    optim = replace(config.optim, batch=batch, steps=steps)
    other = replace(config, out=halfway(config, "other"), resume=True, optim=optim)
    train(other, quiet=True)
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


def validated(run: Path) -> float:
    said = io.StringIO()
    with redirect_stdout(said):
        code = main(["validate", str(run), "--device", "cpu", "--json"])
    assert code == 0, said.getvalue()
    loss: float = json.loads(said.getvalue())["rounds"][0]["loss"]
    return loss


def starts(config: TrainConfig, source: Path, loss: float) -> None:
    """Any recipe that starts from the weights has the loss that they had."""
    out = source.with_name(f"{source.name}-started")
    data = ["--data.mix", *config.data.mix] if config.data.mix else ["--data.path", str(config.data.path)]
    if config.data.mix_last:  # of its corpora are the windows that were held out
        data += ["--data.mix-last", *config.data.mix_last, "--data.mix-last-share", str(LAST)]
    amount = "--optim.steps 1 --optim.warmup-steps 1 --optim.batch 2 --data.validation-sequences 8"
    words = f"train tiny --init-from {source} --out {out} {amount} --device.kind cpu --quiet"
    with redirect_stdout(io.StringIO()):
        assert main([*words.split(), *data]) == 0, "init-from: refused"
    close(losses(out, "validation")[0], loss, "init-from")


def refuses(config: TrainConfig) -> None:
    """Weights in a model that computes something else."""
    for field, value in OTHERWISE.items():
        try:
            model = replace(config.model, **{field: value})
        except ValueError:
            continue
        other = replace(config, out=config.out.with_name("refused"), init_from=config.out, model=model)
        said = ""
        try:
            train(other, quiet=True)
        except ValueError as error:
            said = str(error)
        assert f"model.{field}=" in said, f"init-from: another {field} is not refused ({said})"


def exports(config: TrainConfig, loss: float) -> None:
    from transformers.utils.logging import disable_progress_bar

    from deeploop.models.hf import DeepLoopForCausalLM

    disable_progress_bar()
    folder = config.out.with_name("exported")
    with redirect_stdout(io.StringIO()):
        assert main(["export", str(config.out), str(folder)]) == 0, "export: refused"
    starts(config, folder, loss)
    tokens = torch.arange(CONTEXT)[None] * 7 % 257
    ours, theirs = load_model(config.out), DeepLoopForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours.logits(ours(tokens).states))


def close(one: float, other: float, what: str, most: float = 1e-5) -> None:
    assert abs(one - other) <= most * abs(other), f"{what}: {one} and {other}"


def consistency(draws: int, seed: int) -> list[str]:
    """Checks so many configurations; one line for each that does not agree with itself."""
    draw, found = random.Random(seed), []
    with tempfile.TemporaryDirectory() as place:
        corpora = make_corpora(Path(place) / "data")
        for number in range(draws):
            config = draw_config(draw, corpora, Path(place) / "draw" / "run")
            try:
                check(config)
            except (AssertionError, ValueError, RuntimeError) as error:
                drawn = " ".join(f"{name}={getattr(config.model, name)}" for name in MODEL)
                line = f"consistency {seed}/{number}: {error}; {drawn}; {config.rounds}; {config.optim}"
                found.append(" ".join(line.split()))
            shutil.rmtree(Path(place) / "draw", ignore_errors=True)
    return found


if __name__ == "__main__":
    import sys
    import time

    began = time.perf_counter()
    torch.set_num_threads(1)
    print("\n".join(consistency(int(sys.argv[1]), int(sys.argv[2]))))
    print(f"{time.perf_counter() - began:.1f} s")
