"""Run the cells of a sweep as SLURM jobs, submitted through submitit; each job trains with `torchrun`.

A job may be started twice, interrupted and requeued: it reads the run folder and does what remains.
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
TIMEOUTS = 1000  # times that a job is requeued; submitit's default is 3


class CellJob:
    """A job that runs the commands its cell still needs: training, then evaluation."""

    def __init__(self, sweep: SweepFolder, cell: Cell, keep_weights: bool) -> None:
        self.sweep, self.cell, self.keep_weights = sweep, cell, keep_weights
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> str:
        run = self.sweep.run_folder(self.cell)
        previous: object = None
        while (command := self.sweep.next_command(self.cell)) is not None:
            current = (command, self.sweep.progress(self.cell, running=True).step)
            if current == previous:  # the last command made no progress
                raise RuntimeError(f"{self.cell.name}: {note_exit(run, 0, failed=True)}")
            previous = current
            try:
                process = start(command, run, {}, before=_ignore_warning)
            except BlockingIOError:
                return "another job is running this cell"
            code = self._wait(process)
            error = note_exit(run, code, failed=code not in (0, *STOPPED))
            if error:
                raise RuntimeError(f"{self.cell.name}: {error}")
        if not self.keep_weights:
            self.sweep.drop_weights(self.cell)
        return "finished"

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        # Wait in a thread: submitit's signal handler runs `checkpoint` in this one. If it interrupted a
        # `wait`, which holds Popen's lock, its `poll` would never succeed.
        self._process, waiter = process, threading.Thread(target=process.wait, daemon=True)
        waiter.start()
        while waiter.is_alive():
            time.sleep(0.2)
        return process.returncode

    def checkpoint(self) -> Any:
        """Save and requeue; submitit calls this when the time is up or the job is preempted."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            while (code := self._process.poll()) is None:
                time.sleep(0.2)
            note_exit(self.sweep.run_folder(self.cell), code, failed=False)
        return DelayedSubmission(CellJob(self.sweep, self.cell, self.keep_weights))


def _ignore_warning() -> None:
    """Ignore SLURM's warning, which goes to every process of a job: only submitit's must act on it."""
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
    """Submit the unfinished cells and return their jobs by name; `local` runs them on this machine."""
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
