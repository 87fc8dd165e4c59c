"""Iterated tasks: each against a brute force written another way; splits share no instance; draws repeat."""

from typing import get_args, get_type_hints

import numpy as np
import pytest

from deeploop.data.draws import keys
from deeploop.tasks.iterate.config import IterateDataConfig
from deeploop.tasks.iterate.problems import TASKS, make_task
from deeploop.tasks.iterate.problems.base import draw, is_test, solve
from deeploop.tasks.iterate.problems.examples import DIGITS, Examples, held_out

LENGTH = {"automaton": 9, "hops": 5, "induction": 20, "addition": 7, "reachability": 8}
KEY = keys(0, 1)[0]


def instances(name, count=40, split="train"):
    task = make_task(name, LENGTH[name])
    return task, draw(task, split, KEY, np.arange(count))


def automaton(row, steps, rule):
    for _ in range(steps):
        padded = [0, 0, *row]
        row = [
            rule >> (4 * left + 2 * centre + right) & 1
            for left, centre, right in zip(padded, padded[1:], row, strict=False)
        ]
    return row


@pytest.mark.parametrize("rule", [86, 54, 102, 110, 0, 255])
def test_the_automaton_applies_its_rule_to_the_two_cells_before_and_the_cell(rule):
    task = make_task("automaton", 9, rule)
    rows = draw(task, "train", KEY, np.arange(20))
    for steps, found in solve(task, rows, [0, 1, 5]).items():
        assert found.tolist() == [automaton(row, steps, rule) for row in rows.tolist()]


def test_rule_86_is_the_cell_xor_either_of_the_two_before_it():
    task, rows = instances("automaton")
    one, two = (np.pad(rows, ((0, 0), (shift, 0)))[:, :9] for shift in (1, 2))
    assert (solve(task, rows, [1])[1] == rows ^ (one | two)).all()


def test_hops_follow_the_table_in_the_context():
    task, drawn = instances("hops")
    for tokens, answers in zip(task.inputs(drawn), solve(task, drawn, [3])[3], strict=True):
        begin, entries, starts = tokens[0], tokens[1:6] - 5, tokens[6:]
        table = {int(entry) // 5: int(entry) % 5 for entry in entries}
        assert begin == task.vocabulary - 1
        assert sorted(table) == sorted(table.values()) == list(range(5))
        assert answers.tolist() == [table[table[table[start]]] for start in starts.tolist()]


def hop(symbols, place):
    """The last place behind an earlier occurrence of the symbol; None without one."""
    for other in range(place - 1, -1, -1):
        if symbols[other] == symbols[place]:
            return other + 1
    return None


def test_induction_goes_behind_the_last_occurrence_again_and_again():
    task, drawn = instances("induction")
    assert (drawn[:, 1:] != drawn[:, :-1]).all()
    for symbols, answers in zip(drawn.tolist(), solve(task, drawn, [3])[3].tolist(), strict=True):
        for place, answer in enumerate(answers):
            for _ in range(3):
                place = None if place is None else hop(symbols, place)
            assert answer == (-1 if place is None else symbols[place])


def test_addition_ends_in_the_digits_of_the_sum():
    task, drawn = instances("addition")
    for pairs, digits in zip(drawn.tolist(), solve(task, drawn, [7])[7].tolist(), strict=True):
        first, second = (
            sum(10**place * digit for place, digit in enumerate(number))
            for number in zip(*(divmod(pair, 10) for pair in pairs), strict=True)
        )
        assert digits == [(first + second) // 10**place % 10 for place in range(7)]


def test_a_step_of_addition_moves_a_carry_by_one_place():
    task = make_task("addition", 5)
    pairs = np.array([[55, 45, 36, 90, 11]])  # 5+5 carries through three places that add up to 9
    found = {steps: own[0].tolist() for steps, own in solve(task, pairs, range(5)).items()}
    assert found == {
        0: [10, 9, 9, 9, 2],
        1: [0, 10, 9, 9, 2],
        2: [0, 0, 10, 9, 2],
        3: [0, 0, 0, 10, 2],
        4: [0, 0, 0, 0, 3],
    }


def test_reachability_is_a_breadth_first_search():
    task, drawn = instances("reachability")
    answers = solve(task, drawn, [0, 1, 3])
    for row, tokens in enumerate(task.inputs(drawn).tolist()):
        edges = [divmod(token - 8, 8) for token in tokens[1:10]]
        assert tokens[10:] == list(range(8))
        reached, found = {0}, {0: {0}}
        for steps in (1, 2, 3):
            reached = reached | {end for source, end in edges if source in reached}
            found[steps] = reached
        for steps, own in answers.items():
            assert own[row].tolist() == [int(node in found[steps]) for node in range(8)]


@pytest.mark.parametrize("name", TASKS)
def test_no_instance_is_in_two_splits_and_all_tokens_are_of_the_vocabulary(name):
    length = 4 if name == "reachability" else LENGTH[name]  # small enough that graphs come again
    task = make_task(name, length)
    train, test = (draw(task, split, KEY, np.arange(2000)) for split in ("train", "test"))
    tokens = task.inputs(train)
    # The table or the graph, however it is listed and wherever it is entered; else the whole row.
    listed = {"hops": slice(1, 6), "reachability": slice(1, 5)}.get(name)

    def told_apart(rows):
        return {tuple(row if listed is None else sorted(row[listed])) for row in rows.tolist()}

    seen = told_apart(tokens)
    assert not seen & told_apart(task.inputs(test))
    assert len(seen) > 90, "draws differ"
    assert tokens.shape == (2000, task.tokens)
    assert tokens.min() >= 0
    assert tokens.max() < task.vocabulary
    assert max(own.max() for own in solve(task, train, [1, 4]).values()) < task.vocabulary


@pytest.mark.parametrize("name", TASKS)
def test_a_draw_depends_on_its_number_alone(name):
    task, whole = instances(name, 40)
    assert (draw(task, "train", KEY, np.arange(13, 21)) == whole[13:21]).all()
    assert not (draw(task, "train", keys(1, 1)[0], np.arange(40)) == whole).all()


def test_a_fifth_is_held_out_whatever_the_seed():
    task = make_task("automaton", 24)
    rows = np.concatenate([draw(task, "train", KEY, np.arange(200)), held_out(task, 200)])
    assert is_test(task, rows).tolist() == [False] * 200 + [True] * 200
    some = task.make(np.random.default_rng(0).integers(0, 2**63, (20_000, 1)).astype(np.uint64))
    assert 0.18 < is_test(task, some).mean() < 0.22


def test_a_split_without_an_instance_is_one_line():
    with pytest.raises(ValueError, match=r"data.length=1: automaton has no instance of the test split"):
        held_out(make_task("automaton", 1), 1)


def test_steps_are_told_behind_the_begin_token():
    task, rows = instances("automaton", 3)
    inputs, targets = Examples(task, tells_steps=True).batch(rows, 127)
    assert inputs[:, 1 : 1 + DIGITS].tolist() == [[4, 5, 10]] * 3
    assert inputs[:, 0].tolist() == [2] * 3
    assert inputs[:, 1 + DIGITS :].tolist() == rows.tolist()
    assert (targets[:, : 1 + DIGITS] == -1).all()
    assert targets[:, 1 + DIGITS :].tolist() == solve(task, rows, [127])[127].tolist()
    plain, own = Examples(task, tells_steps=False).batch(rows, 127)
    assert plain.tolist() == task.inputs(rows).tolist()
    assert own[:, 1:].tolist() == targets[:, 1 + DIGITS :].tolist()


def test_the_config_knows_the_tasks():
    assert get_args(get_type_hints(IterateDataConfig)["task"]) == tuple(TASKS)


def test_an_unknown_task_is_one_line():
    with pytest.raises(ValueError, match=r"data.task=sorting: unknown; choose one of automaton, hops"):
        make_task("sorting", 3)
