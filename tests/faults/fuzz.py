"""Bad input by the thousand: each file and command line a stranger may hand us, damaged at random.

    python tests/faults/fuzz.py --cases 20000

A case takes something valid, damages it (bits, lengths, types, JSON values of other kinds) and opens it, all
in one process. It may be accepted, or refused with an error that the command line turns into one line; any
other exception is a finding.
"""

import argparse
import functools
import io
import json
import lzma
import random
import resource
import shutil
import sys
import tarfile
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pretrained
import readings
import torch
from forgeries import Forgeries
from victims import small_config

from deeploop.cli import main as command_line
from deeploop.config.json import from_dict, to_dict
from deeploop.data.shards import Corpus
from deeploop.data.tokenizers import get_tokenizer
from deeploop.eval.requests import Request, Requests, Scores, load_scores, save_scores
from deeploop.eval.tasks import read_rows
from deeploop.files import read_value
from deeploop.models.gpt import LoopedGPT
from deeploop.runs.folder import load_config
from deeploop.runs.packed import PACKED, unpack
from deeploop.sweep.grid import read_grid
from deeploop.tasks.chat.data import ChatSet
from deeploop.tasks.chat.loader import held_out_rows
from deeploop.tasks.chat.prepare import prepare_chat
from deeploop.tasks.chat.template import find_template
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.recipes import tiny
from deeploop.tasks.puzzles.data import arc
from deeploop.tasks.puzzles.data.maze import build_maze
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.train.checkpoint import load_moments, load_weights, read_state
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics, rewind_metrics
from deeploop.train.rundir import load

# What `deeploop` turns into one line and exit code 2.
REFUSALS = (ValueError, OSError, ArithmeticError)

ODD_VALUES = [
    *(None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 0.5, -1e308, float("nan"), float("inf")),
    functools.reduce(lambda inner, _: [inner], range(300), 0),  # type: ignore[arg-type,return-value]
    *("", "x", "0", "../../etc/passwd", "\x00", "\ud800", "a" * 5000, [], [[]], [1, "2"], {}, {"a": {}}),
]


GRID = """recipe = "tiny"

[settings]
model.blocks = 1
optim.steps = 4

[axes]
seed = [0, 1, 2]

[axes.method]
prenorm = {model.rule = "prenorm", optim.peak_lr = 1e-3}
deeploop = {model.rule = "deeploop"}
"""
COMMANDS = [*"plan train validate generate diagnose export eval bench prepare x".split(), ""]  # noqa: SIM905
WORDS = [
    *"--model.rounds --optim.batch --out --blocks --rounds --json --help --seed --model.rule --p".split(),  # noqa: SIM905
    *"--tasks --high-blocks --cycles --horizon 3 -1 0 nan 1e999 x tiny gpt2-small nowhere é -- - =".split(),  # noqa: SIM905
    *("prenorm", "½", "full", "", "9" * 400),
]


TIMES = 10  # what a case may allocate, over its largest file
FLOOR = (
    8 << 20
)  # bytes that it may in any case: 5 MiB of xz's window and our blocks, 3 MiB of a report's figures
STACK = 1 << 20  # bytes of a loader's thread, which has 8 MiB by default: all that a case may take
IMPORTS = 1 << 30  # bytes of a target's first case, which loads modules
TRACED = (
    7  # every seventh case is measured, which makes it slow; a prime, so that all targets have their turn
)
SLOW = ("command line", "text", "grid file", "model of a run", "run in a report")


def damage_bytes(raw: bytes, draw: random.Random) -> bytes:
    """A few bits flipped, a piece cut out, doubled or replaced, or the end missing."""
    data = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 5))):
        if not data:
            break
        at = draw.randrange(len(data))
        length = draw.choice((1, 1, 2, 8, 64))
        kind = draw.randrange(7)
        if kind == 6:
            data[at:at] = draw.choice((b"[", b"{", b'{"a":')) * draw.choice((70, 900, 20_000))
        elif kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = draw.randbytes(length)
        elif kind == 3:
            data[at : at + length] = draw.randbytes(length)
        elif kind == 4:
            del data[at:]
        else:
            data[at:at] = data[at : at + length]
    return bytes(data)


def damage_json(value: object, draw: random.Random) -> object:
    """One place of a JSON value replaced by something odd, left out, or added."""
    places: list[tuple[object, object]] = []

    def walk(node: object) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            places.append((node, key))
            walk(child)

    value = json.loads(json.dumps(value))
    walk(value)
    if not places:
        return draw.choice(ODD_VALUES)
    for _ in range(draw.choice((1, 1, 2, 4))):
        parent, key = draw.choice(places)
        kind = draw.randrange(4)
        try:
            if kind < 2:
                parent[key] = draw.choice(ODD_VALUES)
            elif kind == 2:
                del parent[key]
            elif isinstance(parent, dict):
                parent[str(draw.choice(ODD_VALUES))] = draw.choice(ODD_VALUES)
        except (KeyError, IndexError):
            continue  # gone already
    return value


def damage_file(path: Path, draw: random.Random) -> None:
    """JSON is damaged as JSON half of the time, so that it reaches further than the parser."""
    raw = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and draw.random() < 0.5:
        try:
            lines = (
                [json.loads(line) for line in raw.splitlines()]
                if path.suffix == ".jsonl"
                else json.loads(raw)
            )
            damaged = damage_json(lines, draw)
            text = (
                "\n".join(json.dumps(line) for line in damaged)
                if path.suffix == ".jsonl" and isinstance(damaged, list)
                else json.dumps(damaged)
            )
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
            return
        except ValueError:
            pass
    path.write_bytes(damage_bytes(raw, draw))


def odd_archive(draw: random.Random) -> bytes:
    """Members of any kind, under any name, of any size that they claim."""
    names = (
        "run/config.json",
        "run/run.json",
        "../x",
        "/tmp/x",
        "a/b/c",
        ".x",
        "run/",
        "\x1b[2J",
        "x" * 300,
        "é",
    )
    kinds = (*[tarfile.REGTYPE] * 4, b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"L", b"x", b"Z")
    parts = []
    for _ in range(draw.choice((1, 2, 5))):
        member = tarfile.TarInfo(draw.choice(names))
        member.type, member.linkname = draw.choice(kinds), draw.choice(("", "/etc/passwd", "run/config.json"))
        member.size = draw.choice((0, 5, 5, 600, 1 << 33))
        parts += [member.tobuf(), draw.randbytes(draw.choice((512, 1024)))]
    return b"".join(parts) + bytes(1024)


class Targets:
    """Valid originals, made once, and what is done with a damaged copy of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = self._run()
        (folder / "tasks").mkdir()
        rows = [{"goal": f"g{n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(5)]
        (folder / "tasks" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        asked = [Request([1, 2, 3], [n], "piqa", 0, n // 2, n % 2) for n in range(6)]
        (folder / "requests").mkdir()
        Requests.build(asked, tokenizer="bytes", vocabulary=257).save(folder / "requests" / "requests.npz")
        scores = Scores(np.zeros(6), np.zeros(6, bool))
        (folder / "scores").mkdir()
        save_scores(folder / "scores" / "scores.npz", {"run": "x"}, {3: {"abc": scores}})
        build_maze(folder / "puzzles", size=8, train=6, test=6)
        (folder / "arc").mkdir()
        grid = {"input": [[1, 2], [3, 4]], "output": [[4, 3]]}
        (folder / "arc" / "task.json").write_text(json.dumps({"train": [grid, grid], "test": [grid]}))
        (folder / "text").mkdir()
        (folder / "text" / "t.jsonl").write_text(
            "\n".join(json.dumps({"text": f"line {n} é"}) for n in range(20))
        )
        talk = folder / "talk.jsonl"
        talk.write_text('{"prompt": "say a", "response": "a"}\n' * 6)
        made = get_tokenizer("bytes"), find_template("default")
        prepare_chat(talk, *made, folder / "chat", context=64, validation_share=0.3)
        pretrained.write_folder(folder / "pretrained")
        (folder / "gguf").mkdir()
        pretrained.write_gguf(folder / "gguf" / "model.gguf")
        (folder / "packed").mkdir()
        with tarfile.open(folder / "packed" / PACKED, "w:xz", preset=3) as tar:  # its window: 4 MiB
            for path in sorted(self.run.glob("*.json*")):
                tar.add(path, f"{self.run.name}/{path.name}")
        self.config = to_dict(tiny())
        self.model = LoopedGPT(load_config(self.run).model)

    def _run(self) -> Path:
        config = small_config(self.folder, steps=2)
        with redirect_stdout(io.StringIO()):
            train(config)
        return config.out

    def checkpoint(self, copy: Path) -> None:
        read_state(copy)
        load_weights(self.model, copy)
        load_moments(copy, self.model)

    def weights_alone(self, copy: Path) -> None:
        """Past the checksums, which catch nearly everything: what the parser of safetensors makes of it."""
        load_weights(self.model, copy)
        load_moments(copy, self.model)

    def corpus(self, copy: Path) -> None:
        corpus = Corpus.open(copy)
        for split in (corpus.train, corpus.validation):
            split.slice(0, min(40, len(split)))
        corpus.counts("train")
        corpus.verify()

    def puzzles(self, copy: Path) -> None:
        puzzles = PuzzleSet.open(copy)
        for split in (puzzles.train, puzzles.test):
            split.rows(np.arange(min(3, len(split))))
        puzzles.verify()

    def chat(self, copy: Path) -> None:
        chat = ChatSet.open(copy)
        held_out_rows(chat.validation, max(1, chat.longest), chat.end_of_text, 2)
        chat.verify()
        chat.template().segments([{"role": "user", "content": "a"}], ask=True)

    def metrics(self, copy: Path) -> None:
        for record in read_metrics(copy):
            record["step"] + 1
        rewind_metrics(copy, 1)

    def requests(self, copy: Path) -> None:
        requests = Requests.load(copy / "requests.npz")
        requests.request(len(requests) - 1)

    def text(self, copy: Path) -> None:
        out = copy / "out"
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            arguments = ["prepare", "text", str(copy / "t.jsonl"), "--out", str(out), "--tokenizer", "bytes"]
            code = command_line(
                [*arguments, "--validation-tokens", "20", "--workers", "1", "--shard-tokens", "1000"]
            )
        if code == 0:
            Corpus.open(out).verify()
        elif (out / "corpus.json").exists():
            raise AssertionError("refused, but left a corpus behind as if whole")

    def unpacked(self, pack: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            unpack(pack, Path(place))
            if any(path.is_symlink() for path in Path(place).rglob("*")):
                raise AssertionError("a link was unpacked")

    def forged_pack(self, draw: random.Random) -> None:
        """The archive inside is damaged or odd, and compressed again with a checksum that fits."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            if draw.random() < 0.3:
                whole = lzma.decompress((self.folder / "packed" / PACKED).read_bytes())
                plain = damage_bytes(whole, draw)
            else:
                plain = odd_archive(draw)
            (Path(place) / PACKED).write_bytes(lzma.compress(plain, preset=0))
            self.unpacked(Path(place) / PACKED)

    def forged_gguf(self, draw: random.Random) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            lists, rest = pretrained.LISTS, pretrained.METADATA
            if draw.random() < 0.3:  # these have a hundred times as many places
                lists = damage_json(lists, draw)  # type: ignore[assignment]
            else:
                rest = damage_json(rest, draw)  # type: ignore[assignment]
            pretrained.forged_gguf(Path(place), {**rest, **lists})

    def cases(self) -> dict[str, Callable[[random.Random], None]]:
        """Target → a function that makes one damaged case and opens it."""
        checkpoint = next((self.run / "checkpoints").iterdir())
        forged = Forgeries(self.folder, self.run, load_config(self.run), self.folder / "corpus", damage_json)
        return {
            **forged.cases(),
            "config": lambda draw: from_dict(TrainConfig, damage_json(self.config, draw)),  # type: ignore[arg-type]
            "run folder": self._damaged(self.run, load_config, ("run.json", "config.json")),
            "model of a run": self._loaded_run,
            "grid file": lambda draw: self._grid(draw),
            "metrics": self._damaged(self.run, self.metrics, ("metrics.jsonl",)),
            "checkpoint": self._damaged(checkpoint, self.checkpoint),
            "weights": self._damaged(
                checkpoint, self.weights_alone, ("model.safetensors", "optimizer.safetensors")
            ),
            "corpus": self._damaged(self.folder / "corpus", self.corpus),
            "puzzles": self._damaged(self.folder / "puzzles", self.puzzles),
            "chat": self._damaged(self.folder / "chat", self.chat),
            "ARC task": self._damaged(
                self.folder / "arc",
                lambda copy: arc.read_task(read_value(copy / "task.json"), "a", "b", copy),
            ),
            "task file": self._damaged(
                self.folder / "tasks", lambda copy: read_rows(copy / "rows.jsonl", ("goal", "sol1", "sol2"))
            ),
            "requests": self._damaged(self.folder / "requests", self.requests),
            "scores": self._damaged(self.folder / "scores", lambda copy: load_scores(copy / "scores.npz")),
            "pretrained folder": self._damaged(self.folder / "pretrained", pretrained.use),
            "GGUF file": self._damaged(
                self.folder / "gguf", lambda copy: pretrained.use(copy / "model.gguf")
            ),
            "tokenizer steps": pretrained.odd_steps,
            "config.json as transformers reads it": readings.case,
            "text": self._damaged(self.folder / "text", self.text),
            "packed runs": self._damaged(self.folder / "packed", lambda copy: self.unpacked(copy / PACKED)),
            "forged packed runs": self.forged_pack,
            "forged GGUF file": self.forged_gguf,
            "command line": self.command_line,
        }

    def _loaded_run(self, draw: random.Random) -> None:
        """Config and stamp of a whole run: a model of another size than its weights must not be built."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            copy = Path(place) / "run"
            shutil.copytree(self.run, copy)
            damage_file(copy / draw.choice(("run.json", "config.json")), draw)
            load(copy)

    def _grid(self, draw: random.Random) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            path = Path(place) / "grid.toml"
            path.write_bytes(damage_bytes(GRID.encode(), draw))
            for cell in read_grid(path).cells({}):
                cell.config()

    def _damaged(
        self, original: Path, use: Callable[[Path], object], names: tuple[str, ...] = ()
    ) -> Callable[[random.Random], None]:
        """Copies a folder without what lies in folders of its own, damages one file, and uses the copy."""

        def case(draw: random.Random) -> None:
            with tempfile.TemporaryDirectory(dir=self.folder) as place:
                copy = Path(place)
                files = [file for file in sorted(original.iterdir()) if file.is_file()]
                for file in files:
                    shutil.copyfile(file, copy / file.name)
                chosen = [file.name for file in files if not file.name.startswith(".")]
                name = draw.choice(names or chosen)
                if draw.random() < 0.03:
                    (copy / name).unlink()
                else:
                    damage_file(copy / name, draw)
                use(copy)

        return case

    def command_line(self, draw: random.Random) -> None:
        """Words in any order. Runs are named that do not exist, so nothing long begins."""
        command = draw.choice(COMMANDS)
        words = [draw.choice(WORDS) for _ in range(draw.randrange(5))]
        if command in ("validate", "generate", "diagnose", "export", "eval"):
            words.insert(0, "nowhere")
        if command == "train":
            words = [*words[:1], "--data.path", "nowhere", *words[1:]]
        if command == "bench":
            words += ["--recipes", "nothing"]
        if command == "prepare":
            words = [draw.choice(("text", "stdlib", "sudoku", "x")), *words, "--limit-tokens", "-1"]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = command_line([command, *words] if command else words)
            except SystemExit as leaving:  # --help
                code = leaving.code
        if code not in (0, None, 2):
            raise AssertionError(f"{command} {words}: exit code {code}")
        if code == 2 and err.getvalue().count("\n") != 1:
            raise AssertionError(f"{command} {words}: an error of {err.getvalue().count(chr(10))} lines")


def allowance(folder: Path) -> int:
    """Bytes that a case may allocate: a case is one of the originals here, but for a few bytes."""
    return max(FLOOR, TIMES * max(file.stat().st_size for file in folder.rglob("*") if file.is_file()))


@contextmanager
def bounded_memory(headroom: int) -> Iterator[None]:
    """Whoever asks for more beyond what the process has, torch too, is refused, and found."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + headroom, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def traced_memory(most: int) -> Iterator[None]:
    """Peak memory of Python and numpy, including memory that the process already had."""
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > most:
            raise AssertionError(f"{peak:,} bytes at once")


def fuzz(cases: int, seed: int = 0, only: str = "", seconds: float = 10.0) -> tuple[Counter[str], list[str]]:
    """Runs that many cases, spread over the targets; returns the counts and the findings."""
    counts: Counter[str] = Counter()
    findings: list[str] = []
    stack = threading.stack_size(STACK)
    # A run keeps the words that started it: with always the same ones a case is the same in every process.
    same_words = patch.object(sys, "argv", ["deeploop"])
    with tempfile.TemporaryDirectory() as folder, same_words:
        targets = {name: case for name, case in Targets(Path(folder)).cases().items() if only in name}
        most, warm = allowance(Path(folder)), set()
        # A parsed command line takes as long as fifty other cases, a report's figures as hundreds.
        names = [name for name in targets for _ in range(1 if name in SLOW else 10)]
        for index in range(cases):
            name = names[index % len(names)]
            draw = random.Random(f"{seed}-{index}")
            began = time.process_time()  # not that of a busy machine
            try:
                traced = index % TRACED == 0 and name in warm
                trace = traced_memory(most) if traced else nullcontext()
                with bounded_memory(most if name in warm else IMPORTS), trace:
                    targets[name](draw)
                counts[f"{name}: accepted"] += 1
            except REFUSALS as refusal:
                counts[f"{name}: refused"] += 1
                if not str(refusal).strip():
                    findings.append(f"{name}, case {seed}-{index}: refused without a word ({refusal!r})")
            except Exception as error:
                findings.append(f"{name}, case {seed}-{index}: {type(error).__name__}: {error}")
            warm.add(name)
            if (took := time.process_time() - began) > seconds:
                findings.append(f"{name}, case {seed}-{index}: took {took:.0f} s")
    threading.stack_size(stack)
    return counts, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name holds this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    counts, findings = fuzz(args.cases, args.seed, args.only)
    for name, count in sorted(counts.items()):
        print(f"{count:>7}  {name}")
    for finding in findings[:50]:
        print("FOUND", finding[:300])
    print(f"{args.cases} cases, {len(findings)} findings, {time.perf_counter() - began:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
