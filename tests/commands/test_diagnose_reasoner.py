"""`deeploop diagnose` on HRM and TRM: both horizons, the start, a fit along C_L, and mistakes."""

import json
from dataclasses import replace

import pytest

from deeploop.cli import main
from deeploop.config.loop import HaltingConfig
from deeploop.config.optim import ReasonerOptimConfig
from deeploop.config.run import DeviceConfig
from deeploop.models.reasoner_config import HRMConfig, TRMConfig
from deeploop.tasks.puzzles.config import HRMTrainConfig, PuzzleDataConfig, TRMTrainConfig
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.train.loop import train

SHAPE = {"width": 16, "heads": 2, "hidden": 32, "cycles": 2, "low_cycles": 2}
MODELS = {
    "hrm": (HRMTrainConfig, HRMConfig(**SHAPE, high_blocks=1, low_blocks=1, rule="deeploop")),
    "trm": (TRMTrainConfig, TRMConfig(**SHAPE, blocks=1, puzzle_positions=2)),
}
FEW = ["--iterations", "4", "--sequences", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reasoners")
    build_sudoku(folder / "boards", size=4, train=4, test=2)
    for name, kind, changes in (
        ("hrm", "hrm", {}),
        ("hrm4", "hrm", {"low_cycles": 4}),
        ("plain", "hrm", {"rule": "postnorm"}),
        ("trm", "trm", {}),
    ):
        config, model = MODELS[kind]
        train(
            config(
                out=folder / name,
                model=replace(model, **changes),
                data=PuzzleDataConfig(path=folder / "boards"),
                optim=ReasonerOptimConfig(steps=2, batch=4, warmup_steps=1),
                halting=HaltingConfig(segments=2, learn_continue=kind == "hrm"),
                device=DeviceConfig(kind="cpu"),
            )
        )
    return folder


def test_hrm_is_measured_as_trained_and_over_the_last_cycle(runs, capsys):
    assert main(["diagnose", str(runs / "hrm"), *FEW]) == 0
    said = capsys.readouterr().out
    assert "DeepLoop p=0.5, no inner norm, α = 2.449 at N = 3, C_L = 2; 2 puzzles of" in said
    assert "last_call (as trained)" in said
    assert "last_cycle (the paper's, not as trained)" in said
    record = json.loads((runs / "hrm" / "diagnose.json").read_text())
    assert record["step"] == 2
    call, cycle = (record["horizons"][name] for name in ("last_call", "last_cycle"))
    assert {name: own["R_g"] for name, own in call["modules"].items()} == {"L": 1, "H": 1}
    assert {name: own["R_g"] for name, own in cycle["modules"].items()} == {"L": 2, "H": 1}
    assert call["kappa_bar"] == 1.0
    assert 0 < cycle["modules"]["L"]["kappa"] <= 2
    assert cycle["bound"] > 0
    assert main(["runs", str(runs)]) == 0  # and the record of another kind disturbs no table
    assert main(["report", str(runs), "--out", str(runs / "report")]) == 0


def test_the_start_and_trm(runs, capsys):
    assert main(["diagnose", str(runs / "trm"), "--at", "init", *FEW, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out).values()
    assert record["step"] == 0
    assert record["horizons"].keys() == {"last_cycle"}  # it is trained so
    shared = record["horizons"]["last_cycle"]["modules"]["shared"]
    assert (shared["R_g"], shared["J"], record["horizons"]["last_cycle"]["bound"]) == (3, 2, None)


def test_runs_of_several_low_cycles_are_fitted(runs, capsys):
    assert main(["diagnose", str(runs / "hrm"), str(runs / "hrm4"), *FEW, "--json"]) == 0
    gamma = json.loads(capsys.readouterr().out)["gamma"]
    assert gamma.keys() == {"κ_g(L)", "κ_g(H)", "own κ of L's sublayers", "own κ of H's sublayers"}
    assert len(gamma["own κ of L's sublayers"]["slopes"]) == 2  # one block: attention and MLP


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hrm", "plain"], "model.rule=postnorm, but"),
        (["hrm", "trm"], "trm: model.blocks=1, but hrm has None"),
        (["hrm", "--sublayers", "blocks.0.mlp"], "sublayer 'blocks.0.mlp': the model has stacks."),
        (["hrm", "--data", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(runs, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(runs)
    assert main(["diagnose", *arguments, *FEW]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
