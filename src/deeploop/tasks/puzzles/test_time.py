"""Votes: a model answers a puzzle in several ways, equal answers count, and one is chosen.

The ways are views (on ARC those of the build, on other boards exact symmetries) and first states. Every
answer is read after several numbers of segments. ARC's tasks have one or more test inputs; any other puzzle
is a task with one. Tasks come one after the other, so only one of them has its answers in memory at any time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from deeploop.models.reasoner import Carry
from deeploop.tasks.puzzles.data.sets import PuzzleSplit
from deeploop.tasks.puzzles.scoring import PuzzleScore, Rows, Solver, added, first_states
from deeploop.tasks.puzzles.voting import Ballot, Choice, Vote, budget_needed, place_of


@dataclass(frozen=True)
class Effort:
    """How a puzzle is answered: from each of the first states under each of the views."""

    segments: tuple[int, ...]  # answers are read after each of these numbers; they rise
    views: int | None = None  # None: on ARC all of the build, on other boards one
    starts: int = 1
    noise: float = 0.0  # of all first states but one
    choose: Choice = "vote"


class Trial(NamedTuple):
    """The choice among the first answers to a question."""

    segments: int
    answers: int  # at most
    passes: float  # forward passes that they took
    place: int | None  # of the right one
    right: int  # cells of the first choice that are right


class Question(NamedTuple):
    """One test input of a task, and what was voted for it after the most segments."""

    input: np.ndarray
    expected: np.ndarray
    answers: int  # that differ
    place: int | None  # of the right one among them
    best: list[Vote]
    trials: Sequence[Trial] = ()


class TaskVotes(NamedTuple):
    """A task with all its test inputs."""

    name: str
    votes: int  # for each of them
    questions: list[Question]

    @property
    def needed(self) -> int | None:
        """The least K at which it is solved, if at any."""
        return budget_needed([question.place for question in self.questions])


class Answer(NamedTuple):
    """One answer to a question after some segments."""

    grid: np.ndarray  # as the task has it
    confidence: float  # σ(q_halt)
    passes: float


class Answered(NamedTuple):
    """One answer to a question after each number of segments."""

    group: int
    pair: int
    answers: tuple[Answer, ...]


def chosen_examples(split: PuzzleSplit, groups: np.ndarray, views: int | None) -> np.ndarray:
    """All examples of some groups under their first views, which begin with the task as it is."""
    pairs, puzzles, _ = split.groups[groups].T
    counts = pairs * (puzzles if views is None else np.minimum(puzzles, views))
    first = split.first_examples()[groups]
    return np.concatenate([np.arange(start, start + own) for start, own in zip(first, counts, strict=True)])


def answers_wanted(split: PuzzleSplit, groups: np.ndarray, effort: Effort) -> np.ndarray:
    """First state, view and example of every answer, (J, 3): task by task, then by first state and view."""
    examples = chosen_examples(split, groups, effort.views)
    edges = np.flatnonzero(np.diff(split.origin(examples)[0])) + 1
    # The examples of ARC are views already.
    views = np.arange(1 if split.kind.show else effort.views or 1)
    starts = np.arange(effort.starts)
    tables = (np.meshgrid(starts, views, own, indexing="ij") for own in np.split(examples, edges))
    return np.concatenate([np.stack(table, axis=-1).reshape(-1, 3) for table in tables])


def vote(
    solver: Solver, split: PuzzleSplit, groups: np.ndarray, effort: Effort, *, keep: int
) -> tuple[list[TaskVotes], PuzzleScore]:
    """The tasks of these groups, each with its `keep` best answers, and the sums over all answers."""
    solver.model.eval()
    wanted = answers_wanted(split, groups, effort)
    own_groups, totals = np.unique(split.origin(wanted[:, 2])[0], return_counts=True)
    counts = prefixes(int((totals // split.groups[own_groups, 0]).max()))
    scores: list[PuzzleScore] = []
    tasks: list[TaskVotes] = []
    with tqdm(total=len(wanted), desc="votes", unit=" answers", dynamic_ncols=True, disable=None) as bar:
        stream = answers(solver, split, wanted, effort, scores)
        for group, own in groupby(stream, key=lambda answered: answered.group):
            tasks.append(count_votes(split, group, own, effort, counts, keep))
            solved = sum(task.needed == 1 for task in tasks)
            bar.set_postfix_str(f"{solved} of {len(tasks)} solved at K=1", refresh=False)
            bar.update(tasks[-1].votes * len(tasks[-1].questions))
    return tasks, added(scores)


def prefixes(most: int) -> list[int]:
    """1, 2, 4 … and the most."""
    return [2**power for power in range((most - 1).bit_length())] + [most]


def answers(
    solver: Solver, split: PuzzleSplit, wanted: np.ndarray, effort: Effort, scores: list[PuzzleScore]
) -> Iterator[Answered]:
    """The model's answers, read back from their views; a batch's sums go to `scores`."""
    first = first_states(solver.model, effort.starts, effort.noise) if effort.starts > 1 else None
    for begin in range(0, len(wanted), solver.batch):
        starts, views, examples = wanted[begin : begin + solver.batch].T
        carry = first and Carry(*(state[torch.from_numpy(starts)] for state in first))
        found = solver.after(show(split, examples, views), effort.segments, carry)
        scores.append(found[-1][1])
        columns = []
        for count, (own, _) in zip(effort.segments, found, strict=True):
            grids = read(split, own.tokens.cpu().numpy(), examples, views)
            passes = own.segments.tolist() if solver.adaptive else [count] * len(grids)
            columns.append(map(Answer, grids, own.q[:, 0].double().sigmoid().tolist(), passes))
        group, _, pair = split.origin(examples)
        yield from map(Answered, group.tolist(), pair.tolist(), zip(*columns, strict=True))


def show(split: PuzzleSplit, examples: np.ndarray, views: np.ndarray) -> Rows:
    """Examples under the symmetries of these numbers."""
    inputs, labels, ids = split.rows(examples)
    if symmetries := split.kind.symmetries:
        shown = symmetries(split.side, views)
        inputs, labels = shown.apply(inputs), shown.apply(labels)
    return inputs, labels, ids


def read(split: PuzzleSplit, tokens: np.ndarray, examples: np.ndarray, views: np.ndarray) -> list[np.ndarray]:
    """Answers as their tasks have them: ARC's as grids of colours, others as the cells that are scored."""
    if split.kind.read:
        return split.kind.read(tokens, split.views[split.origin(examples)[1]])
    if symmetries := split.kind.symmetries:
        tokens = symmetries(split.side, views).inverse().apply(tokens)
    return list(tokens[:, split.scored])


def count_votes(
    split: PuzzleSplit,
    group: int,
    stream: Iterable[Answered],
    effort: Effort,
    counts: Sequence[int],
    keep: int,
) -> TaskVotes:
    """The votes of one task, whose answers the stream holds."""
    given: list[list[tuple[Answer, ...]]] = [[] for _ in range(split.groups[group, 0])]
    for answered in stream:
        given[answered.pair].append(answered.answers)
    questions = [question(split, group, pair, own, effort, counts, keep) for pair, own in enumerate(given)]
    name = split.names[group] if split.names else str(group)
    return TaskVotes(name, len(given[0]), questions)


def question(
    split: PuzzleSplit,
    group: int,
    pair: int,
    given: Sequence[tuple[Answer, ...]],
    effort: Effort,
    counts: Sequence[int],
    keep: int,
) -> Question:
    """A test input with its grids as the task has them."""
    example = split.first_examples()[group : group + 1] + pair
    inputs, labels, _ = split.rows(example)
    asked, expected = (read(split, tokens, example, np.array([0]))[0] for tokens in (inputs, labels))
    trials = []
    for segments, own in zip(effort.segments, zip(*given, strict=True), strict=True):
        for count, ranked in zip(counts, rankings(own, counts, effort.choose), strict=True):
            passes = sum(answer.passes for answer in own[:count])
            right = right_cells(ranked[0].grid, expected)
            trials.append(Trial(segments, count, passes, place_of(expected, ranked), right))
    return Question(asked, expected, len(ranked), trials[-1].place, ranked[:keep], trials)


def rankings(given: Sequence[Answer], counts: Sequence[int], choose: Choice) -> Iterator[list[Vote]]:
    """The rankings of the first so many answers, or of all where there are fewer."""
    ballot, counted = Ballot(), 0
    for count in counts:
        for answer in given[counted:count]:
            ballot.add(answer.grid, answer.confidence)
        counted = count
        yield ballot.ranked(choose)


def right_cells(grid: np.ndarray, expected: np.ndarray) -> int:
    """Cells that are right; none where the shapes differ."""
    return int((grid == expected).sum()) if grid.shape == expected.shape else 0


def by_passes(tasks: Sequence[TaskVotes]) -> list[dict[str, Any]]:
    """Accuracy against forward passes: a row for each number of segments and of answers.

    `exact`: tasks that the choice solves; `cells`: their cells; `any`: tasks with the right answer among all
    given; `passes`: mean of a test input.
    """
    questions = [question for task in tasks for question in task.questions]
    rows = []
    for at, (segments, answers, *_) in enumerate(questions[0].trials):
        needed = [budget_needed([own.trials[at].place for own in task.questions]) for task in tasks]
        rows.append(
            {
                "segments": segments,
                "answers": answers,
                "passes": fmean(own.trials[at].passes for own in questions),
                "exact": sum(place == 1 for place in needed) / len(tasks),
                "cells": sum(own.trials[at].right for own in questions)
                / sum(own.expected.size for own in questions),
                "any": sum(place is not None for place in needed) / len(tasks),
            }
        )
    return rows
