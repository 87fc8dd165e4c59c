"""Sweeps with real processes: killed, stopped, started again; a cell that fails; what is refused."""

import fcntl
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from deeploop import files
from deeploop.cli import main
from deeploop.exits import OUT_OF_MEMORY
from deeploop.files import is_locked
from deeploop.paper.grids import SCALES, grids
from deeploop.report.runs import read_run
from deeploop.runs.endings import exit_file
from deeploop.runs.folder import last_checkpoint
from deeploop.sweep import board, launch
from deeploop.sweep import run as sweep
from deeploop.sweep.arguments import SweepArgs
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import Grid, along, named_grid, read_grid
from deeploop.tasks import read_config
from deeploop.train.metrics import read_metrics
from run_folders import write_run, write_sweep

SETTINGS = {
    "model.width": 32,
    "model.hidden": 64,
    "model.context": 32,
    "data.validation_sequences": 16,
    "data.validate_every": 50,
    "optim.batch": 8,
    "optim.warmup_steps": 4,
    "checkpoint.every": 10,
    "device.kind": "cpu",
    "log.every": 1,
}
KINDS = {
    "short": {"optim.steps": 4},
    "long": {"optim.steps": 100},
    "other": {"optim.steps": 4, "model.rule": "prenorm"},
}


@pytest.fixture
def grid_file(tmp_path, corpus):
    def make(**kinds):
        path = tmp_path / "grid.json"
        settings = {**SETTINGS, "data.path": str(corpus)}
        path.write_text(json.dumps({"recipe": "tiny", "settings": settings, "axes": {"kind": kinds}}))
        return path

    return make


def begin(path, out, *more):
    """The sweep as a process of its own, forked so that torch is not imported once more."""
    words = ["sweep", str(path), "--out", str(out), "--jobs", "2", *more]
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(main(words)))
    process.start()
    return process


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def steps(run, kind="train"):
    return [record["step"] for record in read_metrics(run, kind)]


def processes_of(run):
    """Ids of the processes that have this run folder on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run).encode() in words and b"train" in words:
            found.append(int(path.parent.name))
    return found


def starts(out, name):
    return (out / f"{name}.log").read_text().count("$ ")


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc")
def test_killed_and_begun_again_a_sweep_repeats_no_cell_and_loses_none(
    grid_file, tmp_path, monkeypatch, capfd
):
    """The long cell really trains; the others leave what a finished run would."""
    path, out = grid_file(**KINDS), tmp_path / "out"
    short, long = out / "short", out / "long"
    needed = SweepFolder.next_command

    def command(folder, cell):
        finish = ["sh", "-c", FINISH.format(run=folder.run_folder(cell))]
        real = needed(folder, cell)
        return real if cell.name == "long" else real and finish

    monkeypatch.setattr(SweepFolder, "next_command", command)
    first = begin(path, out)
    until(
        lambda: 4 in steps(short, "validation") and len(steps(long)) > 12 and not is_locked(out / "short.log")
    )
    first.kill()  # the cells of a killed sweep go on …
    first.join()
    for number in processes_of(long):  # … but this one dies with it, between two checkpoints
        os.kill(number, signal.SIGKILL)
    finished = (short / "metrics.jsonl").read_bytes(), (short / "metrics.jsonl").stat().st_mtime_ns
    until(lambda: not is_locked(out / "long.log"))
    saved = int(last_checkpoint(long).name.removeprefix("step-"))
    assert 10 <= saved < 100

    words = ["sweep", str(path), "--out", str(out), "--jobs", "2"]
    assert main(words) == 0
    assert "3 of 3 cells finished" in capfd.readouterr().out
    assert finished == ((short / "metrics.jsonl").read_bytes(), (short / "metrics.jsonl").stat().st_mtime_ns)
    assert [starts(out, name) for name in ("short", "long", "other")] == [1, 2, 1]
    assert steps(long) == list(range(1, 101))
    assert steps(long, "validation") == [0, 50, 100]
    assert set(json.loads((out / "sweep.json").read_text())["cells"]) == set(KINDS)

    assert main([*words, "--status"]) == 0
    assert f"{read_metrics(long, 'validation')[-1]['loss']:.4f}" in capfd.readouterr().out


def test_a_cell_that_fails_does_not_keep_the_others_from_their_end(grid_file, tmp_path, monkeypatch, capfd):
    path, out = grid_file(short={"seed": 0}, broken={"seed": 1}), tmp_path / "out"
    code = main(["train", "tiny", "--model.rounds", "0"])  # a real line, without a process
    said = f"echo {shlex.quote(capfd.readouterr().err.strip())} >&2; exit {code}"
    asked = SweepFolder.next_command

    def command(folder, cell):
        line = said if cell.name == "broken" else FINISH.format(run=folder.run_folder(cell))
        return asked(folder, cell) and ["sh", "-c", line]

    monkeypatch.setattr(SweepFolder, "next_command", command)
    words = ["sweep", str(path), "--out", str(out), "--set", "optim.steps=4"]
    assert main(words) == 1
    captured = capfd.readouterr()
    assert "failed: broken: model.rounds=0: must be at least 1" in captured.err
    assert "1 of 2 cells finished, 1 failed" in captured.out
    assert main([*words, "--status"]) == 0
    assert re.search(r"broken\s+failed", capfd.readouterr().out)


def fake(folder, steps_done=4, checkpoint=True, verdict="escaped"):
    """A run folder as a finished training leaves it."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    record = {"kind": "validation", "step": steps_done, "loss": 1.0, "floor": 2.0, "similarity": 0.1}
    (folder / "metrics.jsonl").write_text(json.dumps({**record, "verdict": verdict}) + "\n")
    if checkpoint:
        (folder / "checkpoints" / f"step-{steps_done:08d}").mkdir(parents=True)


@pytest.fixture
def small(tmp_path):
    """A sweep of one cell, and the cell."""

    def make(evaluate=False, **settings):
        axes = along("seed", [0])
        grid = Grid(
            "own", "tiny", axes, {"optim.steps": 4, "optim.warmup_steps": 2, **settings}, evaluate=evaluate
        )
        folder = SweepFolder(tmp_path, grid, grid.cells())
        return folder, folder.cells[0]

    return make


def test_submitit_is_missed_before_there_is_a_folder(grid_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)
    path, out = grid_file(short=KINDS["short"]), tmp_path / "out"
    assert main(["sweep", str(path), "--out", str(out), "--launcher", "slurm"]) == 2
    assert 'pip install -c constraints.txt -e ".[slurm]"' in capsys.readouterr().err
    assert not out.exists()


def test_what_a_cell_still_needs(small):
    folder, cell = small()
    run = folder.run_folder(cell)
    assert folder.progress(cell).state == "absent"
    file = str(folder.config_file(cell))
    assert folder.next_command(cell)[3:] == ["train", "--config", file, "--out", str(run), "--resume"]
    fake(run, steps_done=3)
    assert folder.progress(cell).state == "started"
    assert "train" in folder.next_command(cell)
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints" / "step-00000003").rename(run / "checkpoints" / "step-00000004")
    (run / "metrics.jsonl").write_text('{"kind": "validation", "step": 4}\n')
    assert folder.next_command(cell) is None
    assert folder.progress(cell).state == "finished"
    (run / "checkpoints" / "step-00000004").rename(run / "checkpoints" / ".step-00000004.part")
    assert folder.next_command(cell) is not None  # killed while it saved its last weights
    shutil.rmtree(run / "checkpoints")
    assert folder.next_command(cell) is not None  # killed before it saved any
    assert folder.progress(cell).state == "started"
    folder.drop_weights(cell)
    assert not (run / "checkpoints").exists()
    assert folder.next_command(cell) is None  # weights that nobody wants are not made again


def test_a_validation_long_ago_is_the_one_that_runs_lists(small):
    folder, cell = small()
    run = folder.run_folder(cell)
    fake(run)
    (run / "config.json").write_text("{}")
    with (run / "metrics.jsonl").open("w") as file:
        file.write('{"kind": "validation", "step": 0, "loss": 5.5}\n')
        file.writelines(f'{{"kind": "train", "step": {step}, "loss": 4.0}}\n' for step in range(1, 1000))
    progress = folder.progress(cell)
    assert (progress.step, progress.validation) == (999, 5.5)
    assert read_run(run).validation["loss"] == 5.5


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", grids())
def test_the_file_of_a_cell_reads_to_its_config(name, scale, tmp_path):
    grid = named_grid(name, scale)
    last = {cell.recipe: cell for cell in grid.cells()}  # of each recipe
    folder = SweepFolder(tmp_path, grid, list(last.values()))
    folder.write()
    for cell in folder.cells:
        assert read_config(folder.config_file(cell)) == cell.config()


def test_odd_kinds_of_values_survive_the_file_of_a_cell(small):
    settings = {"model.tied_head": False, "optim.betas": [0.8, 0.9], "diagnose.sublayers": ["blocks.0.mlp"]}
    folder, cell = small(**settings, **{"init_from": None, "guard.stop": True, "optim.eps": 1e-12})
    folder.write()
    config = read_config(folder.config_file(cell))
    assert config == cell.config()
    assert (config.model.tied_head, config.optim.betas, config.guard.stop) == (False, (0.8, 0.9), True)


def test_a_collapsed_cell_is_finished_only_if_its_guard_stops_it(small):
    folder, cell = small()
    fake(folder.run_folder(cell), steps_done=3, verdict="collapsed")
    assert folder.next_command(cell) is not None
    guarded, cell = small(**{"guard.stop": True})
    assert guarded.next_command(cell) is None
    assert guarded.progress(cell).state == "collapsed"
    assert board.summary({cell.name: guarded.progress(cell)}, 1) == "1 of 1 cells finished"
    warming, cell = small(**{"guard.stop": True, "optim.warmup_steps": 4})
    assert warming.next_command(cell) is not None


def test_a_scored_cell_is_trained_then_evaluated(small):
    folder, cell = small(evaluate=True)
    run = folder.run_folder(cell)
    folder.tasks = Path("tasks")
    assert "train" in folder.next_command(cell)
    fake(run)
    assert folder.next_command(cell)[3:] == ["eval", str(run), "--data", "tasks"]
    assert folder.progress(cell).state == "started"
    folder.drop_weights(cell)
    assert "train" in folder.next_command(cell)  # there is nothing left to score
    (run / "eval.json").write_text("{}")
    assert folder.next_command(cell) is None


class Stop:
    requested = False


RECORD = '{{"kind": "validation", "step": 4}}'
FINISH = f"mkdir -p {{run}}/checkpoints/step-00000004; echo '{RECORD}' > {{run}}/metrics.jsonl"


class Fakes(SweepFolder):
    """Cells over seeds whose processes run a line of shell in place of what they still need."""

    def __init__(self, out, line, cells=1):
        grid = Grid("own", "tiny", along("seed", range(cells)), {"optim.steps": 4, "optim.warmup_steps": 2})
        super().__init__(out, grid, grid.cells())
        self.line = line

    def next_command(self, cell):
        line = self.line if isinstance(self.line, str) else self.line(cell.name)
        command = super().next_command(cell)
        return command and ["sh", "-c", line.format(run=self.run_folder(cell), out=self.out)]

    def run(self, slots=({},), **options):
        local = launch.Local(
            self, [*slots], options.pop("keep_weights", True), lambda running: None, **options
        )
        local.run(Stop())
        return local

    def states(self):
        return [self.progress(cell).state for cell in self.cells]


@pytest.fixture(autouse=True)
def polls(monkeypatch):
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)


@pytest.fixture
def typed(monkeypatch):
    """The words that a record names as the command."""
    return lambda *words: monkeypatch.setattr(sys, "argv", ["deeploop", "sweep", *words])


def test_after_its_minutes_a_sweep_starts_nothing_but_finishes_what_it_began(tmp_path):
    scored = tmp_path / "scored"

    class Scored(Fakes):
        def next_command(self, cell):
            return super().next_command(cell) or (None if scored.exists() else ["touch", str(scored)])

    folder = Scored(tmp_path, "sleep 0.2;" + FINISH, cells=2)
    assert folder.run(minutes=0.1 / 60).failed == {}
    assert scored.exists()
    assert not folder.log_file(folder.cells[1]).exists()
    folder.run()
    assert folder.states() == ["finished"] * 2


def test_minutes_are_for_this_machine():
    with pytest.raises(ValueError, match="minutes: is for --launcher local"):
        SweepArgs(name="p-sweep", minutes=5, launcher="slurm")


def test_weights_are_dropped_when_the_cell_is_finished(tmp_path):
    folder = Fakes(tmp_path, FINISH)
    assert folder.run(keep_weights=False).failed == {}
    assert folder.states() == ["finished"]
    assert not (folder.run_folder(folder.cells[0]) / "checkpoints").exists()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("echo deeploop train: error: model.p=0 >&2; exit 2", "model.p=0"),
        ("echo Traceback; exit 1", "exit code 1"),
        ("kill -9 $$", "killed by signal 9"),
        ("true", "no progress"),  # else it would be started again for ever
    ],
)
def test_why_a_cell_failed_is_kept(tmp_path, line, error):
    folder = Fakes(tmp_path, line)
    run = tmp_path / "seed0"
    assert folder.run().failed == {"seed0": error}
    assert json.loads(exit_file(run).read_text())["error"] == error
    assert folder.states() == [read_run(run).state] == ["failed"]


HALF = 'mkdir -p {run}; echo \'{{"kind": "train", "step": 2}}\' > {run}/metrics.jsonl'


@pytest.mark.parametrize("code", [129, 130, 143])
def test_a_cell_that_somebody_told_to_stop_goes_on(tmp_path, code):
    folder = Fakes(tmp_path, f"[ -e {{run}} ] || {{{{ {HALF}; exit {code}; }}}}; {FINISH}")
    assert folder.run().failed == {}
    assert folder.states() == ["finished"]


def test_a_cell_fails_by_its_exit_code_whatever_it_prints(tmp_path):
    folder, run = (
        Fakes(tmp_path, FINISH + "; echo deeploop train: error: only a word; exit 0"),
        tmp_path / "seed0",
    )
    assert folder.run().failed == {}
    assert folder.states() == ["finished"]
    (run / "metrics.jsonl").unlink()
    assert folder.states() == ["absent"]  # it printed the same
    launch.start(["true"], run, {}).wait()
    assert not exit_file(run).exists()  # it was the attempt's before


# Takes one of the device's places in memory, and holds it until two were turned away.
CROWDED = (
    "here={out}/device$CUDA_VISIBLE_DEVICES; mkdir -p $here;"
    "for place in {places}; do mkdir $here/place$place 2>/dev/null && mine=$place && break; done;"
    "[ $mine ] || {{ touch $here/full$$; exit {full}; }};"
    "for wait in $(seq 500); do [ $(ls {out}/device* | grep -c full) -ge 2 ] && break; sleep 0.02; done;"
    "sleep 0.1; rmdir $here/place$mine;"
)


def crowd(out, cells, room):
    """Cells, of which each device has room for `room`."""
    places = " ".join(map(str, range(room)))
    return Fakes(
        out, CROWDED.replace("{places}", places).replace("{full}", str(OUT_OF_MEMORY)) + FINISH, cells
    )


@pytest.mark.parametrize(("room", "slots", "failed"), [(2, 4, 0), (1, 3, 0), (0, 3, 6)])
def test_a_full_card_takes_fewer_cells_at_a_time(tmp_path, room, slots, failed):
    folder = crowd(tmp_path, 6, room)
    local = folder.run([{}] * slots)
    assert len(local.given_up) == 2
    assert len(local.failed) == failed
    assert folder.states().count("finished") == 6 - failed


def test_one_full_card_is_not_another(tmp_path):
    local = crowd(tmp_path, 7, 1).run([{"CUDA_VISIBLE_DEVICES": device} for device in "0010"])
    assert len(local.given_up) == 2
    assert 2 not in local.given_up
    assert local.failed == {}


def test_a_cell_that_is_too_large_for_the_card_costs_the_others_one_slot(tmp_path):
    large = f'echo "deeploop train: error: too large"; echo +++ ranks; exit {OUT_OF_MEMORY}'
    folder = Fakes(tmp_path, lambda name: large if name == "seed1" else "sleep 0.1;" + FINISH, cells=9)
    local = folder.run([{}] * 3)
    assert local.failed == {"seed1": "too large"}
    assert len(local.given_up) == 1
    assert folder.log_file(folder.cells[1]).read_text().count("\n$ ") == 1  # tried again once, alone


def test_after_its_minutes_a_cell_that_found_no_room_is_left(tmp_path):
    folder = crowd(tmp_path, 3, 1)
    local = folder.run([{}] * 3, minutes=0.05 / 60)  # begins all three; time is over when there is room again
    assert local.failed == {}
    assert sorted(folder.states()) == ["absent", "absent", "finished"]  # having found no room is no failure


def test_asked_to_stop_a_sweep_asks_its_cells_and_says_how_to_go_on(grid_file, tmp_path, monkeypatch, capfd):
    saves = "trap 'echo saved; exit 1' TERM; echo ready; while :; do sleep 0.05; done"
    monkeypatch.setattr(SweepFolder, "next_command", lambda self, cell: ["sh", "-c", saves])
    out = tmp_path / "out"
    process = begin(grid_file(short={"seed": 0}, long={"seed": 1}, other={"seed": 2}), out)
    logs = [out / "short.log", out / "long.log"]
    until(lambda: all(log.exists() and "\nready" in log.read_text() for log in logs))
    process.terminate()
    process.join()
    assert process.exitcode == 130
    assert all(log.read_text().endswith("ready\nsaved\n") for log in logs)
    for name in ("short", "long"):  # torchrun ends with 1 too when it is asked to stop
        assert json.loads(exit_file(out / name).read_text()) == {"code": 1, "failed": False, "error": ""}
    assert not (out / "other.log").exists()
    assert "stopped; continue with the same command: deeploop" in capfd.readouterr().err


def test_a_process_that_outlived_its_sweep_is_waited_for(tmp_path, monkeypatch):
    run, log = tmp_path / "seed0", tmp_path / "seed0.log"
    process = launch.start(["sh", "-c", "sleep 0.5;" + FINISH.format(run=run)], run, {})
    assert is_locked(log)
    assert read_run(run).state == "running"
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    with pytest.raises(BlockingIOError):
        launch.start(["true"], run, {})
    assert Fakes(tmp_path, "echo must not be started").run().failed == {}
    process.wait()
    assert "must not" not in log.read_text()
    assert not is_locked(log)


def test_a_cell_that_others_finish_while_it_waits_is_left_alone(tmp_path):
    both = ";".join(FINISH.format(run=tmp_path / name) for name in ("seed0", "seed1"))
    folder = Fakes(tmp_path, both.replace("{", "{{").replace("}", "}}"), cells=2)  # the first one does both
    assert folder.run(keep_weights=False).failed == {}
    assert not (tmp_path / "seed1.log").exists()
    assert not (tmp_path / "seed1" / "checkpoints").exists()


def test_one_who_only_looks_does_not_keep_a_process_from_starting(tmp_path):
    log = tmp_path / "cell.log"
    with log.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as is_locked does
        threading.Timer(0.2, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        assert launch.start(["true"], tmp_path / "cell", {}).wait() == 0


def test_torchrun_gives_its_ranks_time_to_save(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    launch.start(["sh", "-c", "echo $TORCH_ELASTIC_SHUTDOWN_TIMEOUT"], tmp_path / "cell", {}).wait()
    assert (tmp_path / "cell.log").read_text().splitlines()[-1] == str(launch.SAVE_SECONDS)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    name = "CUDA_VISIBLE_DEVICES"
    assert launch.local_slots(gpus=2, jobs=2) == [{name: "3,4"}, {name: "5,6"}, {name: "3,4"}, {name: "5,6"}]
    monkeypatch.delenv(name)
    assert [slot[name] for slot in launch.local_slots(gpus=1, jobs=1)] == ["0", "1", "2", "3", "4"]
    with pytest.raises(ValueError, match="gpus=8: this machine has 5"):
        launch.local_slots(gpus=8, jobs=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert len(launch.local_slots(gpus=1, jobs=3)) == 3


def test_several_gpus_a_cell_go_through_torchrun(small):
    folder, cell = small()
    four = SweepFolder(folder.out, folder.grid, folder.cells, gpus=4)
    assert "deeploop.sweep.torchrun" in four.next_command(cell)
    assert four.next_command(cell)[3:8] == ["--standalone", "--nproc-per-node", "4", "-m", "deeploop"]


def test_a_changed_cell_is_refused_and_a_larger_grid_is_not(small, typed):
    folder, _ = small()
    typed("own.toml", "--jobs", "2")
    folder.write()
    changed, _ = small(**{"optim.batch": 4})
    with pytest.raises(ValueError, match=r"its cell seed0 has optim\.batch=the recipe's, not 4; ") as refused:
        changed.write()
    assert str(refused.value).endswith(
        "repeat its last start (`deeploop sweep own.toml --jobs 2`) or choose another --out"
    )
    other, _ = small(**{"data.path": "other"})  # cells of two corpora do not compare
    with pytest.raises(ValueError, match=r"data\.path=the recipe's, not other; repeat"):
        other.write()
    narrower, _ = small(**{"device.precision": "fp8"})  # a cell would be begun in one and end in the other
    with pytest.raises(ValueError, match=r"device\.precision=the recipe's, not fp8; repeat"):
        narrower.write()
    small(**{"device.micro_batch": 2})[0].write()  # of no consequence
    more = Grid("own", "tiny", along("seed", [0, 1]), folder.grid.settings)
    SweepFolder(folder.out, more, more.cells()[1:]).write()  # a part that has no cell of the one before
    folder.write()  # the smaller one again: what was added stays
    assert list(json.loads((folder.out / "sweep.json").read_text())["cells"]) == ["seed0", "seed1"]


def test_the_cells_on_a_device_are_the_most_of_any_start(small):
    folder, _ = small()
    for jobs, kept in ((1, 1), (4, 4), (1, 4)):  # a cell of the second start had neighbours
        folder.write(jobs)
        assert json.loads((folder.out / "sweep.json").read_text())["jobs"] == kept


@pytest.mark.parametrize(
    "foreign",
    [
        Grid("own", "tiny", along("model.rule", ["deeploop:p=0.5"])),  # another file of this name
        Grid("foreign", "tiny", along("seed", [0]), {"optim.steps": 4, "optim.warmup_steps": 2}),
    ],
    ids=["same name", "same cells"],
)
def test_another_sweeps_folder_is_refused(small, foreign, typed):
    typed("there/own.toml")
    folder, _ = small()
    folder.write()
    other = SweepFolder(folder.out, foreign, foreign.cells())
    said = (
        r"holds another sweep, own \(own\), last started with `deeploop sweep there/own.toml`; choose another"
    )
    for act in (other.write, lambda: sweep.status(other)):
        with pytest.raises(ValueError, match=said):
            act()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tables", "sweep 'tables': unknown; choose one of table1, p-sweep"),
        ("table1 --jobs 0", "jobs=0: must be at least 1"),
        ("table1 --scale huge", "huge"),
        ("table1 --set optim.steps", "set=optim.steps: must be field=value"),
        ("table1 --set optim.step=3 --dry-run", "optim.step: not a field"),
        ("table1 --utilization 2", "utilization=2.0"),
        ("table1 --scale laptop --data nowhere", "data.path=nowhere: no such folder"),
        ("no.toml", "no.toml: can't be read"),
        ("table1 --status --out nowhere", "out=nowhere: holds no sweep"),
        ("table1 --slurm.hours 0", "slurm.hours=0"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_cells_take_the_vocabulary_of_their_corpus_unless_the_grid_settles_it(corpus):
    """Check as `deeploop train` does; a grid of a recipe in other tokens would fail cell by cell."""
    own = {"data.path": str(corpus)}
    grid = Grid("own", "gpt2-small", along("seed", (0, 1)), own)
    for cell in map(sweep.cell_with_vocabulary, grid.cells()):
        assert cell.config().model.vocabulary == 257
    settled, absent = {**own, "model.vocabulary": 300}, {"data.path": "absent"}
    for settings in (settled, absent):
        cell = Grid("own", "gpt2-small", along("seed", (0,)), settings).cells()[0]
        assert sweep.cell_with_vocabulary(cell) is cell


def test_status_shows_what_was_started_whatever_is_asked_now(small, typed):
    typed("own.toml", "--set", "optim.steps=3")
    begun, cell = small(**{"optim.steps": 3})
    begun.write()
    fake(begun.run_folder(cell), steps_done=3)
    asked, _ = small()
    assert "1 of 1 cells finished" in sweep.status(asked)
    assert sweep.status(asked).endswith("with: deeploop sweep own.toml --set optim.steps=3")
    more = Grid("own", "tiny", along("seed", [0, 1]), {"optim.steps": 4, "optim.warmup_steps": 2})
    assert "1 of 1 cells" in sweep.status(SweepFolder(begun.out, more, more.cells()))


@pytest.mark.parametrize("first", ["table1", "downstream"])
def test_two_sweeps_that_share_a_folder_each_have_their_status(tmp_path, first):
    cells = {"table1": 16, "downstream": 14}
    both = {name: named_grid(name, "paper") for name in cells}
    folders = {name: SweepFolder(tmp_path, grid, grid.cells()) for name, grid in both.items()}
    second = next(name for name in cells if name != first)
    for name in (first, second):
        folders[name].write()
    for name, count in cells.items():
        assert f"0 of {count} cells finished" in sweep.status(folders[name])


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_sweep_is_shown_and_its_folder_left_as_it_is(grid_file, tmp_path, capsys):
    path, out = grid_file(short=KINDS["short"]), tmp_path / "out"
    grid = read_grid(path)
    SweepFolder(out, grid, grid.cells()).write()
    fake(out / "short")
    record = json.loads((out / "sweep.json").read_text())
    (out / "sweep.json").write_text(json.dumps({**record, "written": "2026-11-15T21:49:00+00:00"}))
    before = contents(out)

    words = ["sweep", str(path), "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "all 1 cells were finished already (last started on 2026-11-15); nothing was trained" in printed
    assert "1 of 1 cells finished" in printed
    assert contents(out) == before

    assert main([*words, "--no-keep-weights"]) == 0  # still does what it says
    assert not (out / "short" / "checkpoints").exists()
    assert (out / "sweep.json").read_bytes() == before[out / "sweep.json"]

    path.write_text(json.dumps(json.loads(path.read_text()) | {"compare_at": 2}))
    assert main(words) == 0
    assert json.loads((out / "sweep.json").read_text())["compare_at"] == 2  # where reports look for it


@pytest.mark.parametrize("compare_at", [5, 0])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_step_that_no_run_reaches_is_refused_before_anything_starts(
    grid_file, tmp_path, capsys, compare_at, more
):
    path, out = grid_file(long=KINDS["long"], short=KINDS["short"]), tmp_path / "out"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"compare_at": compare_at}))
    assert main(["sweep", str(path), "--out", str(out), *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"compare_at={compare_at}: must be a step of every run, and " in error
    assert not out.exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 9}', '{"format": 1, "sweep": "own", "scale": "own", "cells": {"a": 3}}']
)
def test_a_damaged_record_is_one_line(small, text):
    folder, _ = small()
    (folder.out / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match=r"sweep\.json: not a sweep's .*; move it away, or"):
        folder.write()


def test_set_takes_values_as_they_are_written():
    args = sweep.SweepArgs(
        name="table1", set=("optim.peak-lr=6e-4", "model.tied_head=False", "init_from=None")
    )
    assert args.overrides() == {"optim.peak_lr": 6e-4, "model.tied_head": False, "init_from": None}


@pytest.mark.parametrize(
    ("recipe", "folder", "words"),
    [
        ("tiny", "mine", "text FILE…"),
        ("tiny", "stdlib", "stdlib"),
        ("chat", "mine", "chat FILE"),
        ("hrm-sudoku4", "mine", "pairs FILE"),
    ],
)
def test_missing_data_is_named_with_the_command_that_makes_it(recipe, folder, words, tmp_path, capsys):
    data = tmp_path / folder
    grid = {"recipe": recipe, "settings": {"data.path": str(data)}, "axes": {"seed": {"0": {"seed": 0}}}}
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    assert main(["sweep", str(tmp_path / "grid.json"), "--out", str(tmp_path / "out")]) == 2
    assert f"make it with `deeploop prepare {words} --out {data}`" in capsys.readouterr().err


def test_a_second_sweep_is_kept_out(tmp_path, grid_file, capsys):
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["sweep", str(grid_file(short=KINDS["short"])), "--out", str(out)]) == 2
    assert "another run is writing there" in capsys.readouterr().err


def test_the_seeds_of_a_sweep_end_in_one_row(grid_file, tmp_path, capsys):
    path, out = grid_file(a={"seed": 0}, b={"seed": 1}, c={"seed": 0, "optim.steps": 80}), tmp_path / "out"
    cells = {name: {"kind": name} for name in "abc"}
    for name, seed, fields in (("a", 0, {"loss": 2.0}), ("b", 1, {"loss": 2.2}), ("c", 0, {"steps": 80})):
        write_run(out / name, seed=seed, **fields)
    write_sweep(out, cells, sweep="grid")
    assert main(["sweep", str(path), "--out", str(out), "--status"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "±" in line]
    assert "2.1000 ± 0.1414" in row


class Terminal:
    """Keeps what a terminal would show: the screen's lines after cursor movements."""

    def __init__(self):
        self.lines = []

    def isatty(self):
        return True

    def flush(self): ...

    def write(self, text):
        if text.startswith("\x1b["):
            up, text = text[2:].split("F", 1)
            del self.lines[-int(up) :]
        self.lines += text.replace("\x1b[K", "").removesuffix("\x1b[J").splitlines()


def test_the_table_is_redrawn_in_place(small):
    folder, cell = small()
    screen = Terminal()
    shown = board.LiveTable(folder, 1, screen)
    shown.show({cell.name})
    assert [line.split()[:3] for line in screen.lines[2:3]] == [["seed0", "running", "0/4"]]
    fake(folder.run_folder(cell))
    shown.show(set())
    assert len(screen.lines) == 4
    assert screen.lines[2].split()[:7] == ["seed0", "finished", "0/4", "–", "1.0000", "0.10", "escaped"]
    assert screen.lines[3] == "1 of 1 cells finished"


def test_without_a_terminal_the_header_comes_once_before_the_first_line(small):
    folder, cell = small()
    stream = io.StringIO()
    shown = board.LiveTable(folder, 1, stream)
    shown.show({cell.name})
    fake(folder.run_folder(cell))
    shown.show(set())
    header, _, *lines = stream.getvalue().splitlines()
    assert header.split() == list(board.HEADER[:-1])
    assert [line.split()[:2] for line in lines] == [["seed0", "running"], ["seed0", "finished"]]
    assert lines[1].index("1.0000") + len("1.0000") == header.index("validation") + len("validation")


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (700, "12 min"), (12_000, "3 h 20 min"), (360_000, "4 days 4 h")]
)
def test_durations(seconds, text):
    assert board.duration(seconds) == text
