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
import torch
from together import finished_run, settings, write_tasks
from victims import CLOCKS, small_config

import deeploop.bench.training
import deeploop.commands.demo
import deeploop.commands.prepare_puzzles
import deeploop.commands.report
import deeploop.eval.harness
import deeploop.report.document
import deeploop.tasks.puzzles.evaluate  # noqa: F401  before the forks: each would import it again
from deeploop.cli import main
from deeploop.files import read_value
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import PuzzleShape, TRMConfig
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.train.metrics import read_metrics
from forked import finish, start
from public_weights import as_public

WORKERS_SECONDS = 60.0  # a worker that is still importing torch on a busy machine goes after that


@dataclass(frozen=True)
class Victim:
    """A command, and what of the folder that it writes must be the same after every undisturbed end."""

    words: Callable[[Path, Path], list[str]]
    """Of the folder with what all share, and of the folder to write."""
    end: Callable[[Path], object]
    refuses_again: Callable[[Path], bool] = lambda out: False
    """True if the folder is finished, so that the same command again would be refused."""


def eval_words(shared: Path, out: Path) -> list[str]:
    link_run(finished_run(shared), out)
    words = "--tasks piqa --shots 0 --rounds 1 2 --data"
    return ["eval", str(out), *words.split(), str(write_tasks(shared))]


def link_run(run: Path, out: Path) -> None:
    """A folder with the run's files, for results of its own."""
    out.mkdir(exist_ok=True)
    for name in ("config.json", "run.json", "checkpoints"):
        if not (link := out / name).exists():
            link.symlink_to(run / name)


def boards(shared: Path) -> Path:
    """A few Sudokus of 4 × 4."""
    out = shared / "boards"
    if not out.exists():
        build_sudoku(out, size=4, train=20, test=30)
    return out


def segments_words(shared: Path, out: Path) -> list[str]:
    run = shared / "reasoner"
    if not run.exists():
        model = "--model.width 16 --model.heads 2 --model.hidden 32 --model.cycles 1 --model.low-cycles 1"
        amount = "--optim.steps 2 --optim.batch 4 --halting.segments 2 --device.kind cpu --quiet"
        words = f"train trm-sudoku --out {run} --data.path {boards(shared)} {model} {amount}"
        complete(words.split(), shared / "reasoner.log")
    link_run(run, out)
    return [
        "eval",
        str(out),
        *["--segments", "1", "2", "4", "--starts", "2", "--views", "2", "--device", "cpu"],
    ]


def eval_end(out: Path) -> object:
    records = read_value(out / "eval.json")["evaluations"]
    return [one.get("results") or without_clocks(one) for one in records], sorted(
        path.name for path in out.glob("*.png")
    )


def without_clocks(record: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in record.items() if key not in (*CLOCKS, "written")}


def report_end(out: Path) -> object:
    tables = {path.name: path.read_text() for path in out.glob("tables/*.csv")}
    pictures = sorted(path.name for path in out.glob("figures/*.png"))
    sections = (out / "report.html").read_text().count("<table")
    return tables, pictures, sections, (out / "report.md").read_text()


def bench_words(shared: Path, out: Path) -> list[str]:
    out.mkdir(exist_ok=True)
    corpus = finished_run(shared).parent / "corpus"
    words = "bench --recipes tiny --rounds 1 --steps 1 --device cpu"
    return [*words.split(), "--data", str(corpus), "--json", str(out / "bench.json")]


def bench_end(out: Path) -> object:
    cells = read_value(out / "bench.json")["cells"]
    return [cell["name"] if "name" in cell else sorted(cell) for cell in cells]


def run_end(run: Path) -> object:
    """Metrics without clocks, and the tensors of the last checkpoint."""
    checkpoint = last_checkpoint(run)
    assert checkpoint is not None
    files = {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}
    return [without_clocks(line) for line in read_metrics(run) if line["kind"] != "resume"], files


def demo_end(out: Path) -> object:
    runs = sorted(path for path in (out / "runs").glob("*/*") if path.is_dir())
    kept = {run.name: [without_clocks(line) for line in read_metrics(run)] for run in runs}
    return kept, (out / "index.html").is_file(), (out / "demo.png").is_file()


def iterated_words(shared: Path, out: Path) -> list[str]:
    """A run of an iterated task that saves at every second of its steps."""
    model = "--model.width 16 --model.heads 2 --model.hidden 32"
    amount = "--optim.steps 30 --optim.batch 4 --optim.warmup-steps 4 --data.test-examples 4"
    often = "--data.validate-every 10 --checkpoint.every 2 --log.every 1 --device.kind cpu --quiet"
    return f"train addition --resume --out {out} {model} {amount} {often}".split()


def sweep_words(shared: Path, out: Path) -> list[str]:
    """Two cells at the better of two rates, which a search found."""
    grid, search = shared / "tuned.json", shared / "search"
    sweep = {"recipe": "tiny", "settings": settings(small_config(shared)), "axes": {"model.rounds": [1, 2]}}
    if not grid.exists():
        trials = {"trial": {name: {"optim.peak_lr": float(name)} for name in ("1e-3", "3e-3")}}
        (shared / "search.json").write_text(json.dumps(sweep | {"axes": trials}))
        words = ["sweep", str(shared / "search.json"), "--out", str(search)]
        complete(words, shared / "search.log")
        grid.write_text(json.dumps(sweep))
    return ["sweep", str(grid), "--tuned", str(search), "--out", str(out)]


def sweep_end(out: Path) -> object:
    cells = read_value(out / "sweep.json")["cells"]
    ends = {name: run_end(out / name) for name in sorted(cells)}
    return ends, {name: cell["settings"] for name, cell in cells.items()}


def import_words(shared: Path, out: Path) -> list[str]:
    file = shared / "public.pt"
    if not file.exists():
        config = TRMConfig(width=16, heads=2, hidden=32, low_cycles=6)
        torch.save(as_public(Reasoner(config, PuzzleShape(6, 16, 1), seed=3)), file)
    return ["import", "trm", str(file), "--data", str(boards(shared)), "--heads", "2", "--out", str(out)]


def retrofit_words(shared: Path, out: Path) -> list[str]:
    if not (source := shared / "llama").exists():
        pretrained.write_folder(source)
    words = ["retrofit", str(source), "--core", "0-1", "--rounds", "2", "--context", "16"]
    return [*words, "--data", str(shared / "none"), "--out", str(out)]


def pairs_words(shared: Path, out: Path) -> list[str]:
    file = shared / "pairs.jsonl"
    pairs = ({"input": f"{n:04}", "output": f"{n:04}"[::-1]} for n in range(2_000))
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return ["prepare", "pairs", str(file), "--out", str(out)]


def folder_end(out: Path) -> object:
    """The names of all files, and the weights. A kill after the last rename leaves the free lock behind."""
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != ".lock")
    names = [str(path.relative_to(out)) for path in files]
    return names, [path.read_bytes() for path in files if path.suffix == ".safetensors"]


def puzzles_end(out: Path) -> object:
    PuzzleSet.open(out).verify()
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".npy"}


def prepare(words: str) -> Callable[[Path, Path], list[str]]:
    return lambda shared, out: ["prepare", *words.split(), "--out", str(out)]


def is_run(out: Path) -> bool:
    return (out / "run.json").exists()


VICTIMS = {
    "export": Victim(lambda shared, out: ["export", str(finished_run(shared)), str(out)], folder_end),
    "retrofit": Victim(retrofit_words, folder_end, is_run),
    "import": Victim(import_words, folder_end, is_run),
    "eval": Victim(eval_words, eval_end),
    "eval --segments": Victim(segments_words, eval_end),
    "report": Victim(
        lambda shared, out: ["report", str(finished_run(shared)), "--out", str(out)], report_end
    ),
    "bench": Victim(bench_words, bench_end),
    "demo": Victim(lambda shared, out: ["demo", "--quick", "--out", str(out)], demo_end),
    "train addition": Victim(iterated_words, run_end),
    "sweep --tuned": Victim(sweep_words, sweep_end),
    "prepare arc": Victim(prepare("arc --tasks 20 --augmentations 200 --workers 2"), puzzles_end),
    "prepare sudoku": Victim(prepare("sudoku --size 6 --train 60 --test 10 --workers 1"), puzzles_end),
    "prepare pairs": Victim(pairs_words, puzzles_end),
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
    victim, draw = VICTIMS[name], random.Random(name)
    name = name.replace(" ", "-")
    log, reference = folder / f"{name}.log", folder / f"{name}-undisturbed"
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
