"""Packing: the same files give the same bytes, training lines alone are thinned, and what can't be packed."""

import json
import shutil
import tarfile

import pytest

from deeploop.cli import main as deeploop
from deeploop.files import lock_folder
from deeploop.report.runs import find_runs
from deeploop.runs.packed import PACKED, opened
from research import pack as packing
from research.pack import files_to_pack, pack, write_packed
from run_folders import write_mixed_sweep, write_run


@pytest.fixture
def sweep(tmp_path):
    return write_mixed_sweep(tmp_path / "here" / "sweep")


@pytest.fixture
def twin(sweep, tmp_path):
    """A packed copy of the sweep under the same name."""
    told = pack(sweep, tmp_path / "there" / "sweep")
    assert "sweep/runs.tar.xz: 2 runs, 11 files" in told
    return tmp_path / "there" / "sweep"


def test_nothing_but_one_file_is_left(sweep, twin):
    assert sorted(path.name for path in twin.iterdir()) == [PACKED, "sweep.json"]
    with tarfile.open(twin / PACKED) as tar:
        assert tar.getnames() == [
            *(f"a/{name}" for name in ("config.json", "eval.json", "metrics.jsonl", "run.json")),
            *(f"b/{name}" for name in ("config.json", "diagnose.json", "metrics.jsonl", "run.json")),
            "b/weights-dropped",
            "c.exit.json",
            "c.log",
        ]
    for name in ("a", "b"):
        for path in opened(twin / name).iterdir():
            assert path.read_bytes() == (sweep / name / path.name).read_bytes()


def test_the_same_files_are_the_same_bytes(sweep, twin, tmp_path):
    copy = shutil.copytree(sweep, tmp_path / "copy")  # other times, another order on the disk
    for path in sorted(copy.rglob("*"), reverse=True):
        path.touch()
    (copy / "a" / "run.json").chmod(0o600)
    write_packed(files_to_pack(copy), tmp_path / "again.tar.xz")
    assert (tmp_path / "again.tar.xz").read_bytes() == (twin / PACKED).read_bytes()
    pack(twin, twin)  # what is packed already stays
    assert (tmp_path / "again.tar.xz").read_bytes() == (twin / PACKED).read_bytes()


def test_what_lies_beside_a_packed_file_replaces_it(twin):
    write_run(twin / "b", seed=1, loss=1.5)
    pack(twin, twin)
    shutil.rmtree(twin / "b")
    assert {run.name: run.validation.get("loss") for run in find_runs([twin])}["b"] == 1.5


def test_training_lines_are_thinned_and_nothing_else(sweep, tmp_path):
    whole = [*(sweep / "a" / "metrics.jsonl").read_bytes().splitlines(), b"{torn", b"[1]"]
    (sweep / "a" / "metrics.jsonl").write_bytes(b"\n".join(whole) + b"\n")
    pack(sweep, tmp_path / "thin", train_every=20)
    kept = (opened(tmp_path / "thin" / "a") / "metrics.jsonl").read_bytes().splitlines()
    left_out = [json.loads(line) for line in whole if line not in kept]
    assert left_out
    assert all(line["kind"] == "train" and line["step"] % 20 for line in left_out)
    assert kept == [line for line in whole if line in kept]
    assert any(json.loads(line)["kind"] == "train" for line in kept[:-2])


def test_what_can_not_be_packed(sweep, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--train-every 0: must be at least 1"):
        pack(sweep, tmp_path, train_every=0)
    with pytest.raises(ValueError, match="no such folder"):
        files_to_pack(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no run folder"):
        files_to_pack(tmp_path)
    with lock_folder(sweep / "a"), pytest.raises(ValueError, match="a: is being written"):
        files_to_pack(sweep)
    write_run(sweep / "new\nline")
    with pytest.raises(ValueError, match="can't be packed under this name"):
        files_to_pack(sweep)
    monkeypatch.setattr(packing, "MOST_FILES", 3)
    file = sweep / "sweep.json"
    with pytest.raises(ValueError, match="would hold more than 3 files"):
        write_packed({f"run/{i}.json": file for i in range(5)}, tmp_path / "out.tar.xz")


def test_the_old_command_says_where_it_is(capsys):
    assert deeploop(["pack", "runs"]) == 2
    assert "is now python -m research.pack" in capsys.readouterr().err
