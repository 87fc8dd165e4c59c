"""Cells as submitit jobs, on submitit's stand-in for a cluster: processes of this machine."""

import signal
import sys

import pytest

from deeploop.sweep import slurm
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import Grid, along
from deeploop.train.metrics import read_metrics

submitit = pytest.importorskip("submitit")


@pytest.fixture
def sweep(tmp_path, corpus):
    settings = {
        "model.width": 32,
        "model.hidden": 64,
        "model.context": 32,
        "data.path": str(corpus),
        "data.validation_sequences": 16,
        "optim.steps": 4,
        "optim.batch": 8,
        "device.kind": "cpu",
    }
    grid = Grid("own", "tiny", along("seed", [0]), settings)
    folder = SweepFolder(tmp_path / "out", grid, grid.cells(), torchrun=True)
    folder.write()
    return folder


def test_a_job_trains_its_cell_under_torchrun(sweep):
    config = slurm.SlurmConfig(hours=0.1, cpus=1)
    jobs = slurm.submit(sweep, config, keep_weights=False, cluster="local")
    assert {name: job.result() for name, job in jobs.items()} == {"seed0": "finished"}
    (cell,) = sweep.cells
    assert read_metrics(sweep.run_folder(cell), "validation")[-1]["step"] == 4
    assert not (sweep.run_folder(cell) / "checkpoints").exists()
    assert "deeploop.sweep.torchrun --standalone --nproc-per-node 1" in sweep.log_file(cell).read_text()
    assert slurm.submit(sweep, config, keep_weights=False, cluster="local") == {}


def with_command(sweep, *lines):
    """The sweep with one shell line after another in place of training."""
    commands = iter([["sh", "-c", line] for line in lines])
    sweep.next_command = lambda cell: next(commands, None)
    return sweep


def test_a_failed_job_says_why(sweep):
    job = slurm.CellJob(
        with_command(sweep, "echo deeploop train: error: model.p=0; exit 2"), sweep.cells[0], True
    )
    with pytest.raises(RuntimeError, match=r"seed0: model\.p=0"):
        job()


def test_a_warned_job_saves_and_is_queued_again(sweep):
    """SLURM's warning goes to all processes; only submitit's acts on it, and asks training to save."""
    wait = "trap 'echo saved; exit 143' TERM; kill -USR2 $$; echo ready; while :; do sleep 0.05; done"
    job = slurm.CellJob(with_command(sweep, wait), sweep.cells[0], True)
    log = sweep.log_file(sweep.cells[0])

    def warn(number, frame):  # what submitit's own handler does
        job.again = job.checkpoint()

    signal.signal(signal.SIGALRM, warn)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.6)
        job()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert log.read_text().splitlines()[1:] == ["ready", "saved"]
    assert isinstance(job.again.function, slurm.CellJob)
    assert job.again.function.cell == sweep.cells[0]


def test_a_job_that_is_warned_before_it_began_is_queued_again(sweep):
    again = slurm.CellJob(sweep, sweep.cells[0], True).checkpoint()
    assert again.function.cell == sweep.cells[0]


def test_a_job_may_run_out_of_time_often(sweep, monkeypatch):
    made = {}

    class Executor:
        def __init__(self, **options):
            made.update(options)
            raise RuntimeError("no cluster")

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    with pytest.raises(ValueError, match="no cluster"):
        slurm.submit(sweep, slurm.SlurmConfig(), keep_weights=True)
    assert made["slurm_max_num_timeout"] >= 1000


def test_without_a_cluster_or_without_submitit_one_line_says_so(sweep, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="launcher=slurm: "):
        slurm.submit(sweep, slurm.SlurmConfig(), keep_weights=True)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r'pip install -c constraints.txt -e "\.\[slurm\]"'):
        slurm.submit(sweep, slurm.SlurmConfig(), keep_weights=True)


def test_a_job_whose_command_brings_nothing_further_fails(sweep):
    """Else it would be started again for as long as the allocation lasts."""
    sweep.next_command = lambda cell: ["true"]
    with pytest.raises(RuntimeError, match="seed0: no progress"):
        slurm.CellJob(sweep, sweep.cells[0], True)()
    assert sweep.log_file(sweep.cells[0]).read_text().count("$ true") == 1
