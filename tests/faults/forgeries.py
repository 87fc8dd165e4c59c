"""Content behind its checksum: forged, the checksum made anew, and opened as the commands open it.

A checksum finds damage. Against somebody who writes both the content and the checksum only the checks of the
content help: these cases reach them. `fuzz.py` runs them.
"""

import hashlib
import io
import json
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deeploop.data import description
from deeploop.data.shards import Corpus, write_shard
from deeploop.data.token_loader import TokenLoader
from deeploop.eval.requests import Request, Requests, load_scores, write_archive
from deeploop.export.card import model_card
from deeploop.report.beside_paper import count_escapes
from deeploop.report.document import make_sections
from deeploop.report.groups import Histories
from deeploop.report.listing import as_json, fitted
from deeploop.report.runs import differing, find_runs
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.task import LanguageTask
from deeploop.tasks.puzzles.data.loader import PuzzleLoader
from deeploop.tasks.puzzles.data.sets import PuzzleSet, content_hash
from deeploop.tasks.puzzles.task import PuzzleTask
from deeploop.train.checkpoint import load_checkpoint, load_tensors, read_state
from deeploop.train.distributed import World, open_world
from deeploop.train.loop import train
from puzzle_runs import MODELS, write_boards

Damage = Callable[[object, random.Random], object]

TYPES = (
    *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn),
)
ODD_NUMBERS = (float("nan"), float("inf"), -1.0, 1e30, 0.0, 300.0)


def digest(record: object) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def odd_tensor(tensor: Tensor, draw: random.Random) -> Tensor:
    """The array with another type, another shape or other numbers."""
    kind = draw.randrange(6)
    if kind == 0:
        return tensor.to(draw.choice(TYPES))
    if kind == 1:
        return tensor.reshape(-1)[: draw.randrange(1 + tensor.numel())].clone()
    if kind == 2:
        return tensor[None].clone()
    if kind == 3 and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous()
    if kind == 4:
        return torch.zeros([draw.choice((0, 1, 3)) for _ in range(draw.randrange(4))])
    changed = tensor.clone()
    if changed.numel():
        # 127: the most that every kind of integer can hold, and more than any row of a table here.
        number = draw.choice(ODD_NUMBERS if changed.is_floating_point() else (0, 1, 7, 127))
        changed.view(-1)[draw.randrange(changed.numel())] = number
    return changed


def odd_array(array: np.ndarray, draw: random.Random) -> np.ndarray:
    kind = draw.randrange(6)
    if kind == 0:
        return array.astype(
            draw.choice((np.int8, np.uint16, np.int64, np.float32, np.complex64, bool, "<U3"))
        )
    if kind == 1:
        return array.ravel()[: draw.randrange(1 + array.size)]
    if kind == 2:
        return array[None]
    if kind == 3:
        return np.zeros([draw.choice((0, 1, 3)) for _ in range(draw.randrange(4))], array.dtype)
    if kind == 4:
        return np.concatenate([array, array]) if array.ndim else array
    changed = np.array(array)
    if changed.size and changed.dtype.kind in "iuf":
        limits = np.iinfo(changed.dtype) if changed.dtype.kind in "iu" else np.finfo(changed.dtype)
        changed.ravel()[draw.randrange(changed.size)] = draw.choice((limits.min, limits.max, 0, 1))
    return changed


def swollen(path: Path, name: str) -> None:
    """An archive of 32 KB whose one array asks for 32 MiB."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(f"{name}.npy", "w") as member,
    ):
        header = {"descr": "<f8", "fortran_order": False, "shape": (32 << 17,)}
        np.lib.format.write_array_header_1_0(member, header)  # type: ignore[arg-type]
        for _ in range(32):
            member.write(bytes(1 << 20))


def exchanged(
    things: dict[str, Any], odd: Callable[[Any, random.Random], Any], draw: random.Random
) -> dict[str, Any]:
    """One of the things made odd, left out, added under another name, or given another's place."""
    found, name, kind = dict(things), draw.choice(sorted(things)), draw.randrange(8)
    if kind == 0:
        del found[name]
    elif kind == 1:
        found[draw.choice(("x", "", ":", "a:b", "../x", "blocks.9.w", name + "x"))] = found[name]
    elif kind == 2:
        found[name] = found[draw.choice(sorted(things))]
    else:
        found[name] = odd(found[name], draw)
    return found


class Forgeries:
    """Valid originals, made once, and what is done with a forged copy of each."""

    def __init__(self, folder: Path, run: Path, config: Any, corpus: Path, damage_json: Damage) -> None:
        self.folder, self.run, self.corpus, self.damage_json = folder, run, corpus, damage_json
        self.config = config
        with open_world(config.device) as world:
            self.world: World = world
        self.boards = write_boards(folder / "boards").folder
        self.reasoner = self._reasoner()
        self.requests = [Request([1, 2, 3], [n], "piqa", 0, n // 2, n % 2) for n in range(6)]
        (self.run / "eval.json").write_text(json.dumps({"evaluations": [EVALUATION, ARC_EVALUATION]}))
        (self.run / "diagnose.json").write_text(json.dumps(DIAGNOSIS))

    def cases(self) -> dict[str, Callable[[random.Random], None]]:
        return {
            "forged state": self.state,
            "forged tensors": self.tensors,
            "forged state of a reasoner": self.reasoner_state,
            "forged tensors of a reasoner": self.reasoner_tensors,
            "forged corpus": self.forged_corpus,
            "forged puzzles": self.forged_puzzles,
            "forged requests": self.forged_requests,
            "forged scores": self.forged_scores,
            "run in a list": self.listed,
            "run in a report": self.reported,
        }

    # ── Originals ──────────────────────────────────────────────────────────────────────────────────────
    def _reasoner(self) -> Any:
        kind, model = MODELS["trm"]
        base = kind(model=model, device=self.config.device, out=self.folder / "reasoner")
        config = replace(
            base,
            data=replace(base.data, path=self.boards, test_examples=4),
            optim=replace(base.optim, steps=2, batch=4, warmup_steps=1),
        )
        with redirect_stdout(io.StringIO()):
            train(config)
        return config

    @contextmanager
    def _copy(self, original: Path) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            copy = Path(place) / original.name
            shutil.copytree(original, copy)
            yield copy

    # ── Checkpoints ────────────────────────────────────────────────────────────────────────────────────
    def _reseal(self, checkpoint: Path, state: Any) -> None:
        """state.json with checksums that fit what lies there."""
        sums = {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in checkpoint.glob("*.safetensors")
        }
        if isinstance(state, dict):
            state.pop("sha256", None)
            state = {**state, "sha256": {**sums, "state.json": digest(state)}}
        (checkpoint / "state.json").write_text(json.dumps(state))

    def _forge_state(self, checkpoint: Path, draw: random.Random) -> None:
        state = json.loads((checkpoint / "state.json").read_text())
        state.pop("sha256")
        self._reseal(checkpoint, self.damage_json(state, draw))
        if draw.random() < 0.1:  # the list of files itself
            whole = json.loads((checkpoint / "state.json").read_text())
            if isinstance(whole, dict):
                whole["sha256"][draw.choice(("/dev/zero", "../../run.json", "x", "task.safetensors"))] = (
                    "0" * 64
                )
                (checkpoint / "state.json").write_text(json.dumps(whole))

    def _forge_tensors(self, checkpoint: Path, draw: random.Random) -> None:
        path = draw.choice(sorted(checkpoint.glob("*.safetensors")))
        tensors = exchanged(load_file(path), odd_tensor, draw)
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
        self._reseal(checkpoint, json.loads((checkpoint / "state.json").read_text()))

    def _resume(self, task: Any, run: Path) -> None:
        """Resume a run, up to its first batch."""
        checkpoint = last_checkpoint(run)
        assert checkpoint is not None
        state = read_state(checkpoint)
        model = task.build()
        optimizer = task.make_optimizer(model)
        task.load_state(state, load_tensors(checkpoint))
        load_checkpoint(checkpoint, model=model, optimizer=optimizer, world=self.world)
        task.batches(state.get("step", 0))

    def state(self, draw: random.Random) -> None:
        with self._copy(self.run) as copy:
            self._forge_state(last_checkpoint(copy), draw)  # type: ignore[arg-type]
            self._resume(LanguageTask(self.config, self.world), copy)
            model = LanguageTask(self.config, self.world).build()
            model_card(copy, model, last_checkpoint(copy))  # type: ignore[arg-type]

    def tensors(self, draw: random.Random) -> None:
        with self._copy(self.run) as copy:
            self._forge_tensors(last_checkpoint(copy), draw)  # type: ignore[arg-type]
            self._resume(LanguageTask(self.config, self.world), copy)

    def reasoner_state(self, draw: random.Random) -> None:
        with self._copy(self.reasoner.out) as copy:
            self._forge_state(last_checkpoint(copy), draw)  # type: ignore[arg-type]
            self._resume(PuzzleTask(self.reasoner, self.world), copy)

    def reasoner_tensors(self, draw: random.Random) -> None:
        with self._copy(self.reasoner.out) as copy:
            self._forge_tensors(last_checkpoint(copy), draw)  # type: ignore[arg-type]
            task = PuzzleTask(self.reasoner, self.world)
            self._resume(task, copy)
            task.loss(task.model, task.batches(1).batches[0])

    # ── Data ───────────────────────────────────────────────────────────────────────────────────────────
    def forged_corpus(self, draw: random.Random) -> None:
        with self._copy(self.corpus) as copy:
            facts = json.loads((copy / "corpus.json").read_text())
            kind = draw.randrange(3)
            if kind == 0:
                arrays = dict(np.load(copy / "unigram.npz"))
                with (copy / "unigram.npz").open("wb") as file:
                    np.savez_compressed(file, **exchanged(arrays, odd_array, draw))
                facts["unigram"]["sha256"] = hashlib.sha256((copy / "unigram.npz").read_bytes()).hexdigest()
            elif kind == 1:
                shard = draw.choice(facts["splits"][draw.choice(("train", "validation"))]["shards"])
                tokens = np.array([draw.randrange(2**16) for _ in range(draw.choice((1, 5, 500)))])
                shard |= {"tokens": len(tokens), "sha256": write_shard(copy / shard["file"], tokens)}
            else:
                facts = self.damage_json(facts, draw)
            (copy / "corpus.json").write_text(json.dumps(facts))
            corpus = Corpus.open(copy)
            corpus.verify()
            corpus.counts("train")
            TokenLoader(corpus.train, context=16, batch=2, seed=0).step_batch()

    def forged_puzzles(self, draw: random.Random) -> None:
        with self._copy(self.boards) as copy:
            facts = json.loads((copy / "puzzles.json").read_text())
            if draw.random() < 0.5:
                name = draw.choice(sorted(facts["arrays"]))
                array = odd_array(np.load(copy / f"{name}.npy"), draw)
                np.save(copy / f"{name}.npy", array)
                facts["arrays"][name] = {
                    "dtype": array.dtype.str, "shape": list(array.shape), "sha256": description.digest(array)
                }  # fmt: skip
            else:
                facts = self.damage_json(facts, draw)
            if isinstance(facts, dict):
                facts["hash"] = content_hash(facts)
            (copy / "puzzles.json").write_text(json.dumps(facts))
            puzzles = PuzzleSet.open(copy)
            puzzles.verify()
            inputs, labels, ids = PuzzleLoader(puzzles, seed=0).next_batch(8)
            puzzles.test.rows(np.arange(min(3, len(puzzles.test))))
            for values, bound in (
                (inputs, puzzles.vocabulary),
                (labels, puzzles.vocabulary),
                (ids, puzzles.puzzle_ids),
            ):
                assert int(values.max()) < bound, "a value that the model has no row for"

    def forged_requests(self, draw: random.Random) -> None:
        requests = Requests.build(self.requests, tokenizer="bytes", vocabulary=257)
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            path = Path(place) / "requests.npz"
            requests.save(path)
            arrays = dict(np.load(path))
            meta = json.loads(arrays.pop("meta").tobytes())
            if draw.random() < 0.5:
                meta = self.damage_json(meta, draw)
            else:
                arrays = exchanged(arrays, odd_array, draw)
            try:  # sealed anew where anything can be
                again = replace(
                    requests,
                    columns={
                        name: arrays[name].astype(column.dtype) for name, column in requests.columns.items()
                    },
                )
                meta["sha256"] = again.digest()
            except Exception:
                pass
            write_archive(path, meta, arrays)  # type: ignore[arg-type]
            found = Requests.load(path)
            found.request(len(found) - 1)
            assert found.items > 0

    def forged_scores(self, draw: random.Random) -> None:
        arrays = {"3.abc.logprob": np.zeros(6), "3.abc.greedy": np.zeros(6, bool)}
        meta: Any = {"kind": "deeploop scores", "format": 1, "run": "x"}
        if draw.random() < 0.3:
            meta = self.damage_json(meta, draw)
        else:
            arrays = exchanged(arrays, odd_array, draw)
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            if draw.random() < 0.1:
                swollen(Path(place) / "scores.npz", "3.abc.logprob")
            else:
                write_archive(Path(place) / "scores.npz", meta, arrays)
            load_scores(Path(place) / "scores.npz")

    # ── What many runs are read for ────────────────────────────────────────────────────────────────────
    @contextmanager
    def _odd_runs(self, draw: random.Random) -> Iterator[Path]:
        """A sound run and one with an odd file."""
        names = ("config.json", "run.json", "metrics.jsonl", "eval.json", "diagnose.json")
        with self._copy(self.run) as copy:
            path = copy / draw.choice(names)
            whole = path.read_text()
            lines = (
                [json.loads(line) for line in whole.splitlines()]
                if path.suffix == ".jsonl"
                else json.loads(whole)
            )
            odd = self.damage_json(lines, draw)
            is_lines = path.suffix == ".jsonl" and isinstance(odd, list)
            path.write_text("\n".join(map(json.dumps, odd)) if is_lines else json.dumps(odd))  # type: ignore[call-overload]
            (copy / "checkpoints").rename(copy.parent / "elsewhere")
            yield copy

    def listed(self, draw: random.Random) -> None:
        with self._odd_runs(draw) as copy:
            runs = find_runs([self.run, copy])
            settings = differing(runs)
            fitted(runs, 80)
            json.dumps([as_json(one, settings) for one in runs])
            count_escapes(runs, Histories())

    def reported(self, draw: random.Random) -> None:
        with self._odd_runs(draw) as copy:
            make_sections(find_runs([self.run, copy]), Histories())


EVALUATION = {
    "tasks": ["piqa"], "shots": [0], "trained_rounds": 3, "rounds": [3], "deviations": ["bytes"],
    "results": [{"task": "piqa", "shots": 0, "rounds": 3, "acc": 0.5, "stderr": 0.1, "items": 4}],
    "command": ["deeploop", "eval"],
}  # fmt: skip
ARC_EVALUATION = {
    "kind": "arc", "model": "hrm", "tasks": 400, "most_views": 1000, "halt": False, "deviations": [],
    "ladder": {"1": 0.1, "2": 0.2, "10": 0.3, "100": 0.4, "1000": 0.5}, "results": [],
}  # fmt: skip
DIAGNOSIS = {"step": 2, "rounds": 3, "updates": "raw", "kappa": 1.5, "kappa_raw": 1.5, "similarity": 0.3}
