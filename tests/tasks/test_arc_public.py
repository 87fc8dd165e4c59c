"""`deeploop prepare arc --from-public`: a build of the public code keeps its ids, examples and order."""

import json
import shutil

import numpy as np
import pytest

from deeploop.cli import main
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from public_arc import small_tasks, write_public


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("public")
    for kind in ("hrm", "trm"):
        write_public(folder / kind, small_tasks(), kind)
    return folder


@pytest.mark.parametrize("kind", ["hrm", "trm"])
def test_every_example_and_id_is_the_folders(builds, tmp_path, capsys, kind):
    words = ["prepare", "arc", "--from-public", str(builds / kind), "--out", str(tmp_path / "arc")]
    assert main(words) == 0
    puzzles = PuzzleSet.open(tmp_path / "arc")
    puzzles.verify()
    assert (puzzles.puzzle_ids, len(puzzles.train), len(puzzles.test)) == (17, 44, 12)
    assert puzzles.train.names == ["00a1", "Above1", "c3", "d4"]
    assert puzzles.test.names == ["c3", "d4"]
    for split, own in (("train", puzzles.train), ("test", puzzles.test)):
        saved = {
            name: np.load(builds / kind / split / f"all__{name}.npy")
            for name in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices")
        }
        ids = np.repeat(saved["puzzle_identifiers"], np.diff(saved["puzzle_indices"]))
        for found, wanted in zip(
            own.rows(np.arange(len(own))), (saved["inputs"], saved["labels"], ids), strict=True
        ):
            np.testing.assert_array_equal(found, wanted)
    said = capsys.readouterr().out
    assert "built from 4 tasks, not the paper's 960\n" in said
    assert "at most 3 augmented views" in said
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("already prepared: ")


def test_a_build_that_is_the_papers_size_says_nothing():
    from deeploop.tasks.puzzles.data.arc import differences_from_published

    assert differences_from_published({"tasks": {"public": 960}, "augmentations": 1000}) == []
    arc2 = differences_from_published({"tasks": {"public": 1120}, "augmentations": 1000})
    assert arc2 == ["built from 1120 tasks, not the paper's 960"]


def change(name, edit):
    def apply(folder):
        array = np.load(folder / name)
        np.save(folder / name, edit(array))

    return apply


def one_token(array):
    array[5, array[5].argmax()] ^= 1
    return array


def other_view(folder):
    names = json.loads((folder / "identifiers.json").read_text())
    names[2] = names[2][:-2] + names[2][-1] + names[2][-2]  # two colours change places
    (folder / "identifiers.json").write_text(json.dumps(names))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "identifiers.json").unlink(),
            "no identifiers.json; must be a folder that build_arc",
        ),
        (lambda folder: (folder / "identifiers.json").write_text("{}"), "must be a list of names"),
        (lambda folder: (folder / "test/all__labels.npy").unlink(), "all__labels.npy: can't be read"),
        (other_view, "is not its task under the view in identifiers.json"),
        (change("train/all__inputs.npy", one_token), "example 5 is not its task under the view"),
        (change("test/all__labels.npy", one_token), "example 5 is not its task under the view"),
        (change("test/all__inputs.npy", lambda a: a[:-1]), "don't fit together"),
        (change("test/all__inputs.npy", lambda a: a[:, :81]), "don't fit together"),
        (change("train/all__puzzle_identifiers.npy", lambda a: a + 1), "don't fit together"),
        (change("train/all__puzzle_identifiers.npy", lambda a: a[::-1]), "must have consecutive ids"),
        (change("train/all__group_indices.npy", lambda a: a[[0, 2, 3, 4]]), "and all of its pairs"),
    ],
)
def test_damage_is_one_line_and_writes_nothing(builds, tmp_path, capsys, damage, message):
    folder = tmp_path / "build"
    shutil.copytree(builds / "hrm", folder)
    damage(folder)
    assert main(["prepare", "arc", "--from-public", str(folder), "--out", str(tmp_path / "arc")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "arc").exists()


@pytest.mark.parametrize(
    "words", [["--seed", "1"], ["--tasks", "2"], ["--augmentations", "5"], ["--concept-arc", "x"]]
)
def test_what_the_build_decided_is_refused(builds, tmp_path, capsys, words):
    command = ["prepare", "arc", "--from-public", str(builds / "hrm"), "--out", str(tmp_path / "arc")]
    assert main([*command, *words]) == 2
    assert f"{words[0][2:]}: not with --from-public" in capsys.readouterr().err
