"""Real ranks under torchrun: that one found its device full is told by the exit code."""

import subprocess
import sys

import pytest

from deeploop.exits import OUT_OF_MEMORY

RANKS = """
import os, sys, time
import torch
from deeploop import cli
from deeploop.commands import train

def fake(config, **options):
    what = sys.argv[1].split(",")[int(os.environ["RANK"])]
    if what == "full":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if what == "wrong":
        raise ValueError("model.p=0")
    if what == "waits":
        time.sleep(60)  # until torchrun ends it

train.train = fake
sys.exit(cli.main(["train", "tiny"]))
"""


@pytest.fixture
def torchrun(tmp_path):
    """The command that starts two ranks, each of which does what its word says."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    launcher = ["-m", "deeploop.sweep.torchrun", "--standalone", "--nproc-per-node", "2"]
    return lambda *words: [sys.executable, *launcher, str(script), ",".join(words)]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("waits", "full"), OUT_OF_MEMORY),
        (("wrong", "waits"), 1),
    ],
)
def test_the_exit_code_tells_of_a_full_device(torchrun, words, code):
    done = subprocess.run(torchrun(*words), capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert ("deeploop train: error: the GPU's memory is full; try --device" in done.stderr) is (
        "full" in words
    )
