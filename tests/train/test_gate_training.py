"""Training an exit gate: with the model, and alone on one that stays as it is."""

import json
from dataclasses import replace

import pytest
import torch
from resumed_runs import losses, resumed_in_the_middle, tensors
from safetensors.torch import load_file

from deeploop.cli import main
from deeploop.config.loop import GateConfig
from deeploop.runs.folder import last_checkpoint
from deeploop.train.header import header
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.rundir import load_model
from iterate_runs import make_iterate_config

GATE = {"exit_gate": True}
PARTS = {"prelude": 1, "coda": 1, "injection": "add", "rule": "flat"}


def weights(run):
    return load_file(last_checkpoint(run) / "model.safetensors")


@pytest.fixture(scope="module")
def plain(make_config, tmp_path_factory):
    """A run without a gate."""
    config = make_config(tmp_path_factory.mktemp("gate") / "plain", model=PARTS, optim={"steps": 4})
    train(config, quiet=True)
    return config


def test_a_joint_run_resumes_bit_for_bit(tiny_config):
    config = tiny_config(model=GATE, rounds={"sample": "uniform"})
    copy = resumed_in_the_middle(config)
    assert losses(copy) == losses(config.out)
    assert tensors(copy) == tensors(config.out)
    assert load_model(copy).exit_gate.weight.any()


def test_a_gate_is_trained_on_a_run_that_had_none_and_the_rest_stays(plain, tiny_config, capsys):
    config = replace(
        tiny_config(model=PARTS, rounds={"backprop": 2}),
        model=replace(plain.model, **GATE),
        init_from=plain.out,
        gate=GateConfig("gate-only"),
    )
    copy = resumed_in_the_middle(config)
    assert tensors(copy) == tensors(config.out)
    before, after = weights(plain.out), weights(config.out)
    assert after.keys() - before.keys() == {"exit_gate.weight", "exit_gate.bias"}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert after["exit_gate.weight"].any()
    first, last = (read_metrics(config.out, "train")[at]["loss"] for at in (0, -1))
    assert last < first < 0.7  # a coin's is ln 2
    validations = [read_metrics(run, "validation")[-1]["loss"] for run in (plain.out, config.out)]
    assert validations[0] == validations[1]

    def validate(*words):
        assert main(["validate", str(config.out), "--adaptive", *words]) == 0
        return capsys.readouterr().out

    capsys.readouterr()
    record = json.loads(validate("change", "gate", "--json"))
    assert [row["rounds"] for row in record["rounds"]] == [1, 2, 3]
    assert [row["criterion"] for row in record["adaptive"]] == ["change"] * 4 + ["gate"] * 4
    fixed = {row["rounds"]: row["loss"] for row in record["rounds"]}
    for row in record["adaptive"]:
        low, mean = min(2, int(row["mean_rounds"])), row["mean_rounds"]
        assert row["line"] == pytest.approx(fixed[low] + (mean - low) * (fixed[low + 1] - fixed[low]))
    assert "gate 0.9" in validate("gate", "--rounds", "1", "3")
    assert (config.out / "depth.png").is_file()
    assert main(["generate", str(config.out), "--max-tokens", "4", "--adaptive", "gate"]) == 0
    assert "mean rounds per token" in capsys.readouterr().err


def test_a_gate_asked_of_a_run_without_one_is_one_line(plain, capsys):
    for words in (["validate", "--adaptive", "gate"], ["generate", "--adaptive", "gate"]):
        capsys.readouterr()
        assert main([words[0], str(plain.out), *words[1:]]) == 2
        out, err = capsys.readouterr()
        assert "adaptive=gate: this model has no exit gate; train one with --model.exit-gate" in err
        assert (out, err.count("\n")) == ("", 1)
    assert main(["validate", str(plain.out), "--adaptive", "change", "kl", "--thresholds", "1"]) == 2
    assert "thresholds=1: goes with one of --adaptive change, kl or gate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": {"entropy": 0.2}}, "gate.entropy=0.2: is for a model with an exit gate; --model.exit-gate"),
        ({"gate": {"stage": "gate-only"}}, "gate.stage=gate-only: is for a model with an exit gate"),
        ({"model": GATE, "gate": {"stage": "gate-only"}}, "gate.stage=gate-only: needs a trained model"),
        ({"model": GATE | {"rounds": 1}}, "model.rounds=1: must be at least 2 with model.exit_gate=True"),
        (
            {"model": GATE | {"injection": "add"}, "rounds": {"backprop": 2}},
            "rounds.backprop=2: must be 0 with gate.stage=joint, whose loss is read after every round",
        ),
    ],
)
def test_what_a_gate_needs_is_said_in_one_line(changes, message, tiny_config):
    with pytest.raises(ValueError) as caught:
        tiny_config(**changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_resume_under_another_gate_is_refused(tiny_config):
    config = tiny_config(model=GATE, optim={"steps": 2})
    train(config, quiet=True)
    with pytest.raises(
        ValueError, match=r"gate.entropy=0.5: the run in .* was started with gate.entropy=0.1"
    ):
        train(replace(config, resume=True, gate=GateConfig(entropy=0.5)))


def test_the_header_says_how_the_gate_is_trained(tiny_config, tmp_path):
    facts = {"parameters": 1, "examples": 1, "flops_per_step": 1, "step_bytes": 1, "device": "cpu"}
    assert (
        header(tiny_config(model=GATE), "tiny", **facts)[-1]
        == "gate:      joint, the loss is Σ q·L − 0.1·H(q)"
    )
    with pytest.raises(ValueError, match=r"model.exit_gate=True: must be False, it is for language models"):
        make_iterate_config(tmp_path / "run", model=GATE)
