"""Commands on a run that is still training name the checkpoint whose weights they read."""

import json
import shutil

import pytest

from deeploop.cli import main
from deeploop.runs.folder import last_checkpoint
from deeploop.train import loop, rundir
from deeploop.train.metrics import read_metrics
from iterate_runs import make_iterate_config

pytestmark = pytest.mark.usefixtures("undrawn")
READ, LATER = "step-00000004", "step-00000006"


@pytest.fixture(scope="module")
def trained(make_config, tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("trained") / "run")
    loop.train(config, quiet=True)
    return config.out


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """A copy of a run at step 4 that saves step 6 as soon as its weights were read."""

    def copy(run):
        out = tmp_path / "run"
        shutil.copytree(run, out)
        assert last_checkpoint(out).name == LATER
        later = (out / "checkpoints" / LATER).rename(tmp_path / LATER)
        real = rundir.load_weights

        def load_weights(*args, **options):
            real(*args, **options)
            later.rename(out / "checkpoints" / LATER)

        monkeypatch.setattr(rundir, "load_weights", load_weights)
        return out

    return copy


def test_validate(trained, saving, capsys):
    run = saving(trained)
    assert main(["validate", str(run), "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    of_step = {f"step-{line['step']:08d}": line["loss"] for line in read_metrics(run, "validation")}
    assert record["checkpoint"] == READ
    assert record["rounds"][0]["loss"] == pytest.approx(of_step[READ], rel=1e-6)
    assert of_step[READ] != pytest.approx(of_step[LATER], rel=1e-4)


def test_eval(trained, saving, task_files, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    run = saving(trained)
    words = ["--tasks", "sciq", "--data", str(task_files), "--device", "cpu", "--json"]
    assert main(["eval", str(run), *words]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == READ


def test_eval_of_an_iterated_task(saving, tmp_path, capsys):
    config = make_iterate_config(tmp_path / "iterated", optim={"steps": 6}, checkpoint={"every": 4})
    loop.train(config, quiet=True)
    run = saving(config.out)
    assert main(["eval", str(run), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == READ


def test_diagnose(trained, saving, capsys):
    """The optimizer's moments are read after the weights, of the same checkpoint."""
    run = saving(trained)
    words = "--device cpu --sequences 2 --iterations 1 --sublayers blocks.0.mlp".split()  # noqa: SIM905
    assert main(["diagnose", str(run), *words]) == 0
    assert f"{run} at step 4: " in capsys.readouterr().out


def test_generate(trained, saving, capsys):
    run = saving(trained)
    assert main(["generate", str(run), "--max-tokens", "2", "--device", "cpu"]) == 0
    assert f"written by {run} at {READ}\n" in capsys.readouterr().err


def test_export(trained, saving, tmp_path, capsys):
    pytest.importorskip("transformers")
    run = saving(trained)
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    assert f"of {run} at {READ}" in capsys.readouterr().out
    assert "| trained | 4 steps" in (tmp_path / "exported" / "README.md").read_text()
