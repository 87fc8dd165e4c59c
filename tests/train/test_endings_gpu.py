"""Interruptions of a run on a GPU, and ranks that share one: CUDA graphs change nothing of what comes out."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from deeploop.config.json import to_dict
from deeploop.runs.folder import last_checkpoint
from deeploop.train.distributed import open_world
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

pytestmark = pytest.mark.gpu
CLOCKS = ("seconds", "tokens_per_s", "mfu")
STEPS = 400
# Without the command line, which needs packages that a bare machine lacks.
TRAIN = """
import sys
from pathlib import Path
from deeploop.tasks import read_config
from deeploop.train.loop import train
train(read_config(Path(sys.argv[1])))
"""
# NCCL wants a GPU for each rank; gloo does not.
RANK = f"""
import os, torch.distributed as dist
os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo")
{TRAIN}
dist.destroy_process_group()
"""


@pytest.fixture
def config(make_config, tmp_path):
    """`config("name", steps=6, kind="cpu")`: a run on the GPU that a GPU has kernels for."""

    def make(name, steps=STEPS, resume=False, **device):
        return make_config(
            tmp_path / name,
            model={"width": 128, "hidden": 256, "context": 64},
            optim={"steps": steps, "batch": 32, "warmup_steps": 20},
            data={"validate_every": 40},
            checkpoint={"every": 20},
            device={"kind": "cuda", "deterministic": True, **device},
            resume=resume,
        )

    return make


def lines(config):
    """Every kind of line, less the times it took."""
    return [
        {key: value for key, value in line.items() if key not in CLOCKS} for line in read_metrics(config.out)
    ]


def weights(config):
    return (last_checkpoint(config.out) / "model.safetensors").read_bytes()


def step_reached(out):
    return max((line["step"] for line in read_metrics(out, "train")), default=0) if out.exists() else 0


def test_deterministic_runs_agree_bit_for_bit_also_after_a_kill_between_replays(config, tmp_path):
    whole, again, killed = config("whole"), config("again"), config("killed")
    assert train(whole)["ended"] == train(again)["ended"] == "finished"
    assert lines(again) == lines(whole)
    assert weights(again) == weights(whole)

    told = tmp_path / "config.json"
    told.write_text(json.dumps(to_dict(killed)))
    run = subprocess.Popen([sys.executable, "-c", TRAIN, str(told)], stdout=subprocess.DEVNULL)
    while step_reached(killed.out) < 50 and run.poll() is None:
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert 50 <= step_reached(killed.out) < STEPS
    assert train(config("killed", resume=True))["ended"] == "finished"
    assert lines(killed) == lines(whole)
    assert weights(killed) == weights(whole)


def test_a_run_goes_from_gpu_to_cpu_and_back(config, monkeypatch):
    real, stops = StepQueue.submit, [5, 9]

    def submit(queue):
        if stops and queue._run.step == stops[0] - 1:
            stops.pop(0)
            queue._stop.requested = True
        real(queue)

    whole = config("whole", steps=12, precision="fp32")
    train(whole)
    monkeypatch.setattr(StepQueue, "submit", submit)
    moved = config("moved", steps=12, precision="fp32")
    assert train(moved)["step"] == 5
    assert train(config("moved", steps=12, precision="fp32", kind="cpu", resume=True))["step"] == 9
    assert train(config("moved", steps=12, precision="fp32", resume=True))["ended"] == "finished"
    expected, got = ([line["loss"] for line in read_metrics(c.out, "train")] for c in (whole, moved))
    assert len(got) == 12
    assert got[:4] == expected[:4]
    assert got == pytest.approx(expected, rel=1e-3)  # TF32 products there, fp32 here


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
)
def test_an_fp8_run_is_resumed_bit_for_bit(config):
    """Its scales have no history, so there is nothing to keep beside what other runs do."""
    whole, cut = config("whole", steps=60, precision="fp8"), config("cut", steps=60, precision="fp8")
    train(whole)
    steps = []
    real = StepQueue.submit

    def submit(queue):
        steps.append(None)
        queue._stop.requested = len(steps) == 30
        real(queue)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepQueue, "submit", submit)
        assert train(cut)["step"] == 30
    assert train(config("cut", steps=60, precision="fp8", resume=True))["ended"] == "finished"
    assert json.loads((cut.out / "run.json").read_text())["execution"]["precision"] == "fp8"
    assert weights(cut) == weights(whole)


@pytest.fixture
def reasoner(make_puzzle_config, tmp_path):
    """`reasoner("name", "trm", steps=20)`: a run of the kernels, two micro-batches in each step."""

    def make(name, kind, steps=20, resume=False):
        return make_puzzle_config(
            tmp_path / name,
            kind,
            model={"width": 128, "heads": 2, "hidden": 256},
            optim={"steps": steps},
            data={"validate_every": 10},
            checkpoint={"every": 100},
            log={"every": 5},
            device={"kind": "cuda", "deterministic": True, "micro_batch": 4},
            resume=resume,
        )

    return make


@pytest.mark.parametrize("kind", ["hrm", "trm"])
def test_a_reasoner_is_read_back_behind_and_resumed_bit_for_bit(reasoner, kind, monkeypatch):
    whole, cut = reasoner("whole", kind), reasoner("cut", kind)
    train(whole)
    assert json.loads((whole.out / "run.json").read_text())["execution"]["lag"] == 1
    real = StepQueue.submit

    def submit(queue):
        queue._stop.requested = queue._run.step == 11
        real(queue)

    with monkeypatch.context() as patch:
        patch.setattr(StepQueue, "submit", submit)
        assert train(cut)["step"] == 13  # asked in step 12, known when step 13 is under way
    assert train(reasoner("cut", kind, resume=True))["ended"] == "finished"
    assert lines(cut) == lines(whole)
    one, two = last_checkpoint(whole.out), last_checkpoint(cut.out)
    for name in ("model", "optimizer", "task"):
        assert (one / f"{name}.safetensors").read_bytes() == (two / f"{name}.safetensors").read_bytes(), name


@pytest.mark.parametrize("kind", ["hrm", "trm"])
def test_queueing_a_step_of_a_reasoner_waits_for_events_alone(reasoner, kind):
    """Also after it was resumed: what is read from a file must not come back from the device."""
    train(reasoner("run", kind, steps=4))
    config = reasoner("run", kind, steps=20, resume=True)
    with open_world(config.device) as world:
        run = open_run(config, world)
        queue = StepQueue(run, StopRequest())
        for _ in range(4):  # compiles what must be compiled
            queue.advance()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):  # puzzles halt after three at most
                queue.advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [result.step for result in queue.settle(everything=True)] == [14]
        run.close()


def test_two_ranks_that_share_a_gpu_have_the_losses_of_one(config, tmp_path):
    one, two = config("one", steps=12, deterministic=False), config("two", steps=12, deterministic=False)
    assert train(one)["ended"] == "finished"
    told, script = tmp_path / "config.json", tmp_path / "rank.py"
    told.write_text(json.dumps(to_dict(two)))
    script.write_text(RANK)
    ranks = ["--nproc-per-node", "2", "--standalone", str(script), str(told)]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *ranks], check=True, timeout=120)
    execution = json.loads((two.out / "run.json").read_text())["execution"]
    assert execution["graph"]
    expected, got = ([line["loss"] for line in read_metrics(c.out, "train")] for c in (one, two))
    assert len(got) == 12
    assert got == pytest.approx(expected, rel=2e-3)  # sums of bf16 products in another order
