"""Votes by hand: what counts as equal, how ties are broken, when a task is solved."""

import numpy as np
import pytest

from deeploop.tasks.puzzles.voting import Ballot, budget_needed, ladder, place_of


def grid(text):
    """ "12/34" → two rows of two cells."""
    return np.array([[int(cell) for cell in row] for row in text.split("/")], dtype=np.uint8)


def ranked(*votes, choose="vote"):
    ballot = Ballot()
    for text, confidence in votes:
        ballot.add(grid(text), confidence)
    return [
        ("/".join("".join(map(str, row)) for row in vote.grid), vote.count, vote.confidence)
        for vote in ballot.ranked(choose)
    ]


def test_by_q_the_highest_confidence_wins_and_counts_break_ties():
    found = ranked(("1", 0.9), ("2", 0.8), ("2", 0.85), ("3", 0.9), ("3", 0.1), choose="q")
    assert [text for text, *_ in found] == ["3", "1", "2"]


def test_most_votes_win_whatever_the_confidence():
    assert ranked(("1", 0.99), ("2", 0.1), ("2", 0.2)) == [("2", 2, pytest.approx(0.15)), ("1", 1, 0.99)]


def test_equal_counts_are_told_apart_by_mean_confidence():
    found = ranked(("1", 0.9), ("2", 0.6), ("1", 0.1), ("2", 0.6), ("3", 1.0))
    assert [text for text, *_ in found] == ["2", "1", "3"]
    assert found[1] == ("1", 2, 0.5)


def test_full_ties_do_not_depend_on_the_order_of_the_votes():
    votes = [("21", 0.5), ("12", 0.5), ("1/2", 0.5), ("9", 0.5)]
    expected = ["9", "12", "21", "1/2"]  # by height, width, cells
    for order in (votes, votes[::-1], votes[2:] + votes[:2]):
        assert [text for text, *_ in ranked(*order)] == expected


def test_a_mean_does_not_depend_on_the_order_of_its_votes():
    """0.1 + 0.2 + 0.3 is 0.6000000000000001 in doubles, and 0.3 + 0.2 + 0.1 is 0.6."""
    found = ranked(*(("2", c) for c in (0.1, 0.2, 0.3)), *(("1", c) for c in (0.3, 0.2, 0.1)))
    assert [text for text, *_ in found] == ["1", "2"]


def test_the_same_cells_in_another_shape_are_another_answer():
    assert [count for _, count, _ in ranked(("1234", 0.5), ("12/34", 0.5), ("1/2/3/4", 0.5))] == [1, 1, 1]


def test_one_answer_is_one_entry_however_its_memory_lies():
    ballot, same = Ballot(), grid("12/34")
    ballot.add(same, 0.2)
    ballot.add(np.asfortranarray(same), 0.4)
    ballot.add(same.T.copy().T, 0.6)
    ballot.add(same.astype(np.int64), 0.8)
    (only,) = ballot.ranked()
    assert (only.count, only.confidence) == (4, pytest.approx(0.5))
    np.testing.assert_array_equal(only.grid, same)


def test_a_ballot_keeps_no_grid_that_it_was_given():
    ballot, reused = Ballot(), grid("11")
    ballot.add(reused, 0.5)
    reused[:] = 7
    ballot.add(reused, 0.5)
    assert [vote.grid.tolist() for vote in ballot.ranked()] == [[[1, 1]], [[7, 7]]]


def test_the_place_of_the_right_answer():
    ballot = Ballot()
    for text in ("1", "1", "1", "2", "2", "12"):
        ballot.add(grid(text), 0.5)
    places = [place_of(grid(text), ballot.ranked()) for text in ("1", "2", "12", "1/2")]
    assert places == [1, 2, 3, None]


def test_an_empty_grid_is_an_answer_but_never_the_right_one():
    ballot = Ballot()
    ballot.add(np.zeros((0, 0), dtype=np.uint8), 0.9)
    assert place_of(grid("1"), ballot.ranked()) is None
    assert ballot.ranked()[0].grid.shape == (0, 0)


def test_a_task_needs_all_of_its_test_inputs():
    assert budget_needed([1]) == 1
    assert budget_needed([1, 7]) == 7
    assert budget_needed([1, None]) is None  # one wrong input is a wrong task
    needed = [1, 2, 7, None]
    assert ladder(needed, (1, 2, 6, 7, 1000)) == {1: 0.25, 2: 0.5, 6: 0.5, 7: 0.75, 1000: 0.75}
