"""Real ranks under torchrun: that one found its device full is told by the exit code."""

import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from deeploop.exits import OUT_OF_MEMORY
from deeploop.sweep.torchrun import run

RANKS = """
import os, sys, time
import torch
from deeploop import cli
from deeploop.train import loop

def fake(config, **options):
    what = sys.argv[1].split(",")[int(os.environ["RANK"])]
    if what == "full":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if what == "waits":
        time.sleep(60)  # until torchrun ends it

loop.train = fake
sys.exit(cli.main(["train", "tiny"]))
"""


@pytest.fixture
def torchrun(tmp_path):
    """The command that starts two ranks, each of which does what its word says."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    launcher = ["-m", "deeploop.sweep.torchrun", "--standalone", "--nproc-per-node", "2"]
    return lambda *words: [sys.executable, *launcher, str(script), ",".join(words)]


def test_the_exit_code_tells_of_a_full_device(torchrun):
    done = subprocess.run(torchrun("waits", "full"), capture_output=True, text=True, timeout=120)
    assert done.returncode == OUT_OF_MEMORY, done.stderr
    assert "deeploop train: error: the GPU's memory is full; try --device" in done.stderr


@pytest.mark.parametrize(
    ("codes", "told"), [((2, -15), 1), ((-15, OUT_OF_MEMORY), OUT_OF_MEMORY), ((143, -15), 143)]
)
def test_any_other_error_is_torchruns_own(monkeypatch, capsys, codes, told):
    """The error that torchrun raises once its ranks have ended, with their exit codes."""

    def fail():
        ended = {rank: ProcessFailure(rank, 1000 + rank, code, "") for rank, code in enumerate(codes)}
        raise ChildFailedError("deeploop", ended)

    monkeypatch.setattr("deeploop.sweep.torchrun.main", fail)
    assert run() == told
    assert "deeploop" in capsys.readouterr().err
