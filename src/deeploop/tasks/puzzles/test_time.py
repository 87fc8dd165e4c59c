"""Voting: a model answers a puzzle several times, equal answers are counted, and one is chosen.

The answers come from views (on ARC those of the build, on other boards exact symmetries) and first states,
and are read after several numbers of segments. ARC's tasks have one or more test inputs; any other puzzle is
a task with one. Tasks are processed one after the other, so only one has its answers in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from deeploop.models.reasoner import Carry
from deeploop.tasks.puzzles.data.sets import PuzzleSplit
from deeploop.tasks.puzzles.options import NOISE, ReasonerOptions
from deeploop.tasks.puzzles.scoring import PuzzleScore, Rows, Solver, added, first_states
from deeploop.tasks.puzzles.voting import Ballot, Choice, Vote, budget_needed, place_of


class Trial(NamedTuple):
    """The choice among the first `answers` answers to a question."""

    segments: int
    answers: int  # at most
    passes: float  # forward passes for them
    place: int | None  # rank of the right answer
    right: int  # correct cells in the first choice


class Question(NamedTuple):
    """One test input of a task, and the votes for it after the most segments."""

    input: np.ndarray
    expected: np.ndarray
    answers: int  # number of different answers
    place: int | None  # rank of the right one
    best: list[Vote]
    trials: Sequence[Trial] = ()


class TaskVotes(NamedTuple):
    """A task with all its test inputs."""

    name: str
    votes: int  # for each input
    questions: list[Question]

    @property
    def needed(self) -> int | None:
        """The smallest K at which it is solved, or None."""
        return budget_needed([question.place for question in self.questions])


class Answer(NamedTuple):
    """One answer to a question after some segments."""

    grid: np.ndarray  # in the task's own view
    confidence: float  # σ(q_halt)
    passes: float


class Answered(NamedTuple):
    """One answer to a question after each number of segments."""

    group: int
    pair: int
    answers: tuple[Answer, ...]


def chosen_examples(split: PuzzleSplit, groups: np.ndarray, views: int | None) -> np.ndarray:
    """Return all examples of the groups under their first views, starting with the original."""
    pairs, puzzles, _ = split.groups[groups].T
    counts = pairs * (puzzles if views is None else np.minimum(puzzles, views))
    first = split.first_examples()[groups]
    return np.concatenate(
        [np.arange(start, start + count) for start, count in zip(first, counts, strict=True)]
    )


def answers_wanted(split: PuzzleSplit, groups: np.ndarray, effort: ReasonerOptions) -> np.ndarray:
    """Return first state, view and example of every answer, (J, 3): by task, then by first state and view."""
    examples = chosen_examples(split, groups, effort.views)
    edges = np.flatnonzero(np.diff(split.origin(examples)[0])) + 1
    # ARC's examples already are views.
    views = np.arange(1 if split.kind.show else effort.views or 1)
    starts = np.arange(effort.starts)
    tables = (np.meshgrid(starts, views, task, indexing="ij") for task in np.split(examples, edges))
    return np.concatenate([np.stack(table, axis=-1).reshape(-1, 3) for table in tables])


def vote(
    solver: Solver, split: PuzzleSplit, groups: np.ndarray, effort: ReasonerOptions, *, keep: int
) -> tuple[list[TaskVotes], PuzzleScore]:
    """Vote on the tasks of these groups; return them with their `keep` best answers, and the total score."""
    solver.model.eval()
    wanted = answers_wanted(split, groups, effort)
    asked, totals = np.unique(split.origin(wanted[:, 2])[0], return_counts=True)
    counts = prefixes(int((totals // split.groups[asked, 0]).max()))
    scores: list[PuzzleScore] = []
    tasks: list[TaskVotes] = []
    with tqdm(total=len(wanted), desc="votes", unit=" answers", dynamic_ncols=True, disable=None) as bar:
        stream = answers(solver, split, wanted, effort, scores)
        for group, answered in groupby(stream, key=lambda answered: answered.group):
            tasks.append(count_votes(split, group, answered, effort, counts, keep))
            solved = sum(task.needed == 1 for task in tasks)
            bar.set_postfix_str(f"{solved} of {len(tasks)} solved at K=1", refresh=False)
            bar.update(tasks[-1].votes * len(tasks[-1].questions))
    return tasks, added(scores)


def prefixes(most: int) -> list[int]:
    """Return the powers of two below `most`, then `most`."""
    return [2**power for power in range((most - 1).bit_length())] + [most]


def answers(
    solver: Solver, split: PuzzleSplit, wanted: np.ndarray, effort: ReasonerOptions, scores: list[PuzzleScore]
) -> Iterator[Answered]:
    """Yield the model's answers, mapped back from their views; append each batch's score to `scores`."""
    first = first_states(solver.model, effort.starts, effort.noise or NOISE) if effort.starts > 1 else None
    for begin in range(0, len(wanted), solver.batch):
        starts, views, examples = wanted[begin : begin + solver.batch].T
        carry = first and Carry(*(state[torch.from_numpy(starts)] for state in first))
        read_after = solver.after(show(split, examples, views), effort.segments, carry)
        scores.append(read_after[-1][1])
        columns = []
        for count, (batch, _) in zip(effort.segments, read_after, strict=True):
            grids = read(split, batch.tokens.cpu().numpy(), examples, views)
            passes = batch.segments.tolist() if solver.adaptive else [count] * len(grids)
            columns.append(map(Answer, grids, batch.q[:, 0].double().sigmoid().tolist(), passes))
        group, _, pair = split.origin(examples)
        yield from map(Answered, group.tolist(), pair.tolist(), zip(*columns, strict=True))


def show(split: PuzzleSplit, examples: np.ndarray, views: np.ndarray) -> Rows:
    """Return the examples under the symmetries with these numbers."""
    inputs, labels, ids = split.rows(examples)
    if symmetries := split.kind.symmetries:
        shown = symmetries(split.side, views)
        inputs, labels = shown.apply(inputs), shown.apply(labels)
    return inputs, labels, ids


def read(split: PuzzleSplit, tokens: np.ndarray, examples: np.ndarray, views: np.ndarray) -> list[np.ndarray]:
    """Return answers in the task's own view: ARC's as grids of colours, others as the scored cells."""
    if split.kind.read:
        return split.kind.read(tokens, split.views[split.origin(examples)[1]])
    if symmetries := split.kind.symmetries:
        tokens = symmetries(split.side, views).inverse().apply(tokens)
    return list(tokens[:, split.scored])


def count_votes(
    split: PuzzleSplit,
    group: int,
    stream: Iterable[Answered],
    effort: ReasonerOptions,
    counts: Sequence[int],
    keep: int,
) -> TaskVotes:
    """Count the votes for the answers of one task."""
    given: list[list[tuple[Answer, ...]]] = [[] for _ in range(split.groups[group, 0])]
    for answered in stream:
        given[answered.pair].append(answered.answers)
    questions = [
        question(split, group, pair, answers, effort, counts, keep) for pair, answers in enumerate(given)
    ]
    name = split.names[group] if split.names else str(group)
    return TaskVotes(name, len(given[0]), questions)


def question(
    split: PuzzleSplit,
    group: int,
    pair: int,
    given: Sequence[tuple[Answer, ...]],
    effort: ReasonerOptions,
    counts: Sequence[int],
    keep: int,
) -> Question:
    """Read a test input with its grids, and vote on it, in the task's own view."""
    example = split.first_examples()[group : group + 1] + pair
    inputs, labels, _ = split.rows(example)
    asked, expected = (read(split, tokens, example, np.array([0]))[0] for tokens in (inputs, labels))
    trials = []
    for segments, answers in zip(effort.segments, zip(*given, strict=True), strict=True):
        for count, ranked in zip(counts, rankings(answers, counts, effort.choose), strict=True):
            passes = sum(answer.passes for answer in answers[:count])
            first = ranked[0].grid
            right = int((first == expected).sum()) if first.shape == expected.shape else 0
            trials.append(Trial(segments, count, passes, place_of(expected, ranked), right))
    return Question(asked, expected, len(ranked), trials[-1].place, ranked[:keep], trials)


def rankings(given: Sequence[Answer], counts: Sequence[int], choose: Choice) -> Iterator[list[Vote]]:
    """Rank the first `count` answers for each count."""
    ballot, counted = Ballot(), 0
    for count in counts:
        for answer in given[counted:count]:
            ballot.add(answer.grid, answer.confidence)
        counted = count
        yield ballot.ranked(choose)


def by_passes(tasks: Sequence[TaskVotes]) -> list[dict[str, Any]]:
    """Accuracy against forward passes: a row for each number of segments and of answers.

    `exact` is the share of tasks solved by the choice, `cells` that of correct cells, `any` that of tasks
    with the right answer among all, and `passes` the mean per test input.
    """
    questions = [question for task in tasks for question in task.questions]
    rows = []
    for at, (segments, answers, *_) in enumerate(questions[0].trials):
        trials = [question.trials[at] for question in questions]
        needed = [budget_needed([question.trials[at].place for question in task.questions]) for task in tasks]
        rows.append(
            {
                "segments": segments,
                "answers": answers,
                "passes": fmean(trial.passes for trial in trials),
                "exact": sum(place == 1 for place in needed) / len(tasks),
                "cells": sum(trial.right for trial in trials)
                / sum(question.expected.size for question in questions),
                "any": sum(place is not None for place in needed) / len(tasks),
            }
        )
    return rows
