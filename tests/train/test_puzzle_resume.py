"""A reasoner's run, killed and resumed, equals one that never stopped, to the last bit."""

import os
import signal

from deeploop.cli import main
from deeploop.runs.folder import last_checkpoint
from deeploop.train.checkpoint import read_state
from forked import finish, start, wait_until

STEPS = 60
SETTINGS = (
    f"--optim.steps {STEPS} --optim.batch 8 --optim.warmup-steps 4 --optim.peak-lr 3e-3 "
    "--checkpoint.every 10 --data.validate-every 20 --data.test-examples 8 --model.width 16 "
    "--model.hidden 32 --halting.segments 3 --halting.exploration 0.5 --device.kind cpu --log.every 1"
)


def command(out, boards):
    where = ["--out", str(out), "--data.path", str(boards)]
    return ["train", "hrm-sudoku4-deeploop", *where, *SETTINGS.split()]


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(boards, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert main(command(whole, boards)) == 0
    process = start(lambda: main(command(out, boards)), tmp_path / "log")
    wait_until(lambda: last_checkpoint(out), process, 300)
    os.kill(process, signal.SIGKILL)
    assert finish(process) == -signal.SIGKILL
    assert read_state(last_checkpoint(out))["step"] < STEPS, "the run ended before the signal came"

    assert main(["train", "--resume", str(out)]) == 0
    one, two = last_checkpoint(whole), last_checkpoint(out)
    names = {path.name for path in one.glob("*.safetensors")}
    assert names == {f"{name}.safetensors" for name in ("model", "optimizer", "rng", "task")}
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
