"""The cells of a sweep on disk: where each one stands, and which command brings it further.

OUT/sweep.json        the grid: {"format": 1, "sweep", "scale", "cells": {name: recipe, settings, axes}}
OUT/<cell>/           its run folder, with an empty file weights-dropped once its checkpoints were deleted
OUT/<cell>.log        what its processes printed, attempt after attempt; locked for as long as one lives

A cell's state is read from its run folder and its log, never kept elsewhere: a sweep that is killed has
nothing to repair.
"""

import fcntl
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deeploop.data.shards import atomic_file
from deeploop.experiments.endings import ending, log_error, outcome
from deeploop.experiments.grids import Cell, Grid
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
    def write(self) -> None:
        """Writes sweep.json. Cells that only an earlier start had stay; a changed one is refused."""
        old = self.read_old()
        known: dict[str, Any] = old.get("cells", {})
        self.check_own(old)
        own = {
            c.name: {"recipe": c.recipe, "settings": dict(c.settings), "axes": dict(c.axes)}
            for c in self.cells
        }
        own = json.loads(json.dumps(own, default=str))  # as it will be read
        for name in known.keys() & own.keys():
            if change := _first_change(known[name], own[name]):
                raise ValueError(f"out={self.out}: its cell {name} has {change}; choose another --out")
        record = {
            "format": FORMAT,
            "sweep": old.get("sweep", self.grid.name),
            "scale": old.get("scale", self.grid.scale),
            "compare_at": self.grid.compare_at,
            "cells": known | own,
            **provenance(),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.out / "sweep.json") as file:
            file.write((json.dumps(record, indent=1) + "\n").encode())

    def check_own(self, old: dict[str, Any]) -> None:
        """Refuses a folder whose cells are all another sweep's."""
        known = old.get("cells", {})
        if known and not any(cell.name in known for cell in self.cells):
            raise ValueError(
                f"out={self.out}: holds the sweep {old['sweep']} ({old['scale']}); choose another --out"
            )

    def read_old(self) -> dict[str, Any]:
        path = self.out / "sweep.json"
        if not path.exists():
            return {}
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']}, this deeploop reads {FORMAT}")
        except KeyError as error:
            raise ValueError(f"{path}: not a sweep's (it has no {error})") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not a sweep's ({error})") from None
        return record

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
        (folder / DROPPED).touch()  # first: killed in between, the cell is still a finished one
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def is_locked(log: Path) -> bool:
    """Whether a process works on the cell now: one of ours, or one that outlived an earlier sweep."""
    try:
        with log.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _first_change(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    if old["recipe"] != new["recipe"]:
        return f"recipe={old['recipe']}, not {new['recipe']}"
    for path in sorted(old["settings"].keys() | new["settings"].keys()):
        if path.startswith(HARMLESS):
            continue
        a, b = (side["settings"].get(path, "the recipe's") for side in (old, new))
        if a != b:
            return f"{path}={a}, not {b}"
    return None
