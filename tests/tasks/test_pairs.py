"""Pairs of one's own: grids, lists and strings as boards, what is held out, which lines are refused."""

import json

import numpy as np
import pytest

from deeploop.tasks.puzzles.data.pairs import PairsFile, build_pairs
from deeploop.tasks.puzzles.data.sets import PuzzleSet


def write(path, pairs):
    path.write_text("".join(json.dumps({"input": one, "output": two}) + "\n" for one, two in pairs))
    return path


def build(tmp_path, pairs, **asked):
    return build_pairs(PairsFile(write(tmp_path / "mine.jsonl", pairs), **asked), tmp_path / "set")


def rows(puzzles):
    """Inputs and labels of both splits as boards, by their inputs."""
    shape = puzzles.facts["build"]["shape"]
    parts = [
        np.concatenate([getattr(split, name) for split in (puzzles.test, puzzles.train)])
        for name in ("inputs", "labels")
    ]
    return sorted(zip(*(part.reshape(-1, *shape).tolist() for part in parts), strict=True))


def test_grids_of_several_sizes(tmp_path):
    """Outputs are 1 × 2 or 1 × 1 on a board of 2 × 3: the end of the smaller is scored, the rest is not."""
    puzzles = build(tmp_path, [([[5, 10, "a"], [5, 5, 5]], [[10, 5]]), ([["a"]], [["a"]])], test=1)
    assert puzzles.facts["build"]["symbols"] == ["5", "10", "a"]
    assert (puzzles.kind, puzzles.vocabulary, puzzles.length) == ("pairs", 5, 6)
    assert rows(puzzles) == [
        ([[2, 3, 4], [2, 2, 2]], [[3, 2, 0], [0, 0, 0]]),
        ([[4, 0, 0], [0, 0, 0]], [[4, 1, 0], [0, 0, 0]]),
    ]
    PuzzleSet.open(puzzles.folder).verify()


def test_strings_and_lists(tmp_path):
    puzzles = build(tmp_path, [("ab\nc", "c"), (["a", "b"], ["b"])], test=1)
    assert rows(puzzles) == [
        ([[2, 3], [0, 0]], [[3, 0], [0, 0]]),
        ([[2, 3], [4, 0]], [[4, 0], [0, 0]]),
    ]


def test_numbers_and_their_names_are_one_symbol_in_the_order_of_size(tmp_path):
    puzzles = build(tmp_path, [([[-1, 2, "10", 1]], [["1", "-1", "b", "²"]]), ("2", "2")], test=1)
    assert puzzles.facts["build"]["symbols"] == ["-1", "1", "2", "10", "b", "²"]


def test_split_by_seed_without_repeats(tmp_path):
    pairs = [(f"{n:03}", f"{n:03}"[::-1]) for n in range(50)]
    puzzles = build(tmp_path, pairs + pairs)
    assert (len(puzzles.train), len(puzzles.test)) == (45, 5)
    both = np.concatenate([puzzles.train.inputs, puzzles.test.inputs])
    assert len(np.unique(both, axis=0)) == 50
    for split in (puzzles.train, puzzles.test):
        np.testing.assert_array_equal(split.labels, split.inputs[:, ::-1])
    asked = PairsFile(tmp_path / "mine.jsonl", train=7, test=5, seed=1)
    other = build_pairs(asked, tmp_path / "other")
    assert (len(other.train), len(other.test)) == (7, 5)
    assert other.test.inputs.tolist() != puzzles.test.inputs.tolist()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: column 2 (char 1)"),
        ("[1]", 'must be {"input": …, "output": …}'),
        ('{"input": "a"}', 'must be {"input": …, "output": …}'),
        ('{"input": 3, "output": "a"}', "input: must be a string, or a list or grid"),
        ('{"input": "a", "output": [[1], [1, 2]]}', "output: rows have 1 to 2 cells; must be equally long"),
        ('{"input": "a", "output": [[1], 2]}', "output: cell [1]: must be an integer or a string"),
        ('{"input": "a", "output": [1.5]}', "output: cell 1.5: must be an integer or a string"),
        ('{"input": "a", "output": [true]}', "output: cell True: must be an integer or a string"),
        ('{"input": "a", "output": [""]}', "output: symbol '': must have 1 to 16 characters"),
        ('{"input": "", "output": "a"}', "input: is empty"),
        ('{"input": [[]], "output": "a"}', "input: is empty"),
        ('{"input": "x", "output": "z"}', "another output for the same input as in line 1"),
        (json.dumps({"input": [*range(300)], "output": "a"}), "more than 254 different symbols up to here"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, what):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"input": "x", "output": "y"}\n\n' + line + "\n")
    with pytest.raises(ValueError) as caught:
        build_pairs(PairsFile(file), tmp_path / "set")
    assert str(caught.value).startswith(f"{file}:3: {what}")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


def test_too_few(tmp_path):
    with pytest.raises(ValueError, match=r"2 distinct pairs, fewer than train=2 plus test=1; .* --train"):
        build(tmp_path, [("a", "b"), ("b", "a")], train=2)
    with pytest.raises(ValueError, match=r"mine\.jsonl: has 1 distinct pair; needs at least 2"):
        build(tmp_path, [("a", "b")])
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty: has no pairs"):
        build_pairs(PairsFile(tmp_path / "empty"), tmp_path / "set")
    with pytest.raises(ValueError, match="test 0: must be at least 1"):
        build(tmp_path, [("a", "b")], test=0)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "é".encode("latin-1"), "unreadable as UTF-8 text: .* byte 0xe9 in position 0.*"),
        ("a.jsonl.gz", b"plain", r"unreadable as \.gz: Not a gzipped file \(b'pl'\)"),
    ],
)
def test_files_that_are_no_text_get_no_advice_of_another_command(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: {message}$") as caught:
        build_pairs(PairsFile(tmp_path / name), tmp_path / "set")
    assert "skip-bad" not in str(caught.value)
