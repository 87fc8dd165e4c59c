"""Checkpoints: the newest n, never half of one, and damage is found and named."""

import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import deeploop
from deeploop.config.run import CheckpointConfig
from deeploop.models.gpt import LoopedGPT
from deeploop.runs.folder import last_checkpoint, list_checkpoints, step_of
from deeploop.train import checkpoint as module
from deeploop.train.checkpoint import load_weights, read_state, save_checkpoint
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

FILES = ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]


@pytest.fixture(scope="module")
def trained(make_config, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    train(make_config(out, optim={"steps": 7}, checkpoint={"every": 2, "keep": 3}))
    return out


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(trained, tmp_path / "run")


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_the_last_n_are_kept_and_one_comes_at_the_end(trained):
    assert names(trained) == ["step-00000004", "step-00000006", "step-00000007"]
    assert len(list((trained / "checkpoints").iterdir())) == 3  # nothing hidden is left behind


def test_a_checkpoint_is_whole(trained):
    state = read_state(last_checkpoint(trained))
    assert {path.name for path in last_checkpoint(trained).iterdir()} == set(FILES)
    assert state["format"] == 1
    assert state["step"] == 7
    assert state["loader"]["epoch"] == 0
    assert state["loader"]["position"] == 7 * 8
    assert {"git", "torch", "deeploop", "seconds"} <= state.keys()
    assert state["validation"] == {
        key: value
        for key, value in read_metrics(trained, "validation")[-1].items()
        if key not in ("kind", "step")
    }
    moments = load_file(last_checkpoint(trained) / "optimizer.safetensors")
    weights = load_file(last_checkpoint(trained) / "model.safetensors")
    assert moments.keys() == {
        f"{key}:{name}" for name in weights for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_a_write_that_was_cut_short_is_ignored(copied, make_config):
    part = copied / "checkpoints" / ".step-00000009.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    assert last_checkpoint(copied).name == "step-00000007"
    train(make_config(copied, resume=True, optim={"steps": 9}, checkpoint={"every": 2, "keep": 3}))
    assert names(copied)[-1] == "step-00000009"  # written over the remains
    read_state(last_checkpoint(copied))


def test_a_full_disk_is_one_line_leaves_the_previous_checkpoint_and_gives_its_space_back(
    copied, make_config, monkeypatch
):
    before = sorted((copied / "checkpoints").iterdir())

    def fail(tensors, path):
        if path.name == "optimizer.safetensors":
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path)

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(OSError, match=r"optimizer\.safetensors: can't be written .*No space left"):
        train(make_config(copied, resume=True, optim={"steps": 9}, checkpoint={"every": 2, "keep": 3}))
    assert sorted((copied / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("file", FILES[:3])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(copied, make_config, capsys, file, damage):
    """The run goes on from the last good one, reaches the step again, and ends as if nothing had been."""
    path = last_checkpoint(copied) / file
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-10] ^= 1
    path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    if damage == "remove":
        path.unlink()
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")) as error:
        read_state(path.parent)
    assert "\n" not in str(error.value)
    *_, before, newest = names(copied)
    expected = train(make_config(copied.with_name("undisturbed"), optim={"steps": 7}))
    capsys.readouterr()
    found = train(make_config(copied, resume=True, optim={"steps": 7}))
    assert f"{path}: " in (said := capsys.readouterr().out)
    assert f"moved aside; resuming from {before}" in said
    assert found["loss"] == expected["loss"]
    assert (copied / "checkpoints" / f"damaged-{newest}").is_dir()
    read_state(copied / "checkpoints" / newest)


@pytest.mark.parametrize("file", FILES)
def test_who_asks_for_damaged_weights_is_told_and_not_given_others(copied, file):
    """Files that are not loaded are not read, and may be damaged."""
    path = last_checkpoint(copied) / file
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    if file in ("model.safetensors", "state.json"):
        before = names(copied)[-2]
        advice = f"; {before} is whole: `deeploop train --resume {copied}` puts this one aside"
        with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".*" + re.escape(advice)):
            deeploop.load(copied)
        path.unlink()
        (copied / "checkpoints" / before / "model.safetensors").unlink()
        rest = names(copied)[:-2]
        advice = f"; {rest[-1]} is whole" if rest else f"; no checkpoint of {copied} is whole"
        with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".*" + re.escape(advice)):
            deeploop.load(copied)
    else:
        deeploop.load(copied)


def test_each_file_is_hashed_once_and_only_if_it_is_loaded(copied, make_config, hashed):
    deeploop.load(copied)
    assert hashed == ["model.safetensors"]
    hashed.clear()
    train(make_config(copied, resume=True, optim={"steps": 7}))
    assert sorted(hashed) == FILES[:3]
    hashed.clear()
    step = read_state(last_checkpoint(copied), ())["step"]
    assert (step, hashed) == (7, [])


def test_a_file_that_is_not_listed_is_refused(copied):
    checkpoint = last_checkpoint(copied)
    state = json.loads((checkpoint / "state.json").read_text())
    del state["sha256"]["model.safetensors"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"sha256: must name model\.safetensors"):
        deeploop.load(copied)


def test_when_none_is_whole_nothing_is_trained(copied, make_config):
    for checkpoint in list_checkpoints(copied):
        (checkpoint / "model.safetensors").write_bytes(b"")
    before = names(copied)
    for _ in range(2):  # a scheduler starts it again, and it must not begin anew
        with pytest.raises(ValueError, match=r"damaged .*; no checkpoint of .* is whole"):
            train(make_config(copied, resume=True, optim={"steps": 9}))
    assert names(copied) == before


def test_a_newer_format_is_not_taken_for_damage(copied, make_config):
    before = names(copied)
    path = last_checkpoint(copied) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(ValueError, match="checkpoint format 2"):
        train(make_config(copied, resume=True, optim={"steps": 9}))
    assert names(copied) == before


def test_a_flipped_bit_of_the_state_is_found(copied):
    checkpoint = last_checkpoint(copied)
    path, sound = checkpoint / "state.json", read_state(checkpoint)
    content = path.read_bytes()

    def read(damaged):
        path.write_bytes(damaged)
        try:
            return read_state(checkpoint)
        except ValueError as error:
            return str(error)

    assert read(content[:-20]).startswith(f"{path}: not the state of a checkpoint")
    for place in range(0, len(content), 3):
        found = read(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        # The same only where the flip is in a digit beyond a float's precision.
        assert found == sound or found.startswith(str(checkpoint))


def test_another_format_is_refused(copied):
    path = last_checkpoint(copied) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(ValueError, match=r"state\.json: checkpoint format 2, this deeploop reads 1"):
        read_state(path.parent)


def test_weights_of_another_shape_are_refused_by_name(trained, tiny_config):
    model = LoopedGPT(tiny_config(model={"hidden": 96}).model)
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.branch\.\w+\.weight is .*64.* there and .*96"):
        load_weights(model, last_checkpoint(trained))


@pytest.mark.parametrize("field", ["every", "keep"])
def test_bad_settings_are_refused(field):
    with pytest.raises(ValueError, match=f"checkpoint.{field}=0"):
        CheckpointConfig(**{field: 0})


def test_a_users_own_copy_is_no_checkpoint(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    whole = list_checkpoints(run)
    shutil.copytree(whole[0], run / "checkpoints" / "step-best")
    shutil.copytree(whole[0], run / "checkpoints" / f"{whole[0].name}-good")
    (run / "checkpoints" / "step-99").write_text("a note")
    assert list_checkpoints(run) == whole


def test_a_step_of_more_than_eight_digits_comes_after_those_of_eight(tmp_path):
    """By name alone step-100000000 stands before step-99999999."""
    for name in ("step-100000000", "step-99999999", "step-1000000000", "step-000000001", "step-7"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [99_999_999, 10**8, 10**9]


def test_steps_from_a_hundred_million_on_are_kept_and_found(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer, world = torch.optim.AdamW(model.parameters()), World(0, 1, torch.device("cpu"))
    for step in (99_999_999, 10**8, 10**8 + 1):
        save_checkpoint(tmp_path, step=step, model=model, optimizer=optimizer, state={}, keep=2, world=world)
    assert names(tmp_path) == ["step-100000000", "step-100000001"]


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Order of the calls that a power loss requires: sync files and folder, then rename."""
    calls = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor):
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda path, to: (calls.append("name"), rename(path, to))[1])
    model = torch.nn.Linear(1, 1)
    optimizer, world = torch.optim.AdamW(model.parameters()), World(0, 1, torch.device("cpu"))
    save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer, state={}, keep=2, world=world)
    assert calls == [*["file"] * 4, "folder", "name", "folder"]
