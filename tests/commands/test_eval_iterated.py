"""`deeploop eval` on the run of an iterated task: the matrix, its files, and what it refuses."""

import json

import pytest

from deeploop.cli import main
from deeploop.report.results import read_evaluations
from deeploop.train.loop import train
from iterate_runs import make_iterate_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: rounds that are the steps, and a stack that is told them."""
    folder = tmp_path_factory.mktemp("runs")
    train(make_iterate_config(folder / "looped"), quiet=True)
    stack = {"model": {"blocks": 2, "rounds": 1}, "rounds": {"sample": "fixed"}}
    train(make_iterate_config(folder / "stack", **stack), quiet=True)
    hops = {"data": {"task": "hops", "length": 5}}
    train(make_iterate_config(folder / "hops", **hops), quiet=True)
    return folder


def test_rounds_and_steps_are_a_matrix_with_the_copying_baseline(runs, capsys):
    words = ["--steps", "1", "3", "9", "--limit", "6", "--device", "cpu"]
    assert main(["eval", str(runs / "looped"), *words]) == 0
    said = capsys.readouterr().out
    assert "trained on 1 to 3 steps, rounds: steps" in said
    assert "copying" in said
    [record] = read_evaluations(runs / "looped")
    assert (record["steps"], record["rounds"], record["examples"]) == ([1, 3, 9], [1, 3, 9], 6)
    assert [len(row) for row in record["cells"]] == [3, 3, 3]
    assert list(record["copying"]) == ["9"]
    for name in ("steps.png", "spacetime.png"):
        assert (runs / "looped" / name).stat().st_size > 1000
    # The same settings replace a result, others stand beside it; the report copes with both.
    assert main(["eval", str(runs / "looped"), *words]) == 0
    assert main(["eval", str(runs / "looped"), *words, "--rounds", "2", "--length", "70", "--json"]) == 0
    records = read_evaluations(runs / "looped")
    assert [(own["rounds"], own["length"]) for own in records] == [([1, 3, 9], 10), ([2], 70)]
    assert main(["report", str(runs), "--out", str(runs / "report")]) == 0
    assert main(["runs", str(runs)]) == 0


def test_a_stack_is_evaluated_at_its_own_rounds(runs, capsys):
    assert main(["eval", str(runs / "stack"), "--steps", "2", "5", "--limit", "4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["rounds"], record["steps"], record["sample"]) == ([1], [2, 5], "fixed")
    assert not (runs / "stack" / "spacetime.png").exists()


MISTAKES = {
    "looped --steps 0": "steps=0: must be at least 1",
    "looped --rule 256": "data.rule=256: must be 0 to 255",
    "looped --rounds 0": "rounds=0: must be at least 1",
    "looped --shots 1": "--shots: for language models; ",
    "looped --views 3": "--views: for reasoners",
    "stack --steps 1000": "steps=1000: must be at most 999 for automaton of this size",
    "hops --length 6": "length=6: hops has other tokens there than at the trained length 5",
    "hops --rule 30": "rule=30: for the automaton; the run's task is hops",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(runs, words, capsys):
    name, *rest = words.split()
    assert main(["eval", str(runs / name), *rest, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert MISTAKES[words] in said
    assert said.count("\n") == 1


def test_steps_are_refused_for_other_runs(capsys):
    assert main(["eval", "shipped", "--steps", "3"]) == 2
    assert "--steps: for iterated tasks; shipped is another kind of run" in capsys.readouterr().err
