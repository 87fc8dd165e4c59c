"""Runs whose documents are kept apart: training, validation, graphs, `validate` and `diagnose`."""

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from deeploop.cli import main
from deeploop.nn.documents import causal_context
from deeploop.runs.folder import write_config
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.replay import GraphReplay
from deeploop.train.rundir import load_model

END = 256


@pytest.fixture
def masked(make_config, tmp_path):
    def make(out="run", **changes):
        data = {"mask_documents": True, **changes.pop("data", {})}
        return make_config(tmp_path / out, data=data, model={"context": 128}, **changes)

    return make


@torch.no_grad()
def alone(model, inputs, targets):
    """The summed loss of every document by itself."""
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(inputs, targets, strict=True):
        edges = sorted({0, *(row == END).nonzero().flatten().tolist(), len(row)})
        for start, stop in pairwise(edges):
            total += model(row[None, start:stop], target[None, start:stop]).loss
    return total


def test_a_step_and_a_validation_are_those_of_documents_alone(masked):
    task = LanguageTask(masked(device={"micro_batch": 3}), World(0, 1, torch.device("cpu")))
    model = task.build()
    batches = task.batches(0).batches
    assert [len(batch[0]) for batch in batches] == [2, 2, 2, 2]
    assert any((batch[0][:, 1:] == END).any() for batch in batches)
    for batch in batches:
        expected = alone(model, *batch[:2]) / task.targets_per_step
        torch.testing.assert_close(task.loss(model, batch).double(), expected, rtol=1e-5, atol=0)
    model.eval()  # without the padding of the vocabulary
    expected = alone(model, *task.validation[:2]) / task.validation[1].numel()
    assert task.evaluate(model)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_stop_and_resume_is_the_uninterrupted_run_and_validate_agrees(masked, capsys):
    whole = masked("whole")
    train(whole)
    train(masked("halves", optim={"steps": 3}))
    train(masked("halves", resume=True))
    ours, other = (load_model(config.out).state_dict().values() for config in (whole, masked("halves")))
    assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))
    capsys.readouterr()
    main(["validate", str(whole.out), "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)["rounds"][0]["loss"]
    last = [line for line in read_metrics(whole.out) if line["kind"] == "validation"][-1]
    assert found == pytest.approx(last["loss"], rel=1e-6)
    main(["validate", str(whole.out), "--device", "cpu", "--adaptive", "change", "--sequences", "2"])
    capsys.readouterr()
    assert main(["validate", str(whole.out), "--device", "cpu", "--cache-rounds", "1", "all"]) == 2
    assert re.search(r"cache_rounds=1 all: must be unset .* data\.mask_documents", capsys.readouterr().err)


def test_without_the_mask_the_loss_is_another(masked, make_config, tmp_path):
    tasks = [
        LanguageTask(config, World(0, 1, torch.device("cpu")))
        for config in (masked(), make_config(tmp_path / "run", model={"context": 128}))
    ]
    apart, together = (task.evaluate(task.build())["loss"] for task in tasks)
    assert abs(apart - together) > 1e-6


def test_a_diagnosis_keeps_documents_apart(masked, tmp_path, undrawn, capsys):
    """The same weights and tokens, with the mask and without; and with it in training."""
    diagnosed = {"every": 1, "sequences": 4, "iterations": 1, "sublayers": ("blocks.0.mlp",)}
    config = masked(optim={"steps": 1}, diagnose=diagnosed)
    train(config, quiet=True)
    together = replace(config, out=tmp_path / "together", data=replace(config.data, mask_documents=False))
    shutil.copytree(config.out, together.out)
    write_config(together)
    words = "--sequences 4 --iterations 1 --sublayers blocks.0.mlp --device cpu --json".split()  # noqa: SIM905
    kappas = []
    for run in (config.out, together.out):
        assert main(["diagnose", str(run), *words]) == 0
        kappas += [record["kappa"] for record in json.loads(capsys.readouterr().out).values()]
    assert kappas[0] != pytest.approx(kappas[1], rel=1e-5)
    in_training = [line["kappa"] for line in read_metrics(config.out) if "kappa" in line]
    assert in_training[-1] == pytest.approx(kappas[0], rel=1e-5)


def test_attention_is_counted_within_documents(masked, make_config, tmp_path):
    apart = LanguageTask(masked(), World(0, 1, torch.device("cpu")))
    together = LanguageTask(
        make_config(tmp_path / "together", model={"context": 128}), World(0, 1, torch.device("cpu"))
    )
    spared = 1 - causal_context(apart.validation[2]) / 128
    assert 0.05 < spared < 0.95
    model = apart.config.model
    attention = 6 * model.depth * 128 * model.width  # of a token: half of its 12·T·H·D per visited block
    assert (together.flops_per_step - apart.flops_per_step) / together.targets_per_step == pytest.approx(
        spared * attention, rel=1e-3
    )


def test_graphs_are_recorded_by_the_number_of_bounds(recordings):
    """More documents than fit are another shape, so no graph reads bounds that it has no memory for."""
    model = torch.nn.Linear(1, 1)
    seen = []
    replay = GraphReplay(lambda batch: seen.append(batch[0].tolist()) or (torch.zeros(()),), model, print)
    model.rounds = 1
    for bounds in ([0, 3, 9], [0, 4, 9], [0, 5, 9], [0, 1, 2, 3, 9]):
        replay((torch.tensor(bounds),))
    assert seen == [[0, 3, 9], [0, 4, 9], [0, 5, 9], [0, 1, 2, 3, 9]]
    assert len(recordings) == 1
