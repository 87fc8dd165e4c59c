"""A run folder full of links to places outside it: whatever is done with it, nothing outside changes."""

import os
import shutil

import pytest

from deeploop.cli import main

WRITTEN = (
    *("run.json", "config.json", "metrics.jsonl", "validation.json", "depth.json", "depth.png"),
    *("diagnose.json", "diagnose.png", "gamma.png", "eval.json", "accuracy.png", "report.html", "report.md"),
)
TINY = "--sequences 2 --iterations 1 --device cpu"


@pytest.fixture(scope="module")
def finished(make_config, train_arguments, tmp_path_factory):
    """A finished run, and the words that resume it."""
    out = tmp_path_factory.mktemp("stranger") / "run"
    assert main(train_arguments(out, "--checkpoint.every", 2)) == 0
    return out


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("untouched")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"file": "untouched"}


@pytest.fixture
def links(finished, tmp_path, outside):
    """A copy of the run in which all that is written is a link already, but for what must be read."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    for name in WRITTEN:
        (copy / f".{name}.part").symlink_to(outside / "file")
        if not (copy / name).exists():
            (copy / name).symlink_to(outside / ("file" if name.endswith("png") else "missing"))
    (copy / "checkpoints" / ".step-00000008.part").symlink_to(outside)
    return copy


def test_results_go_into_the_folder_itself(links, capsys):
    for words in ("--rounds 2", "--rounds 1 2"):
        assert main(["validate", str(links), *words.split(), "--device", "cpu"]) == 0
    assert main(["diagnose", str(links), *TINY.split()]) == 0
    assert main(["report", str(links), "--out", str(links)]) == 0
    for name in ("validation.json", "depth.json", "depth.png", "diagnose.json", "diagnose.png", "report.md"):
        assert not (links / name).is_symlink()


def test_a_resumed_run_writes_into_the_folder_itself(links, train_arguments, capsys):
    assert main(train_arguments(links, "--resume", "--optim.steps", 8)) == 0
    assert (links / "checkpoints" / "step-00000008" / "state.json").is_file()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints"])
def test_a_link_that_would_be_written_through_is_refused(
    name, finished, tmp_path, outside, train_arguments, capsys
):
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    if name == "checkpoints":
        (copy / name).rename(tmp_path / "elsewhere")
        (copy / name).symlink_to(tmp_path / "elsewhere")
    else:
        (copy / name).unlink()
        (copy / name).symlink_to(outside / "file")
    code = main(train_arguments(copy, "--resume", "--optim.steps", 8))
    error = capsys.readouterr().err
    if name == "metrics.jsonl":  # what is kept of it is written anew, in place of the link
        assert code == 0
        assert not (copy / name).is_symlink()
    else:
        assert code == 2
        assert "is a link" in error
        assert not list(tmp_path.glob("elsewhere/*08"))


@pytest.mark.parametrize(
    "name", ["config.json", "run.json", "metrics.jsonl", "eval.json", "diagnose.json", "../odd.log"]
)
@pytest.mark.parametrize("content", ["fifo", "deep", "device"])
def test_one_odd_run_does_not_keep_the_others_from_a_list_or_a_report(
    name, content, finished, tmp_path, capsys
):
    for copy in ("sound", "odd"):
        shutil.copytree(finished, tmp_path / "runs" / copy)
    odd = tmp_path / "runs" / "odd" / name
    odd.unlink(missing_ok=True)
    if content == "fifo":
        os.mkfifo(odd)
    elif content == "deep":
        odd.write_text("[" * 100_000)
    else:
        odd.symlink_to("/dev/zero")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    assert "sound" in capsys.readouterr().out
    if content == "fifo":
        assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
