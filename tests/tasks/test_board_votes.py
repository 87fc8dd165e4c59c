"""More at test time on boards: with a stand-in that solves, and with real models."""

import numpy as np
import pytest
import torch

from deeploop.config.loop import HaltingConfig
from deeploop.models.reasoner import Carry, Reasoner, Segment
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.tasks.puzzles.data.sudoku import solve as solve_sudoku
from deeploop.tasks.puzzles.options import ReasonerOptions
from deeploop.tasks.puzzles.scoring import Solver, first_states, score
from deeploop.tasks.puzzles.test_time import by_passes, prefixes, vote

HALTING = HaltingConfig(segments=4)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return build_sudoku(tmp_path_factory.mktemp("votes") / "set", size=4, train=5, test=24).test


class Solves(torch.nn.Module):
    """Solves a board of b blanks after b / 3 segments, before that it answers nothing; q says which.

    A carry counts the segments; noise makes a board need twice as many, and q larger.
    """

    def initial(self, rows):
        return Carry(torch.zeros(rows, 1, 1), torch.zeros(rows, 1, 1))

    def puzzle_rows(self, ids):
        return torch.zeros(len(ids), 1)

    def forward(self, carry, tokens, puzzle, q_only=False):
        solved = np.stack([solve_sudoku((board - 1).numpy().astype(np.uint8))[0][0] for board in tokens]) + 1
        noisy = carry.high[:, 0, 0] != 0
        done = torch.where(noisy[:, None, None], carry.low.round(), carry.low) + 1
        right = done[:, 0, 0] >= (tokens == 1).sum(1) / 3 * (1 + noisy)
        answers = torch.where(right[:, None], torch.from_numpy(solved), torch.ones_like(tokens))
        logits = torch.nn.functional.one_hot(answers.long(), 6).float()
        q = torch.stack([right.float() * 2 - 1 + noisy, torch.zeros(len(tokens))], 1)
        return Segment(Carry(carry.high, done), logits, q)


def solver(model, batch=7, **changes):
    return Solver(model, HALTING, batch, **changes)


def groups(split):
    return np.arange(len(split))


def needed(split):
    """Segments that the stand-in needs without noise."""
    return (split.inputs == 1).sum(1) / 3


def hrm():
    config = HRMConfig(width=16, heads=2, hidden=32, cycles=1, low_cycles=1, high_blocks=1, low_blocks=1)
    return Reasoner(config, PuzzleShape(6, 16, 1), seed=3).eval()


@pytest.mark.parametrize("model", [Solves(), hrm()], ids=["solves", "hrm"])
@pytest.mark.parametrize("choose", ["vote", "q"])
def test_one_view_and_one_start_are_the_plain_evaluation(split, model, choose):
    effort = ReasonerOptions(segments=(HALTING.segments,), views=1, choose=choose)
    tasks, found = vote(solver(model), split, groups(split), effort, keep=1)
    plain = score(solver(model), split.rows(groups(split))).means()
    assert found.means() == pytest.approx(plain)
    (row,) = by_passes(tasks)
    assert (row["exact"], row["cells"]) == (plain["exact"], plain["cells"])
    assert (row["any"], row["passes"]) == (row["exact"], HALTING.segments)


def test_more_segments_solve_more_and_change_nothing_before(split):
    tasks, _ = vote(solver(Solves()), split, groups(split), ReasonerOptions(segments=(1, 2, 3, 4)), keep=1)
    assert [row["exact"] for row in by_passes(tasks)] == [(needed(split) <= n).mean() for n in (1, 2, 3, 4)]
    rows = split.rows(groups(split))
    few, many = (solver(hrm(), batch=24).after(rows, counts) for counts in ((1, 3), (1, 3, 40)))
    for (one, _), (other, _) in zip(few, many, strict=False):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.q, other.q)
    assert not torch.equal(many[1][0].logits, many[2][0].logits)


def test_every_view_of_a_solved_board_is_read_back_as_one_answer(split):
    effort = ReasonerOptions(segments=(9,), views=5)
    tasks, found = vote(solver(Solves()), split, groups(split), effort, keep=3)
    assert found.puzzles == 5 * len(split)
    for number, task in enumerate(tasks):
        (question,) = task.questions
        assert (task.votes, task.needed, question.answers, question.best[0].count) == (5, 1, 1, 5)
        np.testing.assert_array_equal(question.best[0].grid, split.labels[number])
        np.testing.assert_array_equal(question.input, split.inputs[number])
    assert [row["answers"] for row in by_passes(tasks)] == [1, 2, 4, 5]


def test_the_vote_counts_and_q_trusts_the_head(split):
    """Two of three first states are wrong where the board needs more than half of the segments."""

    def exact(choose):
        effort = ReasonerOptions(segments=(4,), starts=3, noise=1e-3, choose=choose)
        tasks, _ = vote(solver(Solves()), split, groups(split), effort, keep=1)
        return [(row["answers"], row["exact"], row["any"]) for row in by_passes(tasks)]

    half, all_ = ((needed(split) <= n).mean() for n in (2, 4))
    assert half < all_
    # A wrong answer with noise says q = 0, a right one without it 1.
    assert exact("q") == [(1, all_, all_), (2, all_, all_), (3, all_, all_)]
    assert exact("vote") == [(1, all_, all_), (2, all_, all_), (3, half, all_)]


def test_passes_are_the_segments_taken_where_puzzles_halt(split):
    effort = ReasonerOptions(segments=(2, 9), views=2)
    tasks, _ = vote(solver(Solves(), adaptive=True), split, groups(split), effort, keep=1)
    taken = np.ceil(needed(split))
    rows = by_passes(tasks)
    assert [row["passes"] for row in rows] == pytest.approx(
        [k * taken.clip(1, n).mean() for n in (2, 9) for k in (1, 2)]
    )
    assert rows[-1]["exact"] == 1


def test_the_first_state_is_the_models_own_and_others_are_seeded():
    model = hrm()
    few, many = first_states(model, 2, 0.5), first_states(model, 4, 0.5)
    for own, some, more in zip(model.initial(1), few, many, strict=True):
        assert torch.equal(some[0], own[0])
        assert torch.equal(some, more[:2])
        assert (more[1:] - own).std() == pytest.approx(0.5, rel=0.1)
        assert not torch.equal(more[1], more[2])
    assert not torch.equal(few.high[1] - few.high[0], few.low[1] - few.low[0])


def test_prefixes_double():
    assert [prefixes(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]
