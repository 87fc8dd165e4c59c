"""Run the cells of a sweep as local processes, several at a time, on the available devices."""

import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deeploop.exits import OUT_OF_MEMORY, STOPPED
from deeploop.files import append_file, is_locked, lock, write_json
from deeploop.runs.endings import exit_file, log_error, log_file
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import Cell
from deeploop.train.stop import StopRequest

POLL_SECONDS = 0.3
SAVE_SECONDS = 110  # torchrun kills its ranks 30 s after SIGTERM unless told otherwise
Slot = dict[str, str]  # the environment that ties a process to its devices


class Work(Protocol):
    """A process that works on a cell."""

    def poll(self) -> int | None: ...


@dataclass
class Elsewhere:
    """A process started by another sweep command; it holds a lock on the log until it ends."""

    log: Path

    def poll(self) -> int | None:
        return None if is_locked(self.log) else 0


@dataclass
class Local:
    """Run the cells of a sweep; `failed` maps the failed ones to their errors."""

    sweep: SweepFolder
    slots: list[Slot]
    keep_weights: bool
    watch: Callable[[set[str]], None]
    """Called repeatedly with the names of the running cells."""
    minutes: float | None = None
    """No cell is started after this many minutes."""
    failed: dict[str, str] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """Slots that are no longer used: their device's memory has no room for another process."""
    _begun_at: dict[str, tuple[object, int]] = field(default_factory=dict)
    _accompanied: set[str] = field(default_factory=set)
    """Cells that shared their device with others since they were started."""
    _to_be_alone: set[str] = field(default_factory=set)
    """Cells that ran out of memory on a shared device; they are retried alone on one."""

    def run(self, stop: StopRequest) -> None:
        """Run until every cell has finished or failed, or a stop is requested; running cells then save."""
        end = math.inf if self.minutes is None else time.monotonic() + 60 * self.minutes
        waiting = [cell for cell in self.sweep.cells if self._left(cell)]
        working: dict[int, tuple[Cell, Work]] = {}
        try:
            while (waiting or working) and not stop.requested:
                if time.monotonic() > end:  # cells begun before may need a second command
                    waiting = [cell for cell in waiting if cell.name in self._begun_at]
                for number in range(len(self.slots)):
                    while number not in working and (cell := self._next(number, waiting, working)):
                        waiting.remove(cell)
                        if command := self._left(cell):  # another sweep may have finished it meanwhile
                            self._accompany(number, cell, working)
                            working[number] = (cell, self._start(cell, command, self.slots[number]))
                self._collect(working, waiting)
                self.watch({cell.name for cell, _ in working.values()})
                time.sleep(POLL_SECONDS)
            self._stop(working)
        except BaseException as error:
            # A second Ctrl-C kills the cells; after any other error they still save.
            impatient = isinstance(error, KeyboardInterrupt)
            for _, work in working.values():
                _signal(work, signal.SIGKILL if impatient else signal.SIGTERM)
            raise
        self.watch(set())

    def _left(self, cell: Cell) -> list[str] | None:
        """The next command of a cell; None if it is finished, and its weights are then dropped."""
        command = self.sweep.next_command(cell)
        if command is None and not self.keep_weights:
            self.sweep.drop_weights(cell)
        return command

    def _start(self, cell: Cell, command: list[str], slot: Slot) -> Work:
        self._begun_at[cell.name] = self._stand(cell)
        try:
            return start(command, self.sweep.run_folder(cell), slot)
        except BlockingIOError:
            del self._begun_at[cell.name]
            return Elsewhere(self.sweep.log_file(cell))

    def _stand(self, cell: Cell) -> tuple[object, int]:
        return self.sweep.next_command(cell), self.sweep.progress(cell, running=True).step

    def _collect(self, working: dict[int, tuple[Cell, Work]], waiting: list[Cell]) -> None:
        """Free the slots whose processes have ended; a cell with more to do goes first in the queue.

        A cell that ran out of memory on a shared device goes last, and its slot is given up.
        """
        for number, (cell, work) in list(working.items()):
            if (code := work.poll()) is None:
                continue
            del working[number]
            failed = False
            if code == OUT_OF_MEMORY and cell.name in self._accompanied:
                del self._begun_at[cell.name]
                self._to_be_alone.add(cell.name)
                waiting.append(cell)
                if len(self._open_slots(number)) > 1:
                    self.given_up.add(number)
            elif code not in (0, *STOPPED):
                failed = True
            elif self._left(cell):
                failed = self._begun_at.get(cell.name) == self._stand(cell)  # no progress
                if not failed:
                    waiting.insert(0, cell)
            self._note(cell, work, failed=failed)

    def _note(self, cell: Cell, work: Work, *, failed: bool) -> None:
        if isinstance(work, subprocess.Popen):  # the exit code of another sweep's process is unknown
            error = note_exit(self.sweep.run_folder(cell), work.returncode, failed=failed)
            if failed:
                self.failed[cell.name] = error

    # ── who shares a device with whom ──
    def _open_slots(self, number: int) -> list[int]:
        """The slots on the same device that are still in use."""
        same = [other for other, slot in enumerate(self.slots) if slot == self.slots[number]]
        return [other for other in same if other not in self.given_up]

    def _neighbours(self, number: int, working: dict[int, tuple[Cell, Work]]) -> set[str]:
        """The cells that work on this slot's device."""
        return {cell.name for other, (cell, _) in working.items() if self.slots[other] == self.slots[number]}

    def _next(self, number: int, waiting: list[Cell], working: dict[int, tuple[Cell, Work]]) -> Cell | None:
        """The first cell that may be started in this slot now."""
        neighbours = self._neighbours(number, working)
        if number in self.given_up or neighbours & self._to_be_alone:
            return None
        return next((c for c in waiting if not neighbours or c.name not in self._to_be_alone), None)

    def _accompany(self, number: int, cell: Cell, working: dict[int, tuple[Cell, Work]]) -> None:
        neighbours = self._neighbours(number, working)
        self._accompanied.discard(cell.name)
        if neighbours:
            self._accompanied |= {*neighbours, cell.name}

    def _stop(self, working: dict[int, tuple[Cell, Work]]) -> None:
        for _, work in working.values():
            _signal(work, signal.SIGTERM)
        while any(isinstance(work, subprocess.Popen) and work.poll() is None for _, work in working.values()):
            self.watch({cell.name for cell, work in working.values() if work.poll() is None})
            time.sleep(POLL_SECONDS)
        for cell, work in working.values():
            self._note(cell, work, failed=False)  # torchrun ends with 1 when it is asked to stop


def start(
    command: list[str], run: Path, env: Slot, before: Callable[[], object] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a command; it and its output go to the log of a cell's run. `before` is called in the child.

    The child inherits the locked log as its output, so the lock lasts until the last process that writes to
    it ends. Raises BlockingIOError if another process holds it.
    """
    with append_file(log_file(run)) as file:
        lock(file)
        exit_file(run).unlink(missing_ok=True)  # left by the previous attempt
        print(f"$ {shlex.join(command)}", file=file, flush=True)
        # In a new session, Ctrl-C in the terminal reaches only the sweep, which then stops each cell.
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS), **os.environ, **env},
            start_new_session=True,
            preexec_fn=before,
        )


def note_exit(run: Path, code: int, *, failed: bool) -> str:
    """Record how a cell's process ended; return its error message."""
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}" if code else "no progress"
    error = (log_error(log_file(run)) or ended) if failed else ""
    write_json(exit_file(run), {"code": code, "failed": failed, "error": error})
    return error


def _signal(work: Work, number: int) -> None:
    """Signal a process, which stops its children; SIGKILL goes to all of them."""
    if isinstance(work, subprocess.Popen) and work.poll() is None:
        if number == signal.SIGKILL:
            os.killpg(work.pid, number)
        else:
            work.send_signal(number)


def local_slots(gpus: int, jobs: int) -> list[Slot]:
    """Slots for processes: `jobs` on every group of `gpus` devices, or on the CPU if there is no GPU."""
    import torch  # now: `--status` does without

    count = torch.cuda.device_count()
    if count == 0:
        threads = str(max(1, (os.cpu_count() or 1) // (jobs * gpus)))
        # Threads of several processes on the same cores lose more than they gain.
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)} for _ in range(jobs)]
    if count < gpus:
        raise ValueError(f"gpus={gpus}: this machine has {count}")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",")[:count] if named else [str(number) for number in range(count)]
    groups = [",".join(devices[i : i + gpus]) for i in range(0, count - gpus + 1, gpus)]
    return [{"CUDA_VISIBLE_DEVICES": group} for _ in range(jobs) for group in groups]
