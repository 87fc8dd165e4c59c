"""ARC-AGI by votes: a model answers every test input under each view of its task, and equal answers count.

Tasks come one after the other, so only one of them has its answers in memory at any time.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from deeploop.data.arc_grids import read_back
from deeploop.data.puzzles import PuzzleSplit
from deeploop.eval.reasoning import PuzzleScore, Solver, added
from deeploop.eval.voting import Ballot, Vote, budget_needed, place_of


class Question(NamedTuple):
    """One test input of a task, and what was voted for it."""

    input: np.ndarray
    expected: np.ndarray
    answers: int  # that differ
    place: int | None  # of the right one among them
    best: list[Vote]


class TaskVotes(NamedTuple):
    """A task with all its test inputs."""

    name: str
    views: int
    questions: list[Question]

    @property
    def needed(self) -> int | None:
        """The least K at which it is solved, if at any."""
        return budget_needed([question.place for question in self.questions])


Answer = tuple[int, int, np.ndarray, float]  # group, pair, grid of colours as the task has it, σ(q_halt)


def chosen_examples(split: PuzzleSplit, groups: np.ndarray, views: int | None) -> np.ndarray:
    """All examples of some groups under their first views, which begin with the task as it is."""
    pairs, puzzles, _ = split.groups[groups].T
    counts = pairs * (puzzles if views is None else np.minimum(puzzles, views))
    first = split.first_examples()[groups]
    return np.concatenate([np.arange(start, start + own) for start, own in zip(first, counts, strict=True)])


def vote(
    solver: Solver, split: PuzzleSplit, groups: np.ndarray, *, views: int | None, keep: int
) -> tuple[list[TaskVotes], PuzzleScore]:
    """The tasks of these groups, each with its `keep` best answers, and the sums over all examples."""
    solver.model.eval()
    examples = chosen_examples(split, groups, views)
    scores: list[PuzzleScore] = []
    tasks: list[TaskVotes] = []
    with tqdm(total=len(examples), desc="arc", unit=" answers", dynamic_ncols=True, disable=None) as bar:
        stream = answers(solver, split, examples, scores)
        for group, own in groupby(stream, key=itemgetter(0)):
            tasks.append(count_votes(split, group, own, keep))
            solved = sum(task.needed == 1 for task in tasks)
            bar.set_postfix_str(f"{solved} of {len(tasks)} tasks solved at K=1", refresh=False)
            bar.update(tasks[-1].views * len(tasks[-1].questions))
    return tasks, added(scores)


def answers(
    solver: Solver, split: PuzzleSplit, examples: np.ndarray, scores: list[PuzzleScore]
) -> Iterator[Answer]:
    """What the model answers to each example, read back from its view; a batch's sums go to `scores`."""
    for first in range(0, len(examples), solver.batch):
        numbers = examples[first : first + solver.batch]
        found, score = solver(split.rows(numbers))
        scores.append(score)
        tokens, confidence = found.tokens.cpu().numpy(), found.q[:, 0].double().sigmoid().tolist()
        group, ids, pair = split.origin(numbers)
        grids = read_back(tokens, split.views[ids])
        yield from zip(group.tolist(), pair.tolist(), grids, confidence, strict=True)


def count_votes(split: PuzzleSplit, group: int, stream: Iterator[Answer], keep: int) -> TaskVotes:
    """The votes of one task, whose answers the stream holds."""
    ballots = [Ballot() for _ in range(split.groups[group, 0])]
    votes = 0
    for _, pair, grid, confidence in stream:
        ballots[pair].add(grid, confidence)
        votes += 1
    questions = [question(split, group, pair, ballot.ranked(), keep) for pair, ballot in enumerate(ballots)]
    name = split.names[group] if split.names else str(group)
    return TaskVotes(name, votes // len(ballots), questions)


def question(split: PuzzleSplit, group: int, pair: int, ranked: Sequence[Vote], keep: int) -> Question:
    """A test input with its grids as the task has them."""
    example = split.first_examples()[group : group + 1] + pair
    inputs, labels, ids = split.rows(example)
    given, expected = (read_back(tokens, split.views[ids])[0] for tokens in (inputs, labels))
    return Question(given, expected, len(ranked), place_of(expected, ranked), list(ranked[:keep]))
