"""`deeploop diagnose`: on runs of a second, on the shipped model, over several rounds, and on mistakes."""

import json

import pytest
import torch

from deeploop.cli import main
from deeploop.models.gpt import LoopedGPT
from deeploop.runs.folder import last_checkpoint
from deeploop.tasks.language.diagnose import weights_of
from deeploop.tasks.language.findings import LEGEND, alignment_chart, one_depth_verdict
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics


@pytest.fixture(scope="module")
def runs(make_config, tmp_path_factory):
    """Three rounds and one, of the same family, and a stranger."""
    folder = tmp_path_factory.mktemp("runs")
    train(make_config(folder / "r3", diagnose={"every": 6, "sublayers": ("blocks.0.mlp",), "iterations": 3}))
    train(make_config(folder / "r1", model={"rounds": 1}, optim={"steps": 2}))
    train(make_config(folder / "prenorm", model={"rule": "prenorm"}, optim={"steps": 2}))
    return folder


def test_a_checkpoint_gives_what_training_recorded(runs, capsys, hashed):
    """The optimizer's state and its rate from the files: the same record as the live run's."""
    same = ["--sequences", "1", "--sublayers", "blocks.0.mlp", "--iterations", "3"]
    assert main(["diagnose", str(runs / "r3"), *same, "--json"]) == 0
    assert hashed == ["model.safetensors", "optimizer.safetensors"]
    (found,) = json.loads(capsys.readouterr().out).values()
    recorded = read_metrics(runs / "r3", "diagnose")[-1]
    assert found["step"] == recorded["step"] == 6
    for key in ("kappa", "kappa_raw", "similarity"):
        assert found[key] == pytest.approx(recorded[key], rel=1e-4)
    for key in ("measured", "first_order", "bound"):
        assert found["step_effect"][key] == pytest.approx(recorded["step_effect"][key], rel=1e-3)
    assert json.loads((runs / "r3" / "diagnose.json").read_text())["kappa"] == found["kappa"]
    assert (runs / "r3" / "diagnose.png").stat().st_size > 10_000


def test_the_rate_of_the_last_step_is_the_one_it_was_taken_at(tiny_config):
    """That of the matrices, twice the others' at half the base width, and not the next step's."""
    config = tiny_config(optim={"steps": 3}, model={"mup_base_width": 64})
    train(config)
    *_, last = read_metrics(config.out, "train")
    _, _, state, _ = weights_of(config.out, config, "last", torch.device("cpu"))
    assert state.lr == pytest.approx(64 / config.model.width * last["lr"])
    assert last["lr"] == pytest.approx(config.optim.peak_lr * 3 / config.optim.warmup_steps)


ONE = ["--sublayers", "blocks.0.mlp", "--iterations", "2"]


def test_the_report_reads_as_a_page(runs, capsys, undrawn):
    assert main(["diagnose", str(runs / "r3"), *ONE]) == 0
    text, told = capsys.readouterr()
    assert told.endswith("r3: measuring 2 parts on 1,024 tokens\n")
    assert "2 blocks × 3 rounds, DeepLoop p=0.5, α = 3.464" in text
    assert "audit: each of 2 blocks is visited 3 times, α is right at all 4 residuals" in text
    assert "of at most 3" in text
    assert "last step: ‖ΔF‖/‖F‖ = " in text
    assert "it asks for p from" in text
    validation = read_metrics(runs / "r3", "validation")[-1]
    _, conclusion, *_, written = text.strip().split("\n\n")
    assert written.startswith("written: ")
    assert f"the loss, {validation['loss']:.3f} at step 6, is " in conclusion
    assert "The last step changed the output by " in conclusion
    assert main(["diagnose", str(runs / "prenorm"), *ONE]) == 0
    assert "prenorm has no β/α" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kappas", "block", "words"),
    [
        ((0.5, 0.9), "", "Nothing grows with R, and p = ¼ is enough: own κ is at most 0.90"),
        ((0.5, 0.9), "averaged", "Nothing grows with R: own κ is at most 0.90"),
        (
            (1.0, 2.0),
            "",
            "between R^0.00 and R^0.50: read as growth from κ_1, it asks for p from 0.25 to 0.38.",
        ),
        ((1.0, 2.0), "averaged", "own κ lies between R^0.00 and R^0.50. For a fit"),
    ],
)
def test_the_verdict_of_one_depth(kappas, block, words):
    record = {"rounds": 4, "sublayers": {str(kappa): {"own_kappa": kappa} for kappa in kappas}}
    said = one_depth_verdict(record, block)
    assert words in said
    assert ("asks for p" in said) == (not block and max(kappas) > 1)


def test_several_depths_give_gamma(runs, capsys):
    both = [str(runs / "r1"), str(runs / "r3")]
    assert main(["diagnose", *both, "--at", "init", "--iterations", "1"]) == 0
    text = capsys.readouterr().out
    assert "One round: nothing is revisited" in text
    assert "own κ: γ = 1.00 [" in text  # fresh β-scaled branches are small: every visit sees one stream
    assert "¼ falls short by 0.25" in text
    assert (runs / "r1" / "gamma.png").stat().st_size > 10_000


def test_at_init_the_draws_are_audited(runs, capsys, undrawn, monkeypatch):
    drawn = LoopedGPT.__init__

    def without_beta(self, config, *, seed=0):
        drawn(self, config, seed=seed)
        with torch.no_grad():
            self.blocks[0].mlp.branch.up.weight.div_(config.scales.beta)
            self.blocks[1].attention.alpha = 1.0

    monkeypatch.setattr(LoopedGPT, "__init__", without_beta)
    assert main(["diagnose", str(runs / "r3"), "--at", "init", *ONE]) == 0
    text = capsys.readouterr().out
    assert "WRONG std of blocks.0.mlp.branch.up.weight" in text
    assert "WRONG α of blocks.1.attention (3 visits): 1, must be 3.4641, which is (2·6)^0.5" in text


def test_the_shipped_model_shows_something_at_once(capsys, tmp_path, undrawn, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "--sequences", "1", *ONE]) == 0
    text = capsys.readouterr().out
    assert text.startswith("shipped at step")
    assert "raw updates G" in text  # it carries no optimizer state
    assert LEGEND in text
    assert "Python's standard library" in text
    assert text.split("\n\n")[1].startswith("Not collapsed: token states differ")
    assert (tmp_path / "runs" / "shipped" / "diagnose.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such run folder"),
        (["r3", "prenorm"], "model.rule=prenorm, but"),
        (["r3", "--sublayers", "blocks.9.mlp"], "sublayer 'blocks.9.mlp': the model has blocks.0.attention"),
        (["r3", "--iterations", "0"], "iterations=0: must be at least 1"),
        (["r3", "--tolerance", "nan"], "tolerance=nan: must be at least 0"),
        (["r3", "--data", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(runs, capsys, arguments, message, monkeypatch):
    monkeypatch.chdir(runs)
    assert main(["diagnose", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_figure_of_seven_rounds(runs):
    """Numbers that could not be read are left out of large heat maps."""
    record = json.loads((runs / "r3" / "diagnose.json").read_text()) if last_checkpoint(runs / "r3") else {}
    own = next(iter(record["sublayers"].values())) | {
        "update_cosines": [[1.0] * 7] * 7,
        "sensitivity_cosines": [[0.5] * 7] * 7,
    }
    chart = alignment_chart(record | {"sublayers": {"a": own}, "kappas": {"a": 1.0}}, [])
    assert not any(panel.texts for panel in chart.panels)
    own |= {"update_cosines": [[1.0] * 2] * 2}
    chart = alignment_chart(record | {"sublayers": {"a": own}, "kappas": {"a": 1.0}}, [])
    assert [len(panel.texts) for panel in chart.panels] == [4, 0, 0]


def test_a_folder_that_cant_be_written_is_refused_before_the_work(runs, monkeypatch, capsys):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["diagnose", str(runs / "r1"), "--data", "nowhere"]) == 2
    assert "r1: can't be written, and the result goes there; copy the run" in capsys.readouterr().err
