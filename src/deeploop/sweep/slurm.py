"""Cells as jobs of a SLURM cluster, through submitit, with `torchrun` inside.

A job may start twice, be cut off and queued again: it looks at the run folder and does what is left.
"""

import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from deeploop.exits import STOPPED
from deeploop.extras import require
from deeploop.sweep.arguments import SlurmConfig
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import Cell
from deeploop.sweep.launch import SAVE_SECONDS, note_exit, start

if TYPE_CHECKING:
    import subprocess

WARNING_SECONDS = SAVE_SECONDS + 10  # between SLURM's warning and the end of the allocation
TIMEOUTS = 1000  # submitit queues a job again three times otherwise


class CellJob:
    """A job: runs whatever its cell still needs."""

    def __init__(self, sweep: SweepFolder, cell: Cell, keep_weights: bool) -> None:
        self.sweep, self.cell, self.keep_weights = sweep, cell, keep_weights
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> str:
        run = self.sweep.run_folder(self.cell)
        before: object = None
        while (command := self.sweep.next_command(self.cell)) is not None:
            if (stand := (command, self.sweep.progress(self.cell, running=True).step)) == before:
                raise RuntimeError(f"{self.cell.name}: {note_exit(run, 0, failed=True)}")  # no progress
            before = stand
            try:
                process = start(command, run, {}, before=_ignore_warning)
            except BlockingIOError:
                return "another job is at it"
            code = self._wait(process)
            error = note_exit(run, code, failed=code not in (0, *STOPPED))
            if error:
                raise RuntimeError(f"{self.cell.name}: {error}")
        if not self.keep_weights:
            self.sweep.drop_weights(self.cell)
        return "finished"

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        # In a thread: submitit's signal handler below must not find this one inside a wait that holds a lock.
        self._process, waiter = process, threading.Thread(target=process.wait, daemon=True)
        waiter.start()
        while waiter.is_alive():
            time.sleep(0.2)
        return process.returncode

    def checkpoint(self) -> Any:
        """Called by submitit when the time is up or the job is preempted: save, then queue again."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            while (code := self._process.poll()) is None:
                time.sleep(0.2)
            note_exit(self.sweep.run_folder(self.cell), code, failed=False)
        return DelayedSubmission(CellJob(self.sweep, self.cell, self.keep_weights))


def _ignore_warning() -> None:
    """SLURM sends its warning to every process of a job; only submitit's is to act on it."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def require_submitit() -> Any:
    return require("submitit", "slurm", "launcher=slurm")


def submit(
    sweep: SweepFolder,
    config: SlurmConfig,
    *,
    keep_weights: bool,
    cluster: Literal["slurm", "local"] = "slurm",
) -> dict[str, Any]:
    """Submits the unfinished cells, cell name → job; `local` is submitit's executor on this machine."""
    submitit = require_submitit()
    cells = [cell for cell in sweep.cells if sweep.next_command(cell) is not None]
    try:
        executor = submitit.AutoExecutor(
            folder=sweep.out / "slurm", cluster=cluster, slurm_max_num_timeout=TIMEOUTS
        )
    except RuntimeError as error:  # no sbatch or srun
        raise ValueError(f"launcher=slurm: {error}") from None
    executor.update_parameters(
        name=f"deeploop-{sweep.grid.name}",
        nodes=1,
        tasks_per_node=1,
        gpus_per_node=sweep.gpus,
        cpus_per_task=sweep.gpus * config.cpus,
        timeout_min=round(config.hours * 60),
        slurm_array_parallelism=config.at_once,
        slurm_signal_delay_s=WARNING_SECONDS,
        **({"slurm_partition": config.partition} if config.partition else {}),
        **({"slurm_account": config.account} if config.account else {}),
    )
    if not cells:
        return {}
    with executor.batch():
        return {cell.name: executor.submit(CellJob(sweep, cell, keep_weights)) for cell in cells}
