"""The cells of a sweep on disk: where each one stands, and which command brings it further.

OUT/sweep.json        the grid: {"format": 1, "sweep", "scale", "compare_at",
                      "cells": {name: recipe, settings, axes}}, and the last start's command and time
OUT/<cell>/           its run folder, with an empty file weights-dropped once its checkpoints were deleted
OUT/<cell>.log        what its processes printed, attempt after attempt; locked for as long as one lives

A cell's state is read from its run folder and its log, never kept elsewhere: a sweep that is killed has
nothing to repair.
"""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deeploop.files import append_file, is_locked, parse_json, read_object, write_json
from deeploop.report.endings import ending, log_error, outcome
from deeploop.sweep.grid import Cell, Grid
from deeploop.train.checkpoint import list_checkpoints
from deeploop.train.config import TrainConfig
from deeploop.train.metrics import read_metrics_tail
from deeploop.train.rundir import provenance

FORMAT = 1
DROPPED = "weights-dropped"
State = Literal["absent", "started", "running", "finished", "failed"]
HARMLESS = ("device.", "checkpoint.", "log.")  # may differ between two starts of one cell


@dataclass(frozen=True)
class Progress:
    """How far a cell is, by its metrics."""

    state: State
    steps: int
    step: int = 0
    loss: float | None = None
    """Of the last training step that was logged."""
    validation: float | None = None
    """The last validation loss."""
    similarity: float | None = None
    verdict: str | None = None
    tokens_per_s: float | None = None
    seconds_left: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Record:
    """What sweep.json holds of earlier starts."""

    sweep: str
    scale: str
    compare_at: int | None
    cells: dict[str, Cell]
    command: str
    """Of the last start, as a person types it."""
    day: str
    """Of the last start, such as 2026-11-15."""


class SweepFolder:
    """A grid's cells under one folder, and what a cell's processes are started with."""

    def __init__(
        self,
        out: Path,
        grid: Grid,
        cells: list[Cell],
        *,
        gpus: int = 1,
        torchrun: bool = False,
        tasks: Path | None = None,
    ) -> None:
        self.out, self.grid, self.cells = out, grid, cells
        self.gpus, self.torchrun, self.tasks = gpus, torchrun or gpus > 1, tasks
        self.configs = {cell.name: cell.config() for cell in cells}

    def run_folder(self, cell: Cell) -> Path:
        return self.out / cell.name

    def log_file(self, cell: Cell) -> Path:
        return self.out / f"{cell.name}.log"

    # ── the grid ──
    def record(self) -> Record | None:
        """What earlier starts left here; refuses another sweep's folder."""
        old = read_record(self.out)
        if old is None:
            return None
        named = old.sweep in (self.grid.name, self.grid.family)
        # Two files of one name have the same folder, unless --out says otherwise.
        if not named or old.cells.keys().isdisjoint(cell.name for cell in self.cells):
            raise ValueError(
                f"out={self.out}: holds another sweep, {old.sweep} ({old.scale}), last started with "
                f"`{old.command}`; choose another --out"
            )
        return old

    def unchanged_record(self) -> Record | None:
        """The same; refuses to go on with cells that have other settings now."""
        old = self.record()
        if old is None:
            return None
        for cell in self.cells:
            known = old.cells.get(cell.name)
            if known and (change := _first_change(known, _as_read(cell))):
                raise ValueError(
                    f"out={self.out}: its cell {cell.name} has {change}; repeat its last start "
                    f"(`{old.command}`) or choose another --out"
                )
        return old

    def as_recorded(self, record: Record) -> "SweepFolder":
        """The folder with the cells and settings that were started, whatever the command line says now.

        Of a folder that two sweeps share, those of this one.
        """
        own = {cell.name for cell in self.cells}
        cells = [c for c in record.cells.values() if c.name in own or self.grid.shares_folder_of is None]
        return SweepFolder(self.out, replace(self.grid, compare_at=record.compare_at), cells)

    def is_done(self, record: Record) -> bool:
        """Whether nothing is left to run, nor to record."""
        return record.compare_at == self.grid.compare_at and all(
            c.name in record.cells and self.progress(c).state == "finished" for c in self.cells
        )

    def write(self) -> None:
        """Writes sweep.json. Cells that only an earlier start had stay; a changed one is refused."""
        old = self.unchanged_record()
        cells = (old.cells if old else {}) | {cell.name: cell for cell in self.cells}
        record = {
            "format": FORMAT,
            "sweep": self.grid.family,
            "scale": old.scale if old else self.grid.scale,
            "compare_at": self.grid.compare_at,
            "cells": {name: _to_dict(cell) for name, cell in cells.items()},
            **provenance(),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / "sweep.json", record, default=str)

    # ── one cell ──
    def progress(self, cell: Cell, *, running: bool = False) -> Progress:
        """Where a cell stands; `running` is known to whoever started it."""
        config, folder = self.configs[cell.name], self.run_folder(cell)
        steps = config.optim.steps
        records = read_metrics_tail(folder)
        train = next((r for r in reversed(records) if r["kind"] == "train"), {})
        validation = next((r for r in reversed(records) if r["kind"] == "validation"), {})
        step = train.get("step", 0)
        seconds = train.get("seconds")
        return Progress(
            "running" if running else self._state(cell, validation),
            steps,
            step,
            train.get("loss"),
            validation.get("loss"),
            validation.get("similarity"),
            outcome(validation),
            train.get("tokens_per_s"),
            (steps - step) * seconds / step if step and seconds is not None else None,
            log_error(self.log_file(cell)),
        )

    def _state(self, cell: Cell, validation: dict[str, Any]) -> State:
        if is_locked(self.log_file(cell)):
            return "running"
        if self._trained(cell, validation) and not self._unscored(cell):
            return "finished"
        if log_error(self.log_file(cell)) is not None:
            return "failed"
        return "started" if validation else "absent"

    def _trained(self, cell: Cell, validation: dict[str, Any]) -> bool:
        """Whether the last validation is in, and the weights that come after it.

        Weights that were dropped on purpose are missed only if they are yet to be scored.
        """
        config, folder = self.configs[cell.name], self.run_folder(cell)
        stops = isinstance(config, TrainConfig) and config.guard.stop  # reasoners have no collapse guard
        optim = config.optim
        ended = ending(validation, steps=optim.steps, since=optim.warmup_steps, stops=stops) is not None
        step = validation.get("step", -1)
        saved = any(path.name == f"step-{step:08d}" for path in list_checkpoints(folder))
        dropped = (folder / DROPPED).exists() and not self._unscored(cell)
        return ended and (saved or dropped)

    def _unscored(self, cell: Cell) -> bool:
        return self.grid.evaluate and not (self.run_folder(cell) / "eval.json").exists()

    def next_command(self, cell: Cell) -> list[str] | None:
        """The process that brings a cell further, or None when there is nothing left to do."""
        folder = self.run_folder(cell)
        validations = [r for r in read_metrics_tail(folder) if r["kind"] == "validation"]
        if not self._trained(cell, validations[-1] if validations else {}):
            recipe, *settings = cell.words()
            return [*self._launcher(), "train", recipe, "--out", str(folder), "--resume", *settings]
        if self._unscored(cell):
            data = [] if self.tasks is None else ["--data", str(self.tasks)]
            return [sys.executable, "-m", "deeploop", "eval", str(folder), *data]
        return None

    def _launcher(self) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        return [sys.executable, *(torchrun if self.torchrun else []), "-m", "deeploop"]

    def drop_weights(self, cell: Cell) -> None:
        """Deletes a finished cell's checkpoints; its metrics stay."""
        folder = self.run_folder(cell)
        append_file(folder / DROPPED).close()  # first: killed in between, the cell is still a finished one
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def read_record(out: Path) -> Record | None:
    """OUT/sweep.json; None where there is none."""
    path = out / "sweep.json"
    if not path.exists():
        return None
    try:
        found = read_object(path)
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, this deeploop reads {FORMAT}")
        return Record(
            found["sweep"],
            found["scale"],
            found.get("compare_at"),
            {name: _from_dict(name, cell) for name, cell in found["cells"].items()},
            shlex.join(map(str, found["command"])),
            str(found["written"])[:10],
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        # Its cells are whole without it: the next start writes it anew.
        raise ValueError(f"{path}: not a sweep's ({why}); move it away, or choose another --out") from None


def _to_dict(cell: Cell) -> dict[str, Any]:
    return {"recipe": cell.recipe, "settings": dict(cell.settings), "axes": dict(cell.axes)}


def _from_dict(name: str, found: dict[str, Any]) -> Cell:
    return Cell(name, found["recipe"], dict(found["settings"]), dict(found["axes"]))


def _as_read(cell: Cell) -> Cell:
    """The cell as sweep.json gives it back: a tuple is a list there, a path its text."""
    return _from_dict(cell.name, parse_json(json.dumps(_to_dict(cell), default=str)))


def _first_change(old: Cell, new: Cell) -> str | None:
    if old.recipe != new.recipe:
        return f"recipe={old.recipe}, not {new.recipe}"
    for path in sorted(old.settings.keys() | new.settings.keys()):
        if path.startswith(HARMLESS):
            continue
        a, b = (cell.settings.get(path, "the recipe's") for cell in (old, new))
        if a != b:
            return f"{path}={a}, not {b}"
    return None
