"""Mazes: one shortest path, checked by flooding; turns; nothing held out is trained on."""

import numpy as np
import pytest

from deeploop.data.draws import keys
from deeploop.tasks.puzzles.data.dihedral import board_views, turn, turn_boards
from deeploop.tasks.puzzles.data.maze import GOAL, PATH, SPACE, START, WALL, build_maze, layout


@pytest.fixture(scope="module")
def mazes(tmp_path_factory):
    return build_maze(tmp_path_factory.mktemp("maze") / "set", size=14, train=80, test=20)


def flood(free, start):
    """Steps from a cell to every other, by growing a region: -1 where there is no way."""
    away = np.full(free.shape, -1)
    region = np.zeros(free.shape, dtype=bool)
    region[start] = True
    step = 0
    while (new := region & (away < 0)).any():
        away[new] = step
        step += 1
        padded = np.pad(region, 1)
        region = free & (padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:])
    return away


def rows(split, size):
    for part in zip(split.inputs, split.labels, split.ratings, strict=True):
        yield part[0].reshape(size, size), part[1].reshape(size, size), part[2]


def test_answers_are_the_only_shortest_paths(mazes):
    assert (mazes.kind, mazes.vocabulary, mazes.length) == ("maze", 6, 196)
    for inputs, labels, rating in (row for s in (mazes.train, mazes.test) for row in rows(s, 14)):
        start, goal = (tuple(np.argwhere(inputs == token)[0]) for token in (START, GOAL))
        assert sorted(np.unique(inputs)) == [WALL, SPACE, START, GOAL]
        np.testing.assert_array_equal(np.where(labels == PATH, SPACE, labels), inputs)
        free = inputs != WALL
        there, back = flood(free, start), flood(free, goal)
        assert there[goal] == rating >= 14
        # On a shortest path lie the cells whose two distances add up; one a distance: there is only one.
        on_path = free & (there + back == rating)
        assert on_path.sum() == rating + 1
        np.testing.assert_array_equal(on_path, np.isin(labels, (START, GOAL, PATH)))
        assert (there[free] >= 0).all()


@pytest.mark.parametrize("size", [5, 6, 30])
def test_layouts_join_every_room(size):
    for key in keys(size, count=10):
        free = layout(size, key) != WALL
        assert free[::2, ::2].all()
        assert (flood(free, (0, 0))[free] >= 0).all()


def test_some_layouts_have_loops():
    """A tree has one edge less than cells."""
    extra = []
    for key in keys(0, count=10):
        free = layout(30, key) != WALL
        edges = (free[1:] & free[:-1]).sum() + (free[:, 1:] & free[:, :-1]).sum()
        extra.append(int(edges - free.sum() + 1))
    assert min(extra) > 3


def test_turned_mazes_have_turned_answers(mazes):
    inputs, labels = turn_boards(mazes.train.inputs, mazes.train.labels, keys(0)[0], np.arange(80))
    moves = set()
    for before, answer, after, turned in zip(
        mazes.train.inputs, mazes.train.labels, inputs, labels, strict=True
    ):
        fitting = [
            move
            for move in range(8)
            if (turn(before.reshape(14, 14), move) == after.reshape(14, 14)).all()
            and (turn(answer.reshape(14, 14), move) == turned.reshape(14, 14)).all()
        ]
        assert fitting
        moves.update(fitting)
    assert moves == set(range(8))


def test_every_turn_is_as_likely():
    grids = np.tile(np.arange(4, dtype=np.uint8), (4000, 1))
    turned, _ = turn_boards(grids, grids, keys(0)[0], np.arange(4000))
    kinds, counts = np.unique(turned, axis=0, return_counts=True)
    assert len(kinds) == 8
    assert counts == pytest.approx(500, abs=5 * 500**0.5)  # five standard deviations


def test_no_turn_of_a_test_layout_is_trained_on(mazes):
    trained = {(row == WALL).tobytes() for row in mazes.train.inputs}
    assert len(trained) == 80
    for row in mazes.test.inputs:
        walls = (row == WALL).reshape(14, 14)
        assert trained.isdisjoint(turn(walls, move).tobytes() for move in range(8))


def test_the_same_set_for_one_worker_and_two(tmp_path, mazes):
    assert build_maze(tmp_path / "two", size=14, train=80, test=20, workers=2).hash == mazes.hash


def test_impossible_mazes(tmp_path, monkeypatch):
    monkeypatch.setattr("deeploop.tasks.puzzles.data.generated.FRUITLESS", 100)
    for asked, message in [
        ({"size": 4}, "size 4: must be between 5 and 255"),
        ({"min_path": 0}, "min_path 0"),
        ({"size": 10, "min_path": 50}, "min_path 50: .* below half the 100 cells"),
        ({"size": 10, "min_path": 49}, "maze: no new puzzle in 128 attempts"),
        ({"test": 0}, "test 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_maze(tmp_path / "out", **asked)


def test_views_are_the_eight_turns_and_are_undone():
    boards = np.random.default_rng(0).integers(0, 6, (8, 25), dtype=np.uint8)
    views = board_views(5, np.arange(8))
    np.testing.assert_array_equal(views.inverse().apply(views.apply(boards)), boards)
    shown = views.apply(np.tile(boards[0], (8, 1)))
    np.testing.assert_array_equal(shown[0], boards[0])
    assert len(np.unique(shown, axis=0)) == 8
    with pytest.raises(ValueError, match="a square board has 8"):
        board_views(5, np.arange(9))
