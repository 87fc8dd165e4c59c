"""Sudoku: the solver against brute force and a known board, symmetries, and what is held out up to them."""

from itertools import permutations, product

import numpy as np
import pytest

from deeploop.data.draws import keys
from deeploop.tasks.puzzles.data.sudoku import board, build_sudoku, make_sudokus, solve, solved_board
from deeploop.tasks.puzzles.data.sudoku_symmetry import (
    BLANK,
    BOXES,
    Symmetry,
    board_views,
    class_keys,
    draw_symmetries,
    shuffle_sudokus,
)

SIZES = tuple(BOXES)


def valid(grid, size):
    height, width = BOXES[size]
    grid = grid.reshape(size, size)
    boxes = grid.reshape(size // height, height, size // width, width).swapaxes(1, 2).reshape(size, size)
    return all((np.sort(lines, axis=1) == np.arange(1, size + 1)).all() for lines in (grid, grid.T, boxes))


@pytest.fixture(scope="module")
def all_4x4():
    """Every solved 4 × 4 board, by trying all rows: nothing of the solver is used."""
    rows = list(permutations(range(1, 5)))
    boards = np.array(list(product(rows, repeat=4)), dtype=np.uint8).reshape(-1, 16)
    columns = np.sort(boards.reshape(-1, 4, 4), axis=1)
    boards = boards[(columns == np.arange(1, 5)[:, None]).all(axis=(1, 2))]
    return boards[[valid(grid, 4) for grid in boards]]


def symmetries_4x4():
    """All 3072 symmetries of the 4 × 4 board but the relabellings, times those: as one Symmetry."""
    lines = [
        [2 * a + b, 2 * a + 1 - b, 2 - 2 * a + c, 3 - 2 * a - c] for a, b, c in product((0, 1), repeat=3)
    ]
    every = list(product(lines, lines, permutations(range(4)), (False, True)))
    rows, columns, digits, transposed = (np.array(part) for part in zip(*every, strict=True))
    return Symmetry(rows, columns, digits, transposed)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A small set of each size."""
    folder = tmp_path_factory.mktemp("sudoku")
    counts = {4: (400, 60), 6: (60, 15), 9: (24, 6)}
    return {
        size: build_sudoku(folder / str(size), size=size, train=train, test=test)
        for size, (train, test) in counts.items()
    }


def test_there_are_288_boards(all_4x4):
    assert len(all_4x4) == 288


def test_solver_finds_exactly_the_solutions_of_brute_force(all_4x4):
    draw = np.random.default_rng(0)
    counts = []
    for clues in [*range(17)] * 8:
        puzzle = all_4x4[draw.integers(288)].copy()
        puzzle[draw.permutation(16)[clues:]] = 0
        if clues > 1 and draw.random() < 0.2:  # a wrong clue: often no solution at all
            where = draw.choice(np.flatnonzero(puzzle))
            puzzle[where] = puzzle[where] % 4 + 1
        expected = all_4x4[((all_4x4 == puzzle) | (puzzle == 0)).all(axis=1)]
        found, _ = solve(puzzle, limit=1000)
        assert {s.tobytes() for s in found} == {s.tobytes() for s in expected}
        assert len(found) == len(expected)
        counts.append(len(expected))
    assert {0, 1} < set(counts)


def test_solver_on_a_known_board():
    puzzle = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
    solution = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
    found, guesses = solve(np.array(list(puzzle), dtype=np.uint8))
    assert ["".join(map(str, answer)) for answer in found] == [solution]
    assert guesses == 0
    hard = "800000000003600000070090200050007000000045700000100030001000068008500010090000400"
    found, guesses = solve(np.array(list(hard), dtype=np.uint8))
    assert len(found) == 1
    assert valid(found[0], 9)
    assert guesses > 10


@pytest.mark.parametrize("size", SIZES)
def test_solved_boards_are_valid_and_varied(size):
    boards = [solved_board(size, key) for key in keys(0, count=20)]
    assert all(valid(grid, size) for grid in boards)
    assert len({grid.tobytes() for grid in boards}) > 15


def test_every_4x4_puzzle_is_unique_by_brute_force(sets, all_4x4):
    for split in (sets[4].train, sets[4].test):
        for inputs, labels in zip(split.inputs - BLANK, split.labels - BLANK, strict=True):
            fitting = all_4x4[((all_4x4 == inputs) | (inputs == 0)).all(axis=1)]
            assert fitting.tolist() == [labels.tolist()]


@pytest.mark.parametrize("size", SIZES)
def test_sets_are_puzzles_with_their_solutions(sets, size):
    puzzles = sets[size]
    assert (puzzles.kind, puzzles.vocabulary, puzzles.length, puzzles.puzzle_ids) == (
        "sudoku",
        size + 2,
        size**2,
        1,
    )
    for split in (puzzles.train, puzzles.test):
        for inputs, labels, rating in zip(split.inputs, split.labels, split.ratings, strict=True):
            assert valid(labels - BLANK, size)
            given = inputs != BLANK
            assert (inputs[given] == labels[given]).all()
            assert 0 < given.sum() < size**2
            found, guesses = solve(inputs - np.uint8(BLANK))
            assert len(found) == 1
            assert guesses == rating


@pytest.mark.parametrize(("difficulty", "fits"), [("easy", range(1)), ("medium", range(1, 10))])
def test_difficulty_is_what_was_asked_for(difficulty, fits):
    made = make_sudokus(range(12), size=9, difficulty=difficulty, seed=0)
    assert made
    assert all(puzzle.rating in fits for puzzle in made)


@pytest.mark.parametrize("size", SIZES)
def test_symmetries_keep_puzzles_puzzles_and_classes_classes(sets, size):
    train = sets[size].train
    inputs, labels = train.inputs[:24], train.labels[:24]
    before = class_keys(inputs, labels)
    seen = set()
    for turn in range(6):
        numbers = np.arange(24) + 24 * turn
        moved, solved = shuffle_sudokus(inputs, labels, keys(7)[0], numbers)
        assert all(valid(grid - BLANK, size) for grid in solved)
        given = moved != BLANK
        assert (moved[given] == solved[given]).all()
        assert (given.sum(axis=1) == (inputs != BLANK).sum(axis=1)).all()
        np.testing.assert_array_equal(class_keys(moved, solved), before)
        seen |= {row.tobytes() for row in moved}
    assert len(seen) > 100


def test_transposing_is_no_symmetry_where_boxes_are_not_square():
    assert not draw_symmetries(6, keys(0)[0], np.arange(100)).transposed.any()
    assert 20 < draw_symmetries(9, keys(0)[0], np.arange(100)).transposed.sum() < 80


def test_every_symmetry_of_4x4_keeps_the_class(sets):
    symmetry = symmetries_4x4()
    assert len(symmetry.rows) == 3072
    train = sets[4].train
    for inputs, labels in zip(train.inputs[:5], train.labels[:5], strict=True):
        images = [symmetry.apply(np.repeat(part[None], 3072, axis=0)) for part in (inputs, labels)]
        assert len(np.unique(class_keys(*images))) == 1


def test_no_image_of_a_4x4_test_puzzle_is_a_training_puzzle(sets):
    """All 3072 images of each: nothing of the classes is used."""
    train = {row.tobytes() for row in sets[4].train.inputs}
    symmetry = symmetries_4x4()
    for inputs in sets[4].test.inputs:
        images = symmetry.apply(np.repeat(inputs[None], 3072, axis=0))
        assert train.isdisjoint(row.tobytes() for row in images)
        assert inputs.tobytes() in {row.tobytes() for row in images}


@pytest.mark.parametrize("size", SIZES)
def test_no_class_is_in_both_splits(sets, size):
    train, test = sets[size].train, sets[size].test
    trained = set(class_keys(train.inputs, train.labels).tolist())
    for turn in range(20):
        images = shuffle_sudokus(test.inputs, test.labels, keys(turn)[0], np.arange(len(test)))
        assert trained.isdisjoint(class_keys(*images).tolist())


def test_classes_tell_puzzles_apart(sets):
    """A key that were always the same would hold out everything; 9 × 9 puzzles hardly ever share a class."""
    train = sets[9].train
    assert len(np.unique(class_keys(train.inputs, train.labels))) == len(train)
    one_less = train.inputs.copy()
    for row in one_less:
        row[np.flatnonzero(row != BLANK)[0]] = BLANK
    assert (class_keys(one_less, train.labels) != class_keys(train.inputs, train.labels)).all()


def test_the_same_set_for_one_worker_and_two(tmp_path, sets):
    again = build_sudoku(tmp_path / "two", size=4, train=400, test=60, workers=2)
    assert again.hash == sets[4].hash
    assert build_sudoku(tmp_path / "seed", size=4, train=400, test=60, seed=1).hash != again.hash


def test_splits_of_other_seeds_and_sizes_keep_apart(tmp_path, sets):
    other = build_sudoku(tmp_path / "other", size=4, train=50, test=50, seed=5)
    trained = set(class_keys(sets[4].train.inputs, sets[4].train.labels).tolist())
    assert trained.isdisjoint(class_keys(other.test.inputs, other.test.labels).tolist())


def test_impossible_sets(tmp_path, monkeypatch):
    monkeypatch.setattr("deeploop.tasks.puzzles.data.generated.FRUITLESS", 100)
    for asked, message in [
        ({"size": 5}, "size 5: must be one of 4, 6, 9"),
        ({"train": 0}, "train 0: must be at least 1"),
        ({"difficulty": "absurd"}, "difficulty 'absurd': must be one of any, easy, medium, hard"),
        ({"size": 4, "difficulty": "hard"}, "no new puzzle in 128 attempts .train 0 of 1000, test 0 of 1000"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_sudoku(tmp_path / "out", **asked)
    with pytest.raises(ValueError, match="size 8"):
        board(8)
    assert not (tmp_path / "out").exists()


def test_every_symmetry_of_4x4_is_undone_by_its_inverse():
    every = symmetries_4x4()
    boards = np.random.default_rng(0).integers(0, 6, (len(every.rows), 16), dtype=np.uint8)  # pads too
    np.testing.assert_array_equal(every.inverse().apply(every.apply(boards)), boards)
    np.testing.assert_array_equal(every.apply(every.inverse().apply(boards)), boards)


@pytest.mark.parametrize("size", SIZES)
def test_views_keep_solutions_and_are_undone(sets, size):
    test, count = sets[size].test, 40
    for inputs, labels in zip(test.inputs[:4], test.labels[:4], strict=True):
        views = board_views(size, np.arange(count))
        shown, answers = (views.apply(np.tile(board, (count, 1))) for board in (inputs, labels))
        assert all(valid(board - BLANK, size) for board in answers)
        given = shown != BLANK
        assert (given.sum(axis=1) == (inputs != BLANK).sum()).all()
        np.testing.assert_array_equal(shown[given], answers[given])
        np.testing.assert_array_equal(views.inverse().apply(answers), np.tile(labels, (count, 1)))
        np.testing.assert_array_equal(shown[0], inputs)
        assert len(np.unique(answers, axis=0)) > count // 2
