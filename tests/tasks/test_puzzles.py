"""The puzzle folder: numbering of examples, the hash, and everything that can be wrong with a folder."""

import json
import multiprocessing
import shutil

import numpy as np
import pytest

from deeploop.tasks.puzzles.data import sets as puzzles
from deeploop.tasks.puzzles.data.sets import PuzzleSet, write_puzzles

# Pairs, puzzles and first id of each group.
GROUPS = {"train": [[3, 1, 0], [1, 4, 0], [2, 2, 0]], "test": [[1, 2, 0]]}
BLANKS = np.zeros((4, 0), dtype=np.uint8)
WAY_OUT = "; delete the folder and prepare it again"


def written(folder, groups=GROUPS, views=BLANKS, **changes):
    """Four puzzle ids; the tokens of a pair are all its number, those of its answer all one more."""
    splits = {}
    for name, table in groups.items():
        table = np.array(table, dtype="<i8")
        numbers = np.repeat(np.arange(table[:, 0].sum(), dtype=np.uint8)[:, None], 5, axis=1)
        splits[name] = {"inputs": numbers, "labels": numbers + np.uint8(1), "groups": table}
    settings = {"kind": "maze", "vocabulary": 9, "splits": splits, "build": {"seed": 0}, "views": views}
    return write_puzzles(folder, **{**settings, **changes})


@pytest.fixture
def folder(tmp_path):
    written(tmp_path / "set")
    return tmp_path / "set"


def change(folder, **fields):
    facts = json.loads((folder / "puzzles.json").read_text())
    (folder / "puzzles.json").write_text(json.dumps({**facts, **fields}))


def test_examples_are_numbered_group_by_group(folder):
    puzzles = PuzzleSet.open(folder)
    expected = [
        (group, first + puzzle, pair, before + pair)
        for group, ((pairs, count, first), before) in enumerate(zip(GROUPS["train"], (0, 3, 4), strict=True))
        for puzzle in range(count)
        for pair in range(pairs)
    ]
    assert len(puzzles.train) == len(expected) == 3 + 4 + 4
    group, ids, pair = puzzles.train.origin(np.arange(11))
    inputs, labels, same_ids = puzzles.train.rows(np.arange(11))
    assert list(zip(group, ids, pair, inputs[:, 0], strict=True)) == expected
    np.testing.assert_array_equal(ids, same_ids)
    np.testing.assert_array_equal(labels, inputs + 1)
    assert puzzles.train.first_examples().tolist() == [0, 3, 7]
    assert puzzles.facts["splits"]["train"] == {"groups": 3, "pairs": 6, "puzzles": 7, "examples": 11}
    assert (puzzles.kind, puzzles.vocabulary, puzzles.length, puzzles.puzzle_ids) == ("maze", 9, 5, 4)
    backwards = puzzles.train.rows(np.arange(11)[::-1])[0]
    np.testing.assert_array_equal(backwards[::-1], inputs)


def test_pairs_are_mapped_and_not_read(folder):
    assert isinstance(PuzzleSet.open(folder).train.inputs, np.memmap)


def test_hash_is_of_the_content_alone(folder, tmp_path):
    puzzles = PuzzleSet.open(folder)
    puzzles.verify()
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    PuzzleSet.open(elsewhere).verify()
    assert PuzzleSet.open(elsewhere).hash == puzzles.hash
    others = [
        written(tmp_path / "build", build={"seed": 1}),
        written(tmp_path / "vocabulary", vocabulary=10),
        written(tmp_path / "kind", kind="sudoku"),
        written(tmp_path / "groups", groups={**GROUPS, "test": [[1, 3, 0]]}),
    ]
    assert len({puzzles.hash, *(other.hash for other in others)}) == 5


@pytest.mark.parametrize("name", ["train_inputs", "test_labels", "train_groups"])
def test_changed_content_is_refused_with_a_way_out(folder, name):
    array = np.load(folder / f"{name}.npy")
    array[-1] = array[-1][::-1] if name == "train_groups" else 7
    np.save(folder / f"{name}.npy", array)
    with pytest.raises(ValueError, match=rf"{name}.npy has sha256|does not add up|first ids") as error:
        PuzzleSet.open(folder).verify()
    assert str(error.value).endswith(WAY_OUT)


def test_changed_description_is_refused(folder):
    change(folder, vocabulary=12)
    puzzles = PuzzleSet.open(folder)
    with pytest.raises(ValueError, match=r"its content has hash \w{12}…, puzzles.json \w{12}…"):
        puzzles.verify()


def test_a_puzzle_id_out_of_range_is_refused(tmp_path):
    with pytest.raises(ValueError, match="test_groups: puzzle id 4: must be below 4"):
        written(tmp_path / "set", groups={**GROUPS, "test": [[1, 2, 3]]})
    assert list(tmp_path.iterdir()) == []


def test_an_example_out_of_range_is_refused(folder):
    puzzles = PuzzleSet.open(folder)
    for examples in ([0, 11], [-1]):
        with pytest.raises(ValueError, match="the split has 0 to 10"):
            puzzles.train.rows(np.array(examples))


def damage(folder, what):
    if what == "gone":
        shutil.rmtree(folder)
    elif what == "empty":
        (folder / "puzzles.json").unlink()
    elif what == "array gone":
        (folder / "train_labels.npy").unlink()
    elif what == "cut":
        path = folder / "train_labels.npy"
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "pickle":
        np.save(folder / "train_labels.npy", np.array([{}], dtype=object), allow_pickle=True)
    elif what == "shape":
        np.save(folder / "train_labels.npy", np.zeros((6, 4), dtype=np.uint8))
    elif what == "json":
        (folder / "puzzles.json").write_text("{")
    elif what == "deep":
        (folder / "puzzles.json").write_text("[" * 100_000)
    else:
        change(folder, **json.loads(what))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("gone", "no such set of puzzles; make it with `deeploop prepare arc | sudoku | maze | pairs --out "),
        ("empty", "not a whole set of puzzles (no puzzles.json)"),
        ("array gone", "train_labels.npy: missing"),
        ("cut", "train_labels.npy: unreadable"),
        ("pickle", "train_labels.npy: unreadable"),
        ("shape", "train_labels.npy: holds [6, 4] of |u1, puzzles.json has [6, 5]"),
        ("json", "puzzles.json: can't be read"),
        ("deep", "puzzles.json: can't be read"),
        ('{"format": 9}', "puzzles.json: format 9, this version reads 1"),
        ('{"kind": "chess"}', "kind 'chess': must be one of arc, sudoku, maze"),
        ('{"vocabulary": "6"}', "puzzles.vocabulary: must be a whole number, not '6'"),
        ('{"puzzle_ids": 7}', "views: must be there with shape (7, 0)"),
        ('{"arrays": {}}', "views: must be there with shape (4, 0)"),
        ('{"arrays": {"../x": {"dtype": "|u1", "shape": [1], "sha256": ""}}}', "unknown array '../x'"),
        ('{"length": 6}', "train_inputs: shape (6, 5), must be (6, 6)"),
        ('{"names": {"train": ["a"], "test": []}}', "names.train: 1 names of 3 groups"),
    ],
)
def test_damaged_folders_are_named(folder, what, message):
    damage(folder, what)
    with pytest.raises(ValueError) as error:
        PuzzleSet.open(folder)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{folder}: ")
    assert str(error.value).endswith(f"--out {folder}`" if what in ("gone", "empty") else WAY_OUT)
    assert "\n" not in str(error.value)


def test_nothing_is_left_of_a_write_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("numpy.save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written(tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("same", [True, False])
def test_two_that_write_one_folder_at_once(tmp_path, monkeypatch, same):
    """The first to be done stays; the other is content with it if it is the same set."""
    out, save, begun = tmp_path / "set", np.save, []

    def save_between(*args, **options):
        if not begun:
            build = {"seed": 0 if same else 1}
            other = multiprocessing.get_context("fork").Process(
                target=written, args=(out,), kwargs={"build": build}
            )
            begun.append(other)
            other.start()
            other.join()
        save(*args, **options)

    monkeypatch.setattr(puzzles.np, "save", save_between)
    if same:
        written(out).verify()
    else:
        with pytest.raises(OSError, match="not empty"):
            written(out)
        assert PuzzleSet.open(out).facts["build"] == {"seed": 1}
    assert begun[0].exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
