"""The puzzle loader: one puzzle of each group an epoch, rows that partition a batch, exact resume."""

import json
from itertools import chain

import numpy as np
import pytest
import torch

from deeploop.tasks.puzzles.data.arc import ArcTask, build_arc
from deeploop.tasks.puzzles.data.loader import PuzzleLoader
from deeploop.tasks.puzzles.data.maze import build_maze
from deeploop.tasks.puzzles.data.sets import write_puzzles
from deeploop.tasks.puzzles.data.sudoku import build_sudoku, solve

PAIRS, PUZZLES = np.array([3, 1, 2, 4]), np.array([5, 50, 1, 8])


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Every pair's tokens are its number, and every puzzle has its own id (kind sudoku, never augmented)."""
    groups = np.stack([PAIRS, PUZZLES, np.cumsum(PUZZLES) - PUZZLES], axis=1).astype("<i8")
    numbers = np.arange(PAIRS.sum(), dtype=np.uint8)[:, None]
    split = {"inputs": numbers, "labels": numbers, "groups": groups}
    return write_puzzles(
        tmp_path_factory.mktemp("counted") / "set",
        kind="sudoku",
        vocabulary=99,
        splits={"train": split, "test": split},
        views=np.zeros((PUZZLES.sum(), 0), dtype=np.uint8),
        build={},
    )


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A small set of each kind."""
    folder = tmp_path_factory.mktemp("real")
    draw = np.random.default_rng(0)

    def task(name):
        pairs = tuple(tuple(draw.integers(0, 10, (2, 5, 3)).astype(np.uint8)) for _ in range(4))
        return ArcTask("evaluation", name, pairs[:3], pairs[3:])

    return {
        "arc": build_arc([task(name) for name in "abc"], folder / "arc", augmentations=20),
        "sudoku": build_sudoku(folder / "sudoku", size=4, train=30, test=5),
        "maze": build_maze(folder / "maze", size=8, train=20, test=5),
    }


def loader(puzzles, seed=1, augment=True):
    return PuzzleLoader(puzzles, seed=seed, augment=augment)


def drawn(stream, count):
    """Pair and id of the next examples."""
    inputs, _, ids = stream.next_batch(count)
    return inputs[:, 0].tolist(), ids.tolist()


def test_an_epoch_has_one_puzzle_of_each_group_and_all_its_pairs(counted):
    stream = loader(counted, augment=False)
    first = np.cumsum(PAIRS) - PAIRS
    orders, chosen, pair_orders = set(), set(), set()
    for _ in range(60):
        pairs, ids = drawn(stream, PAIRS.sum())
        assert sorted(pairs) == list(range(PAIRS.sum()))
        groups = np.searchsorted(first, pairs, side="right") - 1
        changes = np.flatnonzero(np.diff(groups, prepend=-1))
        assert len(changes) == 4  # the pairs of a group stay together
        orders.add(tuple(groups[changes]))
        for group in range(4):
            of_group = {i for i, g in zip(ids, groups, strict=True) if g == group}
            assert len(of_group) == 1
            chosen |= of_group
        pair_orders.add(tuple(pair for pair, g in zip(pairs, groups, strict=True) if g == 3))
    assert len(orders) > 12
    assert len(pair_orders) > 12
    assert chosen.issuperset(range(5))
    assert len(chosen) > 5 + 25 + 1 + 7
    assert stream.state()["epoch"] == 60


def test_the_stream_does_not_depend_on_how_it_is_asked(counted):
    whole = drawn(loader(counted, augment=False), 100)
    stream = loader(counted, augment=False)
    parts = [drawn(stream, count) for count in (1, 0, 7, 50, 3, 39)]
    assert tuple(list(chain(*part)) for part in zip(*parts, strict=True)) == whole


def test_only_the_rows_asked_for_are_returned(real):
    for puzzles in real.values():
        whole = loader(puzzles).next_batch(40)
        mask = np.arange(40) % 3 == 1
        for rows in (slice(5, 9), np.array([7, 2, 30]), mask, np.zeros(0, dtype=int)):
            stream = loader(puzzles)
            part = stream.next_batch(40, rows)
            for some, every in zip(part, whole, strict=True):
                assert torch.equal(
                    some, every[rows] if isinstance(rows, slice) else every[torch.tensor(rows)]
                )
            assert stream.state() == loader_after(puzzles, 40)


def loader_after(puzzles, count):
    stream = loader(puzzles)
    stream.next_batch(count)
    return stream.state()


@pytest.mark.parametrize("kind", ["arc", "sudoku", "maze"])
@pytest.mark.parametrize("done", [0, 3, 17])
def test_resume_equals_uninterrupted_whichever_rows_are_asked_for(real, kind, done):
    uninterrupted = loader(real[kind])
    uninterrupted.next_batch(6 * done)
    state = json.loads(json.dumps(uninterrupted.state()))
    halves = [loader(real[kind]) for _ in range(2)]
    for half in halves:
        half.load_state(state)
    for _ in range(12):
        parts = [half.next_batch(6, rows) for half, rows in zip(halves, (slice(3), slice(3, 6)), strict=True)]
        for whole, *some in zip(uninterrupted.next_batch(6), *parts, strict=True):
            assert torch.equal(torch.cat(some), whole)
        assert all(half.state() == uninterrupted.state() for half in halves)


def test_batches_are_int64_rows_with_ids_in_range(real):
    for puzzles in real.values():
        inputs, labels, ids = loader(puzzles).next_batch(30)
        assert inputs.shape == labels.shape == (30, puzzles.length)
        assert ids.shape == (30,)
        assert {inputs.dtype, labels.dtype, ids.dtype} == {torch.int64}
        assert max(inputs.max(), labels.max()) < puzzles.vocabulary
        assert ids.max() < puzzles.puzzle_ids
        assert (ids.min() > 0) == (puzzles.kind == "arc")


def test_augmentation_is_new_each_epoch_and_can_be_left_out(real):
    puzzles = real["sudoku"]
    stored = {row.tobytes() for row in puzzles.train.inputs.astype(np.int64)}
    plain = loader(puzzles, augment=False)
    augmented = loader(puzzles)
    for _ in range(2):
        rows = plain.next_batch(30)[0].numpy()
        assert {row.tobytes() for row in rows} == stored
    inputs, labels, _ = (tensor.numpy() for tensor in augmented.next_batch(300))
    assert len({row.tobytes() for row in inputs}) > 250
    for puzzle, answer in zip(inputs[:40] - 1, labels[:40] - 1, strict=True):
        assert [found.tolist() for found in solve(puzzle)[0]] == [answer.tolist()]


def test_a_seed_repeats_and_others_differ(real):
    for puzzles in real.values():
        one, same, other = (loader(puzzles, seed=seed).next_batch(40) for seed in (0, 0, 1))
        assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
        assert not torch.equal(one[0], other[0])


def test_order_is_stable_across_versions(counted, real):
    """Checkpoints resume into this order, so it must never change unnoticed."""
    pairs, ids = drawn(loader(counted, augment=False, seed=0), 10)
    assert pairs == [6, 7, 8, 9, 3, 0, 2, 1, 4, 5]
    assert ids == [60, 60, 60, 60, 16, 2, 2, 2, 55, 55]
    _, answers, _ = loader(real["sudoku"], seed=0).next_batch(1)
    assert answers[0].tolist() == [2, 3, 5, 4, 5, 4, 2, 3, 4, 2, 3, 5, 3, 5, 4, 2]


def test_state_of_another_stream_is_refused(real):
    state = loader(real["sudoku"]).state()
    for other, message in [
        (loader(real["sudoku"], seed=2), "loader state: seed 1, this run has seed 2"),
        (loader(real["maze"]), "loader state: puzzles .*, this run has puzzles"),
        (loader(real["sudoku"], augment=False), "loader state: augment True, this run has augment False"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.load_state(state)


def test_a_negative_count_is_refused(counted):
    with pytest.raises(ValueError, match="count -1"):
        loader(counted).next_batch(-1)
