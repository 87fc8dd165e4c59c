"""The diagnosis in training: what it records, and that the run does not notice it."""

import pytest
from safetensors.torch import load_file

from deeploop.config.loop import DiagnoseConfig
from deeploop.runs.folder import last_checkpoint
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

DIAGNOSE = {"every": 4, "sublayers": ("blocks.0.mlp", "blocks.1.attention"), "iterations": 3}


@pytest.fixture(scope="module")
def runs(make_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnosis")
    train(make_config(folder / "with", diagnose=DIAGNOSE))
    train(make_config(folder / "without"))
    return folder


def test_it_is_recorded_at_the_start_every_so_often_and_at_the_end(runs):
    lines = read_metrics(runs / "with", "diagnose")
    assert [line["step"] for line in lines] == [0, 4, 6]
    assert [line["updates"] for line in lines] == ["raw", "effective", "effective"]
    for line in lines:
        assert 0 < line["kappa"] <= 3.01
        assert [*line["sublayers"]] == [*DIAGNOSE["sublayers"]]
        assert len(line["stream"]) == 4
        assert all(len(own["ratio"]) == 3 for own in line["stream"].values())
    assert "step_effect" not in lines[0]
    assert 0 < lines[1]["step_effect"]["measured"] < 1
    assert set(lines[1]["step_effect"]["update_to_weight"]) == set(lines[1]["stream"])


def test_the_run_does_not_notice_it(runs):
    for kind in ("train", "validation"):
        timed = ("tokens_per_s", "seconds", "mfu")
        mine, bare = (
            [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(runs / name, kind)]
            for name in ("with", "without")
        )
        assert mine == bare
    for file in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        mine, bare = (load_file(last_checkpoint(runs / name) / file) for name in ("with", "without"))
        assert all((mine[key] == bare[key]).all() for key in bare), file


@pytest.mark.parametrize(
    ("more", "roles"),
    [
        ({}, ("gate", "up", "down")),
        # A gate that is not drawn at β is no part of its sublayer.
        ({"model": {"rule": "deeploop:gate=off"}}, ("up", "down")),
    ],
)
def test_update_to_weight_is_that_of_the_last_step(make_config, tmp_path, more, roles):
    """Two runs that differ by one step: their weights differ by what the record says."""
    shared = more | {"optim": {"steps": 2} | more.get("optim", {}), "checkpoint": {"every": 1}}
    train(make_config(tmp_path / "run", diagnose={"every": 2, "iterations": 1}, **shared))
    old, new = (
        load_file(tmp_path / "run" / "checkpoints" / f"step-0000000{step}" / "model.safetensors")
        for step in (1, 2)
    )
    names = [f"blocks.1.mlp.branch.{role}.weight" for role in roles]
    moved = sum((new[name] - old[name]).square().sum() for name in names).sqrt()
    size = sum(old[name].square().sum() for name in names).sqrt()
    effect = read_metrics(tmp_path / "run", "diagnose")[-1]["step_effect"]
    assert effect["update_norms"]["blocks.1.mlp"] == pytest.approx(float(moved), rel=1e-3)
    assert effect["update_to_weight"]["blocks.1.mlp"] == pytest.approx(float(moved / size), rel=1e-3)


def test_mistakes_show_before_training(tiny_config):
    config = tiny_config(diagnose={"every": 2, "sublayers": ("blocks.7.mlp",)})
    with pytest.raises(
        ValueError, match=r"diagnose.sublayers: sublayer 'blocks.7.mlp': the model has blocks.0"
    ):
        train(config)
    assert not config.out.exists()
    for field, value in (("every", -1), ("sequences", 0), ("iterations", 0)):
        with pytest.raises(ValueError, match=f"diagnose.{field}={value}"):
            DiagnoseConfig(**{field: value})
