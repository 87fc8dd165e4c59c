"""Votes on ARC with answers made by hand: read back from their views, counted, task by task."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deeploop.models.halting import Answers
from deeploop.tasks.puzzles.data.arc import ArcTask, build_arc
from deeploop.tasks.puzzles.options import ReasonerOptions
from deeploop.tasks.puzzles.scoring import PuzzleScore
from deeploop.tasks.puzzles.test_time import chosen_examples, vote

VIEWS = 13


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    draw = np.random.default_rng(0)

    def task(name, tests):
        pairs = [tuple(draw.integers(0, 10, (2, 3, 4)).astype(np.uint8)) for _ in range(2 + tests)]
        return ArcTask("evaluation", name, tuple(pairs[:2]), tuple(pairs[2:]))

    folder = tmp_path_factory.mktemp("votes") / "arc"
    return build_arc([task("a", 1), task("b", 2), task("c", 1)], folder, augmentations=VIEWS - 1).test


def solver(answer, batch=5):
    """Stands for a model: `answer(labels, ids)` gives tokens and q_halt."""

    def after(rows, counts, carry):
        _, labels, ids = rows
        tokens, q = answer(labels.copy(), ids)
        rest = torch.zeros(len(ids), 1)
        count = PuzzleScore(len(ids), 0.0, 0.0, 0.0, 1.0, 0.0)
        q = torch.stack([torch.tensor(q), rest[:, 0]], 1)
        return [(Answers(torch.from_numpy(tokens), rest, q, rest), count)] * len(counts)

    return SimpleNamespace(after=after, model=torch.nn.Identity(), batch=batch, adaptive=False)


def effort(views):
    return ReasonerOptions(segments=(1,), views=views)


def all_groups(split):
    return np.arange(len(split.groups))


def right(labels, ids):
    return labels, np.zeros(len(ids))


def test_right_answers_of_all_views_are_one_answer(split):
    solve = solver(right)
    tasks, found = vote(solve, split, all_groups(split), effort(None), keep=3)
    assert not solve.model.training
    assert [(task.name, task.votes, task.needed) for task in tasks] == [
        ("a", VIEWS, 1),
        ("b", VIEWS, 1),
        ("c", VIEWS, 1),
    ]
    assert [len(task.questions) for task in tasks] == [1, 2, 1]
    for task in tasks:
        for question in task.questions:
            (only,) = question.best
            assert (question.answers, only.count, only.confidence) == (1, VIEWS, 0.5)
            np.testing.assert_array_equal(only.grid, question.expected)
    assert found.puzzles == 4 * VIEWS


def test_the_questions_are_the_grids_of_the_task(split):
    tasks, _ = vote(solver(right), split, all_groups(split), effort(2), keep=1)
    stored = [(question.input, question.expected) for task in tasks for question in task.questions]
    for index, pair in enumerate(stored):
        for grid, tokens in zip(pair, (split.inputs[index], split.labels[index]), strict=True):
            np.testing.assert_array_equal(grid, tokens.reshape(30, 30)[:3, :4] - 2)


def test_one_wrong_test_input_is_a_wrong_task(split):
    truth = split.labels[2]  # the second input of task b, as its view 0 shows it

    def answer(labels, ids):
        wrong = (np.sort(labels) == np.sort(truth)).all(1) & (ids == split.groups[1, 2])
        labels[wrong, 0] = 2 + (labels[wrong, 0] - 1) % 10
        return labels, np.zeros(len(ids))

    tasks, _ = vote(solver(answer), split, all_groups(split), effort(1), keep=3)
    assert [task.needed for task in tasks] == [1, None, 1]
    assert [question.place for question in tasks[1].questions] == [1, None]


def test_count_comes_before_confidence_and_confidence_breaks_ties(split):
    """Some of a task's first four views answer nothing at all; q_halt is high there."""

    def answer(empty):
        def give(labels, ids):
            blank = (ids - split.groups[0, 2]) < empty
            labels[blank] = 0
            return labels, np.where(blank, 3.0, -3.0)

        return give

    for empty, place in ((1, 1), (2, 2), (3, 2), (4, None)):
        (task,), _ = vote(solver(answer(empty)), split, np.array([0]), effort(4), keep=3)
        assert task.questions[0].place == place, empty
    (task,), _ = vote(solver(answer(2)), split, np.array([0]), effort(4), keep=3)
    assert [one.count for one in task.questions[0].best] == [2, 2]
    assert task.questions[0].best[0].confidence == pytest.approx(1 / (1 + np.exp(-3)))


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_batches_change_nothing(split, batch):
    def answer(labels, ids):
        labels[:, 0] = 2 + ids % 3
        return labels, np.sin(ids)

    def outline(size):
        tasks, _ = vote(solver(answer, size), split, all_groups(split), effort(None), keep=99)
        return [
            [(one.count, one.confidence, one.grid.tolist()) for one in question.best]
            for task in tasks
            for question in task.questions
        ]

    assert outline(batch) == outline(5)


def test_limited_views_begin_with_the_task_as_it_is(split):
    examples = chosen_examples(split, np.array([0, 1]), 2)
    group, ids, pair = split.origin(examples)
    assert list(zip(group, ids - split.groups[group, 2], pair, strict=True)) == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert (split.views[ids[0]] == [0, *range(10)]).all()
    assert len(chosen_examples(split, all_groups(split), 10**6)) == len(split)
