"""The cells of a sweep on disk: the state of each, and the command that continues it.

OUT/sweep.json          the grid: {"format": 1, "sweep", "scale", "compare_at", "jobs",
                        "cells": {name: recipe, settings, axes}}, and the last start's command and time
OUT/<cell>.config.json  its config, for `deeploop train --config`
OUT/<cell>/             its run folder, with an empty file weights-dropped once its checkpoints were deleted
OUT/<cell>.log          what its processes printed, attempt after attempt; locked for as long as one lives
OUT/<cell>.exit.json    how the last of them ended: {"code", "failed", "error"}
OUT/runs.tar.xz         by research/pack.py: run folders, logs, exit codes; read where a cell has none itself

A cell's state is read from these files, never kept elsewhere: a sweep that is killed has nothing to repair.
"""

import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from deeploop.config.json import to_dict
from deeploop.config.old_names import BIAS, WITHOUT_BIAS
from deeploop.files import append_file, parse_json, write_json
from deeploop.runs.endings import DROPPED, ENDED, Ending, State, ending, log_file, outcome, run_state
from deeploop.runs.folder import list_checkpoints, provenance
from deeploop.runs.packed import opened
from deeploop.runs.sweeps import FORMAT, RecordedCell, SweepRecord, read_sweep
from deeploop.sweep.grid import Cell, Grid
from deeploop.train.metrics import Record, last_lines

HARMLESS = ("device.", "checkpoint.", "log.")  # may differ between two starts of a cell
ARITHMETIC = ("device.precision", "device.stream")  # may not, as the cell would change its precision midway


@dataclass(frozen=True)
class Progress:
    """A cell's progress, read from its metrics."""

    state: State
    steps: int
    step: int = 0
    loss: float | None = None
    """Training loss of the last step that was logged."""
    validation: float | None = None
    """The last validation loss."""
    similarity: float | None = None
    verdict: str | None = None
    tokens_per_s: float | None = None
    seconds_left: float | None = None


class SweepFolder:
    """The folder of a grid's cells, and the commands that run them."""

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
        self.out, self.grid, self.cells = out, grid, _as_begun(cells, out)
        self.gpus, self.torchrun, self.tasks = gpus, torchrun or gpus > 1, tasks
        self.configs = {cell.name: cell.config() for cell in self.cells}

    def run_folder(self, cell: Cell) -> Path:
        return self.out / cell.name

    def config_file(self, cell: Cell) -> Path:
        return self.out / f"{cell.name}.config.json"

    def log_file(self, cell: Cell) -> Path:
        return log_file(self.run_folder(cell))

    def files(self, cell: Cell) -> Path:
        """The folder to read a cell's run from: its own, or a temporary copy if it is packed."""
        return opened(self.run_folder(cell))

    # ── the grid ──
    def record(self) -> SweepRecord | None:
        """Read the cells that earlier starts recorded; refuse another sweep's folder."""
        try:
            old = read_sweep(self.out)
        except FileNotFoundError:
            return None
        except ValueError as error:
            # The cells do not depend on sweep.json: the next start writes it again.
            raise ValueError(f"{error}; move it away, or choose another --out") from None
        named = old.sweep in (self.grid.name, self.grid.family)
        # Two files of one name have the same folder, unless --out says otherwise. Two parts of one grid may
        # have no cell in common.
        if not named or old.cells.keys().isdisjoint(cell.name for cell in self.grid.cells()):
            raise ValueError(
                f"out={self.out}: holds another sweep, {old.sweep} ({old.scale}), last started with "
                f"`{old.command}`; choose another --out"
            )
        return old

    def unchanged_record(self) -> SweepRecord | None:
        """Read the record of earlier starts; refuse to continue cells whose settings changed."""
        old = self.record()
        if old is None:
            return None
        for cell in self.cells:
            known = old.cells.get(cell.name)
            if known and (change := _first_change(known, _as_recorded(cell))):
                raise ValueError(
                    f"out={self.out}: its cell {cell.name} has {change}; repeat its last start "
                    f"(`{old.command}`) or choose another --out"
                )
        return old

    def as_recorded(self, record: SweepRecord) -> "SweepFolder":
        """Return the folder with the cells and settings of the recorded sweep, not of this command line.

        If two sweeps share the folder, only the cells of this one are kept.
        """
        own = {cell.name for cell in self.cells}
        cells = [
            Cell(name, cell.recipe, cell.settings, cell.axes)
            for name, cell in record.cells.items()
            if name in own or self.grid.shares_folder_of is None
        ]
        return SweepFolder(self.out, replace(self.grid, compare_at=record.compare_at), cells)

    def is_done(self, record: SweepRecord) -> bool:
        """Return True if nothing is left to run or to record."""
        return record.compare_at == self.grid.compare_at and all(
            c.name in record.cells and self.progress(c).state in ENDED for c in self.cells
        )

    def write(self, jobs: int = 1) -> None:
        """Write sweep.json and the cells' configs.

        Cells that only an earlier start had stay; a changed one is refused.
        """
        old = self.unchanged_record()
        cells = (old.cells if old else {}) | {cell.name: _as_recorded(cell) for cell in self.cells}
        record = {
            "format": FORMAT,
            "sweep": self.grid.family,
            "scale": old.scale if old else self.grid.scale,
            "compare_at": self.grid.compare_at,
            "jobs": max(jobs, old.jobs if old else 1),  # a cell of an earlier start may have had neighbours
            "cells": {name: asdict(cell) for name, cell in cells.items()},
            **provenance(),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / "sweep.json", record)
        for cell in self.cells:
            # A cell that was begun keeps its config: a default may be another since.
            if old is None or cell.name not in old.cells or not self.config_file(cell).exists():
                write_json(self.config_file(cell), to_dict(self.configs[cell.name]))

    # ── one cell ──
    def progress(self, cell: Cell, *, running: bool = False) -> Progress:
        """Read a cell's progress; a caller that started its process passes `running`."""
        train, validation = self._last_lines(cell)
        over = self._ending(cell, train, validation)
        left = self._left(cell, over, validation) is not None
        steps, step, seconds = self.configs[cell.name].optim.steps, train.get("step", 0), train.get("seconds")
        return Progress(
            "running" if running else run_state(self.files(cell), over, left=left),
            steps,
            step,
            train.get("loss"),
            validation.get("loss"),
            validation.get("similarity"),
            outcome(validation),
            train.get("tokens_per_s"),
            (steps - step) * seconds / step if step and seconds is not None else None,
        )

    def next_command(self, cell: Cell) -> list[str] | None:
        """The command that continues a cell, or None if it is finished."""
        folder = self.run_folder(cell)
        train, validation = self._last_lines(cell)
        left = self._left(cell, self._ending(cell, train, validation), validation)
        if left == "train":
            config = ["--config", str(self.config_file(cell))]
            return [*self._launcher(), "train", *config, "--out", str(folder), "--resume"]
        if left == "eval":
            data = [] if self.tasks is None else ["--data", str(self.tasks)]
            return [sys.executable, "-m", "deeploop", "eval", str(folder), *data]
        return None

    def _last_lines(self, cell: Cell) -> tuple[Record, Record]:
        """The last line of training metrics, and the last validation."""
        train, validation = last_lines(self.files(cell))
        return train[0] if train else {}, validation

    def _ending(self, cell: Cell, train: Record, validation: Record) -> Ending | None:
        config = self.configs[cell.name]
        return ending(
            validation,
            steps=config.optim.steps,
            since=max(train.get("step", 0), config.optim.warmup_steps),
            stops=config.stops_when_collapsed,
        )

    def _left(self, cell: Cell, over: Ending | None, validation: Record) -> Literal["train", "eval"] | None:
        """Next step of a cell: train until its last validation has weights after it, then eval for scores.

        Dropped weights are needed again only if they have yet to be scored.
        """
        files = self.files(cell)
        unscored = self.grid.evaluate and not (files / "eval.json").exists()
        last = f"step-{validation.get('step', -1):08d}"
        saved = any(path.name == last for path in list_checkpoints(files))
        packed = files != self.run_folder(cell)  # which leaves weights out
        dropped = (packed or (files / DROPPED).exists()) and not unscored
        if over is None or not (saved or dropped):
            return "train"
        return "eval" if unscored else None

    def _launcher(self) -> list[str]:
        torchrun = ["-m", "deeploop.sweep.torchrun", "--standalone", "--nproc-per-node", str(self.gpus)]
        return [sys.executable, *(torchrun if self.torchrun else []), "-m", "deeploop"]

    def drop_weights(self, cell: Cell) -> None:
        """Delete a finished cell's checkpoints; its metrics stay."""
        folder = self.run_folder(cell)
        if not folder.is_dir():  # packed, so it has no folder
            return
        append_file(folder / DROPPED).close()  # first: a cell killed in between still counts as finished
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _as_begun(cells: list[Cell], out: Path) -> list[Cell]:
    """Turn the unigram bias off in cells that a sweep of version 0.2.0 began without it."""
    try:
        begun = read_sweep(out).cells
    except (OSError, ValueError):  # reported by `SweepFolder.record`
        return cells
    kept = []
    for cell in cells:
        like = [begun[cell.name]] if cell.name in begun else begun.values()
        off = BIAS not in cell.settings and {old.settings.get(BIAS) for old in like} == {False}
        kept.append(replace(cell, settings={**cell.settings, BIAS: False}) if off else cell)
    return kept


def _as_recorded(cell: Cell) -> RecordedCell:
    """Convert a cell to what sweep.json holds, where tuples are lists and paths are text."""
    settings = dict(cell.settings)
    if cell.recipe in WITHOUT_BIAS:
        settings.setdefault(BIAS, cell.config().model.unigram_bias)
    kept = {"recipe": cell.recipe, "settings": settings, "axes": dict(cell.axes)}
    return RecordedCell(**parse_json(json.dumps(kept, default=str)))


def _first_change(old: RecordedCell, new: RecordedCell) -> str | None:
    if old.recipe != new.recipe:
        return f"recipe={old.recipe}, not {new.recipe}"
    for path in sorted(old.settings.keys() | new.settings.keys()):
        if path.startswith(HARMLESS) and path not in ARITHMETIC:
            continue
        a, b = (cell.settings.get(path, "the recipe's") for cell in (old, new))
        if a != b:
            return f"{path}={a}, not {b}"
    return None
