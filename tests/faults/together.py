"""Two of everything at once: a command twice into one folder, or two that write different things there.

Each ends with exit 0, or with one line that says that another is at work; what they leave is whole.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file
from victims import small_config

import deeploop.eval.harness
import deeploop.export.run
import deeploop.models.hf  # noqa: F401
from deeploop.cli import main
from deeploop.data.shards import Corpus
from deeploop.runs.folder import list_checkpoints
from deeploop.tasks.language.config import TrainConfig
from deeploop.train.checkpoint import read_state
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from forked import finish, start

REFUSED = "another run is writing there"
MEANWHILE = "another run began there meanwhile"  # the other one was quick


def at_once(commands: Sequence[Sequence[str]], log: Path) -> list[int]:
    """Runs the commands in processes of their own, all started before one is waited for; exit codes."""

    def run(words: Sequence[str]) -> None:
        code = main([*words])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    logs = [log.with_name(f"{log.name}-{index}") for index in range(len(commands))]
    pids = [start(lambda words=words: run(words), own) for words, own in zip(commands, logs, strict=True)]
    codes = [finish(pid) for pid in pids]
    for code, own in zip(codes, logs, strict=True):
        text = own.read_text()
        if "Traceback" in text or code not in (0, 2):
            raise AssertionError(f"exit {code}: {text[-800:]}")
        if code and not any(words in text for words in (REFUSED, MEANWHILE, "already holds", "other text")):
            raise AssertionError(f"refused for another reason: {text[-800:]}")
    if 0 not in codes:
        raise AssertionError(f"nobody got through: {[own.read_text()[-300:] for own in logs]}")
    return codes


def prepare_twice(folder: Path, index: int) -> None:
    """One text twice, or two texts of one size."""
    for name in ("a", "b"):
        text = folder / name
        if not text.exists():
            text.mkdir()
            for number in range(80):
                (text / f"{number}.txt").write_text(f"{name} document {number} " * 20)
    out = folder / f"corpus-{index}"
    words = ["--out", str(out), "--tokenizer", "bytes", "--validation-tokens", "900", "--workers", "1"]
    words += ["--shard-tokens", "2000"]
    texts = [folder / "a", folder / ("a" if index % 2 else "b")]
    at_once([["prepare", "text", str(text), *words] for text in texts], folder / f"prepare-{index}")
    Corpus.open(out).verify()
    left = [path.name for path in out.iterdir() if path.name.startswith(".")]
    if left:
        raise AssertionError(f"left behind: {left}")


def settings(config: TrainConfig, **changes: object) -> dict[str, object]:
    """A run of six steps as fields of a grid."""
    fields = {
        "data.path": str(config.data.path), "model.blocks": 1, "model.rounds": 2, "model.width": 32,
        "model.hidden": 32, "model.context": 16, "data.validation_sequences": 4, "optim.steps": 6,
        "optim.batch": 4, "checkpoint.every": 2, "log.every": 1, "device.kind": "cpu",
    }  # fmt: skip
    return fields | changes


def train_words(config: TrainConfig, out: Path, **changes: object) -> list[str]:
    """The arguments as words of a command."""
    fields = {"out": out, **settings(config, **changes)}.items()
    return ["train", "tiny", *(word for name, value in fields for word in (f"--{name}", str(value)))]


def check_run(run: Path, steps: int) -> None:
    checkpoints = list_checkpoints(run)
    for checkpoint in checkpoints:
        read_state(checkpoint)
    if [record["step"] for record in read_metrics(run, "train")] != list(range(1, steps + 1)):
        raise AssertionError(f"{run}: the metrics are not those of one run")
    if checkpoints[-1].name != f"step-{steps:08d}":
        raise AssertionError(f"{run}: ends at {checkpoints[-1].name}")


def train_twice(folder: Path, index: int) -> None:
    out = folder / f"run-{index}"
    words = train_words(small_config(folder), out)
    at_once([words, words], folder / f"train-{index}")
    check_run(out, 6)


def sweep_twice(folder: Path, index: int) -> None:
    path, out = folder / "own.json", folder / f"sweep-{index}"
    fields = settings(small_config(folder))
    path.write_text(json.dumps({"recipe": "tiny", "settings": fields, "axes": {"seed": [index]}}))
    words = ["sweep", str(path), "--out", str(out)]
    at_once([words, words], folder / f"sweep-log-{index}")
    json.loads((out / "sweep.json").read_text())
    (run,) = (path.parent for path in out.glob("*/run.json"))
    check_run(run, 6)


def finished_run(folder: Path) -> Path:
    config = small_config(folder, "finished")
    if not config.out.exists() and finish(start(lambda: train(config), folder / "finished.log")):
        raise AssertionError((folder / "finished.log").read_text()[-800:])
    return config.out


def validate_twice(folder: Path, index: int) -> None:
    """Two results of different kinds: both must be there afterwards."""
    run = finished_run(folder)
    (run / "validation.json").unlink(missing_ok=True)
    commands = [["validate", str(run), "--rounds", rounds] for rounds in ("1", "2")]
    if at_once(commands, folder / f"validate-{index}") != [0, 0]:
        raise AssertionError("a validation was refused")
    found = json.loads((run / "validation.json").read_text())["evaluations"]
    if sorted(record["asked"]["rounds"] for record in found) != [[1], [2]]:
        raise AssertionError(f"a result was lost: {[record['asked'] for record in found]}")


def eval_twice(folder: Path, index: int) -> None:
    """Two processes that evaluate one run, at other rounds or at the same."""
    run = finished_run(folder)
    (run / "eval.json").unlink(missing_ok=True)
    tasks = write_tasks(folder)
    rounds = ("1", "2" if index % 2 == 0 else "1")
    words = ["eval", str(run), "--tasks", "piqa", "--shots", "0", "--data", str(tasks), "--rounds"]
    if at_once([[*words, own] for own in rounds], folder / f"eval-{index}") != [0, 0]:
        raise AssertionError("an evaluation was refused")
    found = json.loads((run / "eval.json").read_text())["evaluations"]
    if sorted(record["rounds"] for record in found) != [[own] for own in map(int, sorted({*rounds}))]:
        raise AssertionError(f"a result was lost: {[record['rounds'] for record in found]}")


def write_tasks(folder: Path) -> Path:
    """A folder of tasks with one of them, for `--data`."""
    tasks = folder / "tasks"
    (tasks / "piqa").mkdir(parents=True, exist_ok=True)
    rows = [{"goal": f"goal {n}", "sol1": "one", "sol2": "two", "label": n % 2} for n in range(20)]
    for split in ("train", "validation"):
        (tasks / "piqa" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks


def export_twice(folder: Path, index: int) -> None:
    run, out = finished_run(folder), folder / f"export-{index}"
    at_once([["export", str(run), str(out)]] * 2, folder / f"export-log-{index}")
    if json.loads((out / "config.json").read_text())["model_type"] != "deeploop":
        raise AssertionError("no config of an export")
    load_file(out / "model.safetensors")
    if left := [path.name for path in out.iterdir() if path.name.startswith(".")]:
        raise AssertionError(f"left behind: {left}")


TOGETHER: dict[str, Callable[[Path, int], None]] = {
    "prepare": prepare_twice,
    "train": train_twice,
    "sweep": sweep_twice,
    "validate": validate_twice,
    "eval": eval_twice,
    "export": export_twice,
}
