"""Read run folders: settings, progress and measurements. Imports no torch.

A damaged or half-written run raises no error: its `state` is "unreadable".
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from deeploop.config import old_names
from deeploop.config.json import flatten, to_dict
from deeploop.files import read_object
from deeploop.rules import Rule, parse
from deeploop.runs.endings import ENDED, State, ending, run_state, stopped_at
from deeploop.runs.packed import opened, subfolders
from deeploop.runs.sweeps import read_sweep
from deeploop.tasks.language.config import TrainConfig
from deeploop.train.metrics import Record, is_number, is_sound, last_lines, stream_lines

REASONERS = ("hrm", "trm")
ITERATED = ("data.task", "data.rule", "data.length", "data.train_steps", "rounds.")
OF_THE_STAMP = ("device.low_precision", "device.arithmetic", "data.puzzles")
"""Fields of DEFINING that no config has; they are derived from run.json, or from several settings."""
DEFINING = (
    "model.",
    "data.path",
    "data.mix",
    "data.max_epochs",
    "data.mask_documents",
    *ITERATED,
    "gate.",
    "optim.",
    "halting.",
    "data.test_examples",
    *OF_THE_STAMP,
)
"""Fields, or their prefixes, that define an experiment; its seed, folder, logging and hardware do not."""
# Field → another field, and the values of that one with which it has an effect.
CONDITIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "gate.stage": ("model.exit_gate", (True,)),
    "gate.entropy": ("model.exit_gate", (True,)),
    "rounds.limit": ("rounds.sample", ("uniform", "poisson-lognormal")),
    "rounds.spread": ("rounds.sample", ("poisson-lognormal",)),
    "rounds.ramp_share": ("rounds.ramp", ("linear", "sqrt")),
}
RATES = 100  # lines of metrics whose median is the speed
# The types that tables rely on; a file with another type is damaged.
CONFIG_KINDS = {
    "seed": int,
    "model.rule": str,
    **dict.fromkeys(
        (f"model.{name}" for name in ("blocks", "rounds", "width", "context", "vocabulary")), int
    ),
    "data.path": str,
    "data.mix": list,
    "optim.peak_lr": int | float,
    **dict.fromkeys(("optim.steps", "optim.batch", "optim.warmup_steps"), int),
}
# Fields that only some tasks have, or only runs of version 0.2.0.
OTHER_KINDS: dict[str, Any] = {"model.high_rule": str, "data.task": str, "data.rule": int, "optim.kind": str}
OTHER_KINDS |= dict.fromkeys(("data.length", "data.train_steps"), int)
STAMP_KINDS = {
    "task": str,
    "ranks": int,
    "bytes_per_token": int | float,
    "written": str,
    "command": list,
    "shape": dict,
    "puzzles": str,
    "device": str,
    "git": str | None,
}


@dataclass(frozen=True)
class Run:
    """A run folder, or a cell of a sweep that has no folder yet (state `absent`)."""

    folder: Path
    name: str
    state: State | Literal["unreadable"]
    """`collapsed` means stopped by the guard."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The config: dotted path → value."""
    stamp: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    """The last line of training metrics."""
    validation: Mapping[str, Any] = field(default_factory=dict)
    """The last validation."""
    tokens_per_s: float | None = None
    """Median of the last hundred lines of training metrics."""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Axis of its sweep → the cell's label on it."""
    sweep: str = ""
    """The name of its sweep."""
    compare_at: int | None = None
    """The step at which its sweep compares losses; None is the last."""
    shared: bool = False
    """True if other cells of its sweep ran on its device at the same time, which slows it down."""

    @property
    def files(self) -> Path:
        """The folder to read: `folder`, or a temporary copy if it is packed in an archive."""
        return opened(self.folder)

    @property
    def step(self) -> int:
        stopped = stopped_at(self.stamp) or 0  # metrics may have no line at this step
        return max(self.train.get("step", 0), self.validation.get("step", 0), stopped)

    @property
    def steps(self) -> int | None:
        return self.fields.get("optim.steps")

    @property
    def seed(self) -> int | None:
        return self.fields.get("seed")

    @property
    def rule(self) -> Rule:
        """The residual rule of a looped GPT."""
        return parse(self.fields["model.rule"])

    @property
    def corpora(self) -> list[str]:
        """Training data: a folder, or several with their weights."""
        return [str(folder) for folder in self.fields.get("data.mix") or [self.fields["data.path"]]]

    @property
    def unit(self) -> str:
        """The unit of data that the loss is per: nats per token, byte, cell …"""
        task = self.stamp.get("task", "language")
        if task != "language":
            units = {"iterate": "answer", "chat": "token", "hrm": "cell", "trm": "cell"}
            return units.get(task, "target")
        return {257: "byte", 50257: "GPT-2 token"}.get(self.fields.get("model.vocabulary", 0), "token")

    @property
    def bits_per_nat(self) -> float | None:
        """Factor from the loss to bits per byte; None for older runs, except on bytes."""
        length = self.stamp.get("bytes_per_token", 1 if self.unit == "byte" else None)
        return 1 / (length * math.log(2)) if length else None

    @property
    def ended(self) -> bool:
        """Return True if the run has ended, so that its last loss is its result."""
        return self.state in ENDED

    @property
    def hours(self) -> float | None:
        """Training time × ranks; older runs did not record `ranks` and count as one."""
        seconds = self.train.get("seconds")
        return None if seconds is None else seconds * self.stamp.get("ranks", 1) / 3600

    @property
    def gpu_hours(self) -> float | None:
        """Hours on GPUs; None on a CPU. Older runs record no device, but `mfu` if they ran on a known GPU."""
        device = self.stamp.get("device")
        on_gpu = self.train.get("mfu") is not None if device is None else device != "cpu"
        return self.hours if on_gpu else None


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Find the runs in run folders, sweep folders, and folders of either; sorted by name, without repeats."""
    found: dict[Path, Run] = {}
    for folder in folders:
        if not opened(folder).is_dir():
            raise ValueError(f"{folder}: no such folder")
        inside = list(_runs_under(folder, depth=3))
        if not inside:
            raise ValueError(f"{folder}: holds no run folder (run.json) and no sweep (sweep.json)")
        for run in inside:
            found.setdefault(run.folder.resolve(), run)
    names = distinct_names([run.folder for run in found.values()])
    runs = [replace(run, name=name) for run, name in zip(found.values(), names, strict=True)]
    return sorted(runs, key=lambda run: natural(run.name))


def _runs_under(folder: Path, depth: int) -> Iterator[Run]:
    if (opened(folder) / "run.json").is_file():
        yield read_run(folder, shared=_shares_device(folder))
    elif (folder / "sweep.json").is_file():
        sweep = read_sweep(folder)
        for name, cell in sweep.cells.items():
            run = read_run(folder / name, cell.axes, sweep.compare_at, shared=sweep.jobs > 1)
            yield replace(run, sweep=sweep.sweep)
    elif depth:
        for child in subfolders(folder):
            yield from _runs_under(child, depth - 1)


def _shares_device(folder: Path) -> bool:
    """Return True if a run given by itself is a cell of a sweep with several cells per device."""
    try:
        return read_sweep(folder.resolve().parent).jobs > 1
    except (OSError, ValueError):
        return False


def read_run(
    folder: Path,
    axes: Mapping[str, Any] | None = None,
    compare_at: int | None = None,
    *,
    shared: bool = False,
) -> Run:
    """Read a run from its JSON files and the end of its metrics."""
    place: dict[str, Any] = {"axes": axes or {}, "compare_at": compare_at, "shared": shared}
    files = opened(folder)
    if not (files / "run.json").is_file():
        return Run(folder, folder.name, run_state(files, None), **place)
    try:
        stamp = read_object(files / "run.json")
        fields = old_names.fields(flatten(read_object(files / "config.json")), stamp.get("task"))
        if stamp.get("task") == "language":
            fields = _defaults() | fields
            epochs = fields["data.max_epochs"]  # older configs have one number, 0 for no limit
            fields["data.max_epochs"] = ([epochs] if epochs else []) if isinstance(epochs, int) else epochs
        fields |= _derived_fields(stamp, fields)
        lines, validation = last_lines(files, count=RATES, sound=False)
        train = lines[0] if lines else {}
        _check_kinds(fields, CONFIG_KINDS | OTHER_KINDS)
        _check_kinds(stamp, STAMP_KINDS)
        parse(fields.get("model.rule", "deeploop"))
        if not (is_sound(train) and is_sound(validation) and is_whole(validation)):
            raise ValueError("the last lines of its metrics are damaged")
    except (OSError, ValueError):
        return Run(folder, folder.name, "unreadable", **place)
    end = ending(
        validation,
        steps=fields.get("optim.steps"),
        since=max(train.get("step", 0), fields.get("optim.warmup_steps", 0)),
        stops=bool(fields.get("guard.stop")),
    )
    rates = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s") and is_sound(line)]
    rate = median(rates) if rates else None
    return Run(folder, folder.name, run_state(files, end), fields, stamp, train, validation, rate, **place)


def low_precision(fields: Mapping[str, Any]) -> str:
    """The low-precision options of a run beyond its device's default, fp32 or bf16; `none` without any."""
    chosen = {
        "fp8": fields.get("device.precision") == "fp8",
        "bf16 stream": fields.get("device.stream") == "bf16",
    }
    return ", ".join(name for name, is_so in chosen.items() if is_so) or "none"


@cache
def _defaults() -> dict[str, Any]:
    """The default settings of a language model, for configs older than a setting."""
    fields = flatten(to_dict(TrainConfig()))
    return {name: value for name, value in fields.items() if name.startswith(DEFINING)}


def _derived_fields(stamp: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of OF_THE_STAMP: a run's arithmetic, and the puzzles of a reasoner."""
    values: dict[str, Any] = {"device.low_precision": low_precision(fields)}
    if stamp.get("task") in REASONERS:
        values["data.puzzles"] = str(stamp.get("puzzles"))[:12]
    if stamp.get("task") == "iterate" and isinstance(execution := stamp.get("execution"), dict):
        values["device.arithmetic"] = str(execution.get("precision"))
    return values


def is_whole(validation: Mapping[str, Any]) -> bool:
    """Return False if the lists of an iterated task's validation do not match; others have no lists."""
    if "cells_by_steps" not in validation:
        return True
    steps, shares = validation.get("steps"), validation["cells_by_steps"]
    if not (isinstance(steps, list) and isinstance(shares, list) and len(steps) == len(shares) > 0):
        return False
    numbers = [*shares, validation.get("beyond") or 0.0]
    return all(type(step) is int for step in steps) and all(map(is_number, numbers))


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name in values.keys() & kinds.keys():
        if not isinstance(values[name], kinds[name]):
            raise ValueError(f"{name}={values[name]!r}: must be a {kinds[name]}")


def applies(run: Run, name: str) -> bool:
    """Return True if a field has an effect in a run, given its other fields."""
    if name not in CONDITIONS:
        return True
    other, values = CONDITIONS[name]
    return other not in run.fields or run.fields[other] in values


def differing(runs: Sequence[Run]) -> list[str]:
    """The fields in which these runs differ, apart from the seed, in the order of the config.

    A field is compared only among the runs whose task has it, and in which it has an effect.
    """
    readable = [run for run in runs if run.fields]
    owners: dict[str, set[Any]] = {}
    for run in readable:
        for name in run.fields:
            if name.startswith(DEFINING):
                owners.setdefault(name, set()).add(run.stamp.get("task"))

    def values(name: str) -> set[str]:
        own = [run for run in readable if run.stamp.get("task") in owners[name] and applies(run, name)]
        return {json.dumps(run.fields.get(name)) for run in own}

    found = [name for name in owners if len(values(name)) > 1]
    return [name for name in found if not (name == "optim.floor_lr" and _floor_follows_peak(readable))]


def _floor_follows_peak(runs: Sequence[Run]) -> bool:
    """Return True if floor_lr is the same share of peak_lr in every run, so that peak_lr implies it."""
    pairs = [(run.fields.get("optim.floor_lr"), run.fields.get("optim.peak_lr")) for run in runs]
    shares = {f"{low / peak:.6g}" if isinstance(low, float | int) and peak else None for low, peak in pairs}
    return len(shares) == 1 and None not in shares


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The ends of the paths, as short as possible while all differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def natural(text: str) -> list[tuple[int, float, str]]:
    """Sort key that puts r3 before r12."""
    words = re.findall(r"[0-9]+(?:\.[0-9]+)?|[^0-9]+", text)
    return [(0, float(word), "") if word[0] in "0123456789" else (1, 0.0, word) for word in words]


# ── The whole history of a run, for tables and figures ──────────────────────────────────────────────────
POINTS = 400
KAPPA = ("step", "rounds", "updates", "kappa", "kappa_raw", "similarity")


@dataclass(frozen=True)
class History:
    """A run's metrics, read once."""

    curve: list[tuple[int, float]]
    """(step, training loss), thinned to fewer than 2 × POINTS."""
    validations: list[Record]
    kappas: list[Record]
    """The fields KAPPA of each diagnosis."""
    resumes: list[tuple[int, dict[str, list[Any]]]] = field(default_factory=list)
    """The step of each resume with changed settings, and field → [old, new]."""
    damaged: int = 0
    """Number of unreadable lines, without a truncated last one."""


def read_history(folder: Path) -> History:
    """Read the metrics of a run in one pass."""
    curve: list[tuple[int, float]] = []
    validations, kappas, resumes = [], [], []
    stride, seen, damaged = 1, 0, 0
    for record in stream_lines(opened(folder)):
        if record is None:
            damaged += 1
        elif record["kind"] == "validation" and record.get("loss") is not None:
            validations.append(record)
        elif record["kind"] == "diagnose":
            kappas.append({name: record.get(name) for name in KAPPA})
        elif record["kind"] == "resume" and isinstance(changes := record.get("changes"), dict):
            pairs = {name: own for name, own in changes.items() if isinstance(own, list) and len(own) == 2}
            resumes.append((record["step"], pairs))
        elif record["kind"] == "train" and record.get("loss") is not None:
            if seen % stride == 0:
                curve.append((record["step"], record["loss"]))
            seen += 1
            if len(curve) == 2 * POINTS:
                curve, stride = curve[::2], 2 * stride
    return History(curve, validations, kappas, resumes, damaged)
