"""The execution is chosen once: what GPU, config, model and optimizer allow, and why not more."""

import json
from types import SimpleNamespace

import pytest
import torch

from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn import fused
from deeploop.train import execution
from deeploop.train.distributed import DeviceConfig, World
from deeploop.train.execution import choose_execution
from deeploop.train.loop import train
from deeploop.train.optim import OptimConfig, make_optimizer

SHAPE = {"blocks": 2, "rounds": 3, "width": 64, "heads": 2, "hidden": 64, "vocabulary": 64, "context": 8}
GPU = SimpleNamespace(type="cuda")


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    monkeypatch.setattr(fused, "HAS_TRITON", True)


def choose(config=None, *, ranks=1, device=GPU, kind="adamw", recordable=True, draws_rounds=False, **shape):
    model = LoopedGPT(GPTConfig(**{**SHAPE, **shape}))
    optimizer = make_optimizer(model, OptimConfig(kind=kind), fused=True)
    world = World(0, ranks, device)
    told = {"recordable": recordable, "draws_rounds": draws_rounds}
    return choose_execution(config or DeviceConfig(), world, model, optimizer, **told)


@pytest.mark.parametrize("block", ["sandwich", "flat", "prenorm"])
def test_on_one_gpu_everything_is_on(block):
    chosen = choose(block=block)
    assert chosen.describe() == "Triton kernels, bf16, CUDA graph, loss read back 1 step behind"
    assert chosen.chained
    assert chosen.to_json() == {"blocks": "kernels", "precision": "bf16", "graph": True, "lag": 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": DeviceConfig(compile="off")}, "eager modules, bf16 (device.compile is off)"),
        ({"config": DeviceConfig(compile="on")}, "compiled blocks, bf16 (device.compile is on)"),
        (
            {"config": DeviceConfig(precision="fp32")},
            "compiled blocks, fp32 (the Triton kernels need bf16)",
        ),
        (
            {"heads": 8},
            "compiled blocks, bf16 (the Triton kernels do not know these blocks)",
        ),
        ({"config": DeviceConfig(graph=False)}, "Triton kernels, bf16 (device.graph is off)"),
        ({"ranks": 2}, "Triton kernels, bf16, CUDA graph, loss read back 1 step behind"),
        ({"ranks": 2, "config": DeviceConfig(parallel="fsdp")}, "Triton kernels, bf16 (fsdp: no CUDA graph)"),
        ({"recordable": False}, "Triton kernels, bf16 (batches differ in their work: no CUDA graph)"),
        ({"kind": "muon"}, "Triton kernels, bf16, CUDA graph"),
        ({"device": torch.device("cpu")}, "eager modules, fp32"),
    ],
)
def test_what_is_left_out_is_said(options, said):
    assert choose(**options).describe() == said


def test_drawn_rounds_have_a_graph_for_each_number_of_them():
    parts = {"prelude": 1, "coda": 1, "injection": "linear", "first_state": "noise", "block": "flat"}
    chosen = choose(**parts, draws_rounds=True)
    assert chosen.describe() == (
        "Triton kernels, bf16, CUDA graph for each number of rounds, at most 16, loss read back 1 step behind"
    )
    assert chosen.chained
    assert chosen.to_json()["most_graphs"] == 16
    assert choose(**parts, ranks=2, draws_rounds=True).describe() == chosen.describe()


def test_a_missing_triton_is_said(monkeypatch):
    monkeypatch.setattr(fused, "HAS_TRITON", False)
    assert choose().describe() == "compiled blocks, bf16 (Triton is not installed)"


def test_sharded_blocks_are_called_one_by_one():
    chosen = choose(DeviceConfig(parallel="fsdp"), ranks=2)
    assert (chosen.blocks, chosen.chained, chosen.graph) == ("kernels", False, False)


def test_it_is_applied_to_the_blocks_and_to_the_loop():
    model = LoopedGPT(GPTConfig(**SHAPE))
    choose(ranks=2).apply(model)
    assert all("forward" in vars(block) for block in model.blocks)
    assert "run_rounds" in vars(model)
    plain = LoopedGPT(GPTConfig(**SHAPE))
    choose(DeviceConfig(compile="off")).apply(plain)
    assert not any("forward" in vars(block) for block in plain.blocks)
    assert "run_rounds" not in vars(plain)


def test_a_run_prints_it_and_keeps_it(tiny_config, capsys, monkeypatch):
    config = tiny_config(optim={"steps": 1})
    train(config)
    assert capsys.readouterr().out.splitlines()[0] == "execution: eager modules, fp32"
    kept = json.loads((config.out / "run.json").read_text())["execution"]
    assert kept == {"blocks": "eager", "precision": "fp32", "graph": False, "lag": 0}
    assert execution.runs_fast_blocks(DeviceConfig(), GPU)
    assert not execution.runs_fast_blocks(DeviceConfig(precision="fp32"), GPU)
