"""Commands killed midway: no worker outlives them, the same command again comes to the undisturbed end."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pretrained
from together import finished_run
from victims import CLOCKS, finish, start

import deeploop.bench.training
import deeploop.commands.demo
import deeploop.commands.prepare_puzzles
import deeploop.commands.report
import deeploop.eval.harness
import deeploop.report.document  # noqa: F401  before the forks: each would import it again
from deeploop.cli import main
from deeploop.files import read_value
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.train.metrics import read_metrics

WORKERS_SECONDS = 60.0  # a worker that is still importing torch on a busy machine goes after that


@dataclass(frozen=True)
class Victim:
    """A command, and what of the folder that it writes must be the same after every undisturbed end."""

    words: Callable[[Path, Path], list[str]]
    """Of the folder with what all share, and of the folder to write."""
    end: Callable[[Path], object]
    refuses_again: Callable[[Path], bool] = lambda out: False
    """Whether the folder is finished, so that the same command again would be refused."""


def eval_words(shared: Path, out: Path) -> list[str]:
    tasks = shared / "tasks" / "piqa"
    tasks.mkdir(parents=True, exist_ok=True)
    rows = [{"goal": f"goal {n}", "sol1": "one", "sol2": "two", "label": n % 2} for n in range(20)]
    for split in ("train", "validation"):
        (tasks / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out.mkdir(exist_ok=True)
    for name in ("config.json", "run.json", "checkpoints"):  # results go into the run folder: one each
        link = out / name
        if not link.exists():
            link.symlink_to(finished_run(shared) / name)
    return [
        "eval",
        str(out),
        "--tasks",
        "piqa",
        "--shots",
        "0",
        "--rounds",
        "1",
        "2",
        "--data",
        str(tasks.parent),
    ]


def eval_end(out: Path) -> object:
    records = read_value(out / "eval.json")["evaluations"]
    return [(record["rounds"], record["results"]) for record in records], (out / "accuracy.png").is_file()


def report_end(out: Path) -> object:
    tables = {path.name: path.read_text() for path in out.glob("tables/*.csv")}
    pictures = sorted(path.name for path in out.glob("figures/*.png"))
    return (
        tables,
        pictures,
        (out / "report.html").read_text().count("<table"),
        (out / "report.md").read_text(),
    )


def bench_end(out: Path) -> object:
    return [
        cell["name"] if "name" in cell else sorted(cell) for cell in read_value(out / "bench.json")["cells"]
    ]


def bench_words(shared: Path, out: Path) -> list[str]:
    out.mkdir(exist_ok=True)
    corpus = finished_run(shared).parent / "corpus"
    words = ["bench", "--recipes", "tiny", "--rounds", "1", "--steps", "1", "--device", "cpu"]
    return [*words, "--data", str(corpus), "--json", str(out / "bench.json")]


def demo_end(out: Path) -> object:
    kept = {}
    for run in sorted(path for path in (out / "runs").glob("*/*") if path.is_dir()):
        lines = read_metrics(run)
        kept[run.name] = [{key: line[key] for key in line if key not in CLOCKS} for line in lines]
    return kept, (out / "index.html").is_file(), (out / "demo.png").is_file()


def arc_end(out: Path) -> object:
    PuzzleSet.open(out).verify()
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".npy"}


def retrofit_words(shared: Path, out: Path) -> list[str]:
    if not (source := shared / "llama").exists():
        pretrained.write_folder(source)
    words = ["retrofit", str(source), "--core", "0-1", "--rounds", "2", "--context", "16"]
    return [*words, "--data", str(shared / "none"), "--out", str(out)]


def folder_end(out: Path) -> object:
    """Names of all files, and the weights."""
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return names, [path.read_bytes() for path in sorted(out.rglob("model.safetensors"))]


VICTIMS = {
    "export": Victim(lambda shared, out: ["export", str(finished_run(shared)), str(out)], folder_end),
    "retrofit": Victim(retrofit_words, folder_end, lambda out: (out / "run.json").exists()),
    "eval": Victim(eval_words, eval_end),
    "report": Victim(
        lambda shared, out: ["report", str(finished_run(shared)), "--out", str(out)], report_end
    ),
    "bench": Victim(bench_words, bench_end),
    "demo": Victim(lambda shared, out: ["demo", "--quick", "--out", str(out)], demo_end),
    "prepare arc": Victim(
        lambda shared, out: [
            *(
                "prepare",
                "arc",
                "--tasks",
                "20",
                "--augmentations",
                "200",
                "--workers",
                "2",
                "--out",
                str(out),
            )
        ],
        arc_end,
    ),
}


def begin(words: list[str], log: Path) -> int:
    """The command in a session of its own, by which its workers are known."""

    def run() -> None:
        os.setsid()
        if code := main(words):
            raise AssertionError(f"exit {code}")

    return start(run, log)


def complete(words: list[str], log: Path) -> float:
    began = time.monotonic()
    if code := finish(begin(words, log)):
        raise AssertionError(f"{words}: exit {code}: {log.read_text()[-800:]}")
    return time.monotonic() - began


def session(leader: int) -> list[int]:
    """The processes of a session that are left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def wait_for_workers(leader: int, name: str) -> None:
    deadline = time.monotonic() + WORKERS_SECONDS
    while left := session(leader):
        if time.monotonic() > deadline:
            raise AssertionError(f"{name}: processes {left} outlived it")
        time.sleep(0.05)


def kill_midway(folder: Path, name: str, times: int) -> None:
    """Kills the command at random moments, each in a folder of its own, and runs it again to the end."""
    victim, draw, log = VICTIMS[name], random.Random(name), folder / f"{name}.log"
    reference = folder / f"{name}-undisturbed"
    seconds = complete(victim.words(folder, reference), log)
    expected = victim.end(reference)
    for index in range(times):
        out = folder / f"{name}-{index}"
        words = victim.words(folder, out)
        pid = begin(words, log)
        time.sleep(draw.uniform(0.02, seconds))
        os.kill(pid, signal.SIGKILL)  # of one that has ended meanwhile, nothing happens
        os.waitpid(pid, 0)
        wait_for_workers(pid, name)
        if not victim.refuses_again(out):
            complete(words, log)
        if victim.end(out) != expected:
            raise AssertionError(f"{name}, {index}: another end than undisturbed")
        left = [path.name for path in out.rglob(".*.part")]
        if left:
            raise AssertionError(f"{name}, {index}: left behind: {left}")
