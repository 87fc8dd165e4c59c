"""Sudoku from files: the batched solver against the plain one, formats, bad lines, classes, the split."""

import gzip

import numpy as np
import pytest

from deeploop.data.draws import keys
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku import build_sudoku, solve
from deeploop.tasks.puzzles.data.sudoku_batch import solve_batch
from deeploop.tasks.puzzles.data.sudoku_files import SudokuFiles, build_from_files
from deeploop.tasks.puzzles.data.sudoku_symmetry import BLANK, class_keys, shuffle_sudokus

HARD = "800000000003600000070090200050007000000045700000100030001000068008500010090000400"
EXTREME = "source,question,answer,rating"
SOLVED = "812753649943682175675491283154237896369845721287169534521974368438526917796318452"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Generated puzzles with their answers: digits, 0 for blank."""
    puzzles = build_sudoku(tmp_path_factory.mktemp("made") / "set", train=40, test=10)
    split = puzzles.train
    return split.inputs - np.uint8(BLANK), split.labels - np.uint8(BLANK)


def text(board, empty="0"):
    return "".join(map(str, board)).replace("0", empty)


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def lines(made, tmp_path):
    return write(tmp_path / "lines.txt", [text(board, ".") for board in made[0]])


def build(*files, out, **asked):
    return build_from_files(SudokuFiles(files, **{"train": 10, "test": 5, **asked}), out)


def boards(puzzles):
    """All puzzles of a set as digits."""
    return np.concatenate([puzzles.train.inputs, puzzles.test.inputs]) - np.uint8(BLANK)


# ── The solver ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("size", [4, 6, 9])
def test_many_boards_at_once_as_one_by_one(size, tmp_path, monkeypatch):
    """With batches smaller than the search, and boards of no, one and several answers among them."""
    monkeypatch.setattr("deeploop.tasks.puzzles.data.sudoku_batch.BATCH", 7)
    train = build_sudoku(tmp_path / "set", size=size, train=20, test=2).train
    puzzles = train.inputs - np.uint8(BLANK)
    puzzles = np.concatenate([puzzles, puzzles, puzzles])
    draw = np.random.default_rng(size)
    for puzzle in puzzles[20:40]:  # fewer clues
        puzzle[draw.choice(np.flatnonzero(puzzle))] = 0
    for puzzle in puzzles[40:]:  # a wrong clue
        where = draw.choice(np.flatnonzero(puzzle))
        puzzle[where] = puzzle[where] % size + 1
    found = solve_batch(puzzles)
    for puzzle, count, answer, guesses in zip(
        puzzles, found.counts, found.answers, found.guesses, strict=True
    ):
        expected, tried = solve(puzzle)
        assert count == len(expected)
        if count == 1:
            assert (answer == expected[0]).all()
        if count < 2:  # the whole search
            assert guesses == tried
    assert set(found.counts.tolist()) == {0, 1, 2}


def test_a_hard_puzzle_needs_the_same_guesses():
    puzzle = np.array([[*HARD]], np.uint8)
    found, (expected, guesses) = solve_batch(puzzle), solve(puzzle[0])
    assert text(found.answers[0]) == text(expected[0]) == SOLVED
    assert found.guesses[0] == guesses > 10


def test_equal_clues_in_a_row_need_no_guess():
    puzzle = np.zeros((1, 81), np.uint8)
    puzzle[0, :2] = 5
    found = solve_batch(puzzle)
    assert (found.counts.tolist(), found.guesses.tolist()) == ([0], [0])


def test_an_empty_board_has_several_answers():
    assert solve_batch(np.zeros((1, 81), np.uint8)).counts.tolist() == [2]


# ── Formats ─────────────────────────────────────────────────────────────────────────────────────────────
def test_every_format_gives_the_same_puzzles(made, tmp_path, lines):
    inputs, answers = ([text(board) for board in part] for part in made)
    pairs = list(zip(inputs, answers, strict=True))
    files = [
        write(tmp_path / "comments", ["# from a forum", "", *(f"{p}  # 7.2 hard" for p in inputs)]),
        write(tmp_path / "answers", [f"{p} {a} 25" for p, a in pairs]),
        write(tmp_path / "kaggle.csv", ["quizzes,solutions", *(f"{p},{a}" for p, a in pairs)]),
        write(tmp_path / "kaggle2.csv", ["id,puzzle,solution", *(f"7,{p},{a}" for p, a in pairs)]),
        write(tmp_path / "extreme.csv", [EXTREME, *(f'"a,b",{p},{a},3' for p, a in pairs)]),
        tmp_path / "packed.gz",
        tmp_path / "windows",
    ]  # fmt: skip
    files[5].write_bytes(gzip.compress(lines.read_bytes()))
    files[6].write_bytes(b"\xef\xbb\xbf" + lines.read_bytes().replace(b"\n", b"\r\n"))
    expected = boards(build(lines, out=tmp_path / "plain"))
    for file in files:
        found = boards(build(file, out=tmp_path / f"{file.name}-set"))
        np.testing.assert_array_equal(found, expected, err_msg=file.name)


@pytest.mark.parametrize("size", [4, 6])
def test_smaller_boards(tmp_path, size):
    train = build_sudoku(tmp_path / "made", size=size, train=30, test=2).train
    file = write(tmp_path / "small", [text(board) for board in train.inputs - np.uint8(BLANK)])
    puzzles = build(file, out=tmp_path / "set", size=size, train=5, test=3)
    assert (puzzles.length, puzzles.vocabulary, len(puzzles.train)) == (size**2, size + 2, 5)


# ── Bad lines ───────────────────────────────────────────────────────────────────────────────────────────
TWO = "0" * 81
BAD = {
    HARD[:-1]: "80 characters, must be 81",
    HARD + "1": "82 characters, must be 81",
    HARD[:5] + "x" + HARD[6:]: "character 'x': must be 1 to 9, or . or 0 for an empty cell",
    HARD[:5] + "\N{SUPERSCRIPT TWO}" + HARD[6:]: "character '\N{SUPERSCRIPT TWO}': must be 1 to 9",
    "88" + HARD[2:]: "no answer",
    TWO: "more than one answer",
    SOLVED: "no empty cell",
    f"{HARD} {SOLVED[::-1]}": "its answer is not the puzzle's only one",
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_named_and_nothing_is_written(made, tmp_path, bad):
    good = [text(board) for board in made[0]]
    file = write(tmp_path / "mangled", ["# comment", *good[:4], bad, *good[4:], "nonsense"])
    with pytest.raises(ValueError) as caught:
        build(file, out=tmp_path / "set")
    assert str(caught.value).startswith(f"{file}:6: {BAD[bad]}")
    assert str(caught.value).endswith("; --skip-bad leaves such lines out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mangled"]


def test_bad_lines_are_counted(made, tmp_path, lines):
    good = [text(board, ".") for board in made[0]]
    mixed = [line for pair in zip(good, [*BAD] * 5, strict=True) for line in pair]
    file = write(tmp_path / "mangled", mixed)
    puzzles = build(file, out=tmp_path / "set", skip_bad=True)
    (tally,) = puzzles.facts["build"]["files"]
    assert (tally["puzzles"], tally["bad"], tally["duplicates"]) == (40, 40, 0)
    assert tally["first_bad"] == "mangled:2: 80 characters, must be 81"
    np.testing.assert_array_equal(boards(puzzles), boards(build(lines, out=tmp_path / "clean")))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("1", "1 columns, the header has 2"),
        (f"{HARD},{SOLVED},3", "3 columns, the header has 2"),
        (f"{HARD},", "answer: 0 characters, must be 81"),
        (f"{HARD},{SOLVED[1:]}", "answer: 80 characters, must be 81"),
        (f"{HARD},{SOLVED[:-1]}7", "its answer is not the puzzle's only one"),
    ],
)
def test_bad_rows_of_csv(tmp_path, row, what):
    file = write(tmp_path / "a.csv", ["puzzle,solution", f"{HARD},{SOLVED}", row])
    with pytest.raises(ValueError, match=f"a.csv:3: {what}"):
        build(file, out=tmp_path / "set", train=1)


def test_a_file_with_too_few_lines_is_refused_before_any_is_solved(tmp_path, lines, monkeypatch):
    """Also a second file; a bad line is reported first, by its number."""
    few = write(tmp_path / "few", [HARD] * 10)

    def read(*_):
        raise AssertionError("solved first")

    monkeypatch.setattr("deeploop.tasks.puzzles.data.sudoku_files.read_files", read)
    with pytest.raises(ValueError, match=r"few: 10 puzzles, too few for 10 to train on .* with --train$"):
        build(lines, few, out=tmp_path / "set")
    for other in ([HARD] * 11, [HARD, "nonsense"], []):
        write(few, other)
        with pytest.raises(AssertionError, match="solved first"):
            build(lines, few, out=tmp_path / "set")


def test_files_without_puzzles(tmp_path):
    for name, content, message in [
        ("empty", b"", "empty: no puzzle in it$"),
        ("comments", b"# one\n\n# two\n", "comments: no puzzle in it$"),
        ("header.csv", b"quizzes,solutions\n", "header.csv: no puzzle in it$"),
        ("binary", bytes(range(256)) * 9, r"binary: no puzzle in it \(\d+ bad lines, the first: binary:1: "),
        ("cut.gz", gzip.compress(HARD.encode())[:-9], "cut.gz: unreadable"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            build(tmp_path / name, out=tmp_path / "set", skip_bad=True)
    with pytest.raises(OSError, match="missing"):
        build(tmp_path / "missing", out=tmp_path / "set")
    assert not (tmp_path / "set").exists()


# ── Classes and the split ───────────────────────────────────────────────────────────────────────────────
def shuffled(made, turn):
    blank = np.uint8(BLANK)
    images = shuffle_sudokus(made[0] + blank, made[1] + blank, keys(turn)[0], np.arange(len(made[0])))
    return [text(board - blank) for board in images[0]]


def test_symmetric_images_are_duplicates(made, tmp_path, lines):
    images = [line for turn in range(3) for line in shuffled(made, turn)]
    file = write(tmp_path / "images", [*lines.read_text().split(), *images])
    puzzles = build(file, out=tmp_path / "set", train=30, test=10)
    (tally,) = puzzles.facts["build"]["files"]
    assert (tally["puzzles"], tally["duplicates"]) == (160, 120)
    classes = [class_keys(split.inputs, split.labels) for split in (puzzles.train, puzzles.test)]
    assert len(np.unique(np.concatenate(classes))) == 40


def test_a_class_of_a_file_that_is_only_tested_on_is_not_trained_on(made, tmp_path, lines):
    held_out = write(tmp_path / "held out", shuffled(made, 0)[:15])
    puzzles = build(lines, out=tmp_path / "set", test_from=(held_out,), train=20, test=100)
    assert [tally["duplicates"] for tally in puzzles.facts["build"]["files"]] == [15, 0]
    assert puzzles.sources == ["lines.txt", "held out"]
    assert puzzles.train.sources.tolist() == [0] * 20
    assert np.bincount(puzzles.test.sources).tolist() == [5, 15]
    trained = class_keys(puzzles.train.inputs, puzzles.train.labels)
    assert not np.isin(trained, class_keys(puzzles.test.inputs, puzzles.test.labels)).any()


def test_each_puzzle_has_its_file_its_answer_and_its_guesses(made, tmp_path):
    halves = [[text(board) for board in made[0][part]] for part in (slice(20), slice(20, 40))]
    files = [write(tmp_path / name, half) for name, half in zip("ab", halves, strict=True)]
    puzzles = build(*files, out=tmp_path / "set", train=8, test=4)
    for split, count in ((puzzles.train, 8), (puzzles.test, 4)):
        assert np.bincount(split.sources).tolist() == [count, count]
        rows = zip(split.inputs, split.labels, split.ratings, split.sources, strict=True)
        for inputs, labels, rating, source in rows:
            board = inputs - np.uint8(BLANK)
            (answer,), guesses = solve(board)
            assert text(board) in halves[source]
            assert (answer == labels - BLANK).all()
            assert guesses == rating
    PuzzleSet.open(puzzles.folder).verify()


def test_the_seed_draws_and_workers_do_not(tmp_path, lines, monkeypatch):
    whole = build(lines, out=tmp_path / "one")
    monkeypatch.setattr("deeploop.tasks.puzzles.data.sudoku_lines.BATCH", 9)
    asked = SudokuFiles((lines,), train=10, test=5)
    assert build_from_files(asked, tmp_path / "two", workers=2).hash == whole.hash
    other = build(lines, out=tmp_path / "seed", seed=1)
    assert {row.tobytes() for row in boards(other)} != {row.tobytes() for row in boards(whole)}
    more = build(lines, out=tmp_path / "more", train=20)  # the test split stays
    np.testing.assert_array_equal(more.test.inputs, whole.test.inputs)


def test_difficulty_keeps_what_fits(made, tmp_path):
    file = write(tmp_path / "both", [HARD, *(text(board) for board in made[0])])
    guesses = [solve(board)[1] for board in made[0]]
    assert 0 in guesses
    easy = build(file, out=tmp_path / "easy", difficulty="easy", train=guesses.count(0) - 1)
    assert not easy.train.ratings.any()
    hard = sum(count >= 10 for count in guesses) + 1
    with pytest.raises(
        ValueError, match=f"both: {hard} puzzles of different classes of difficulty hard, too"
    ):
        build(file, out=tmp_path / "hard", difficulty="hard", train=hard)


def test_too_few_puzzles(tmp_path, lines):
    with pytest.raises(ValueError, match=r"twice: 40 puzzles of different classes, too few for 40 to"):
        build(write(tmp_path / "twice", lines.read_text().split() * 2), out=tmp_path / "set", train=40)
    with pytest.raises(ValueError, match="from: a file is given twice"):
        build(lines, tmp_path / ".." / tmp_path.name / "lines.txt", out=tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_a_set_with_sources_outside_its_list_is_damaged(tmp_path, lines):
    puzzles = build(lines, out=tmp_path / "set")
    path = puzzles.folder / "test_sources.npy"
    np.save(path, np.ones(5, "<i4"))
    with pytest.raises(ValueError, match="test_sources: must be from 0 to below 1"):
        PuzzleSet.open(puzzles.folder)
