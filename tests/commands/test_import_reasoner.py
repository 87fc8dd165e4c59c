"""`deeploop import`: a public checkpoint gives the model that it was, and `eval` takes it."""

import json

import pytest
import torch

from deeploop.cli import main
from deeploop.models.hrm import HRMConfig
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import PuzzleShape
from deeploop.models.trm import TRMConfig
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.tasks.puzzles.load import load_reasoner
from public_weights import as_public

SHAPE = PuzzleShape(6, 16, 1)
SIZE = {"width": 16, "heads": 2, "hidden": 32}
MODELS = {
    "hrm": HRMConfig(**SIZE, high_blocks=1, low_blocks=2),
    "trm": TRMConfig(**SIZE, low_cycles=6),
    "trm-mlp": TRMConfig(**SIZE, low_cycles=6, mixer="mlp"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("import")
    build_sudoku(folder / "sudoku", size=4, train=4, test=2)
    for name, config in MODELS.items():
        model = Reasoner(config, SHAPE, seed=3)
        with torch.no_grad():
            model.puzzles.normal_(std=0.1)
            model.halting.weight.normal_()
        torch.save(as_public(model), folder / f"{name}.pt")
        torch.save(model.state_dict(), folder / f"{name}.ours")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_come_back_and_eval_takes_the_run(home, name, capsys):
    out = home / f"run-{name}"
    words = ["import", name[:3], str(home / f"{name}.pt"), "--data", str(home / "sudoku")]
    assert main([*words, "--out", str(out), "--heads", "2", "--segments", "2"]) == 0
    assert f"next: deeploop eval {out}" in capsys.readouterr().out
    model, config = load_reasoner(out)
    assert config.model == MODELS[name]
    wanted = torch.load(home / f"{name}.ours")
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in model.state_dict().items())
    assert main(["eval", str(out), "--device", "cpu"]) == 0
    assert json.loads((out / "run.json").read_text())["imported"]["file"] == f"{name}.pt"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trm", "hrm.pt"], "hrm.pt: holds an HRM, not trm"),
        (["hrm", "trm.pt"], "trm.pt: holds no HRM, not hrm"),
        (["hrm", "nowhere.pt"], "nowhere.pt"),
        (["hrm", "code.pt"], "code.pt: can't be read as a checkpoint"),
        (["hrm", "learned.pt"], "embed_pos.embedding_weight: no weight of HRM's or TRM's public code"),
        (["hrm", "larger.pt"], "checkpoint: has vocabulary 7, the puzzles have 6"),
        (["hrm", "hrm.pt", "--out", "sudoku"], "out=sudoku: is not empty"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(home, monkeypatch, capsys, words, message):
    monkeypatch.chdir(home)
    torch.save({"a": main}, "code.pt")  # would import our code when it is unpickled
    hrm = torch.load("hrm.pt")
    torch.save(hrm | {"model.inner.embed_pos.embedding_weight": torch.zeros(2, 2)}, "learned.pt")
    torch.save(hrm | {"_orig_mod.model.inner.embed_tokens.embedding_weight": torch.zeros(7, 16)}, "larger.pt")
    assert main(["import", *words, "--data", "sudoku", "--heads", "2"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (home / "runs").exists()
