"""Recurrent depth on two gloo ranks, DDP and FSDP2, against one rank. One launch serves the whole file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deeploop.train.checkpoint import last_checkpoint
from deeploop.train.config import to_dict
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

# The order of sums differs on two ranks; nothing else may.
LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 1e-4  # of each tensor's largest entry; measured: 1.8e-5 after six steps of Adam
MODEL = {"prelude": 1, "coda": 1, "first_state": "noise", "block": "flat"}
ROUNDS = {"sample": "poisson-lognormal", "backprop": 2}
CASES = [("add", "ddp"), ("linear", "ddp"), ("linear", "fsdp"), ("gated", "fsdp"), ("gate", "fsdp")]


@pytest.fixture(scope="module")
def folder(make_config, tmp_path_factory):
    folder, jobs = tmp_path_factory.mktemp("ranks"), []
    for injection in ("add", "linear", "gated", "gate"):
        settings = {"model": MODEL | {"injection": injection}, "rounds": ROUNDS}
        if injection == "gate":  # an exit gate, which wants all rounds in the graph
            settings = {
                "model": MODEL | {"injection": "add", "exit_gate": True},
                "rounds": {"sample": "uniform"},
            }
        train(make_config(folder / injection, **settings))
        for parallel in [parallel for own, parallel in CASES if own == injection]:
            device = {"parallel": parallel, "micro_batch": 2}
            config = make_config(folder / f"{injection}-{parallel}", device=device, **settings)
            jobs.append({"do": "train", "kind": "language", "config": to_dict(config)})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    worker = Path(__file__).with_name("two_ranks_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(worker), str(folder / "jobs.json")], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("injection", "parallel"), CASES)
def test_two_ranks_take_the_same_rounds_and_reach_the_same_weights(folder, injection, parallel):
    one, two = folder / injection, folder / f"{injection}-{parallel}"
    for kind, count in (("train", 6), ("validation", 3)):
        expected, found = ([r["loss"] for r in read_metrics(path, kind)] for path in (one, two))
        assert len(found) == count
        assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
    theirs = load_file(last_checkpoint(two) / "model.safetensors")
    for name, weight in load_file(last_checkpoint(one) / "model.safetensors").items():
        apart = (theirs[name] - weight).abs().max() / weight.abs().max()
        assert apart < WEIGHT_TOLERANCE, f"{name}: {apart}"
    assert torch.isfinite(theirs["prelude.0.mlp.branch.up.weight"]).all()
