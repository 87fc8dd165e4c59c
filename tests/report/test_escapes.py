"""Escapes: Wilson's interval against published values, and both rules on metrics written by hand."""

import json

import pytest

from deeploop.report.escapes import count, loss_at, read_outcome, table, wilson
from run_folders import write_sweep

FLOOR = 7.0


def write_run(folder, validations, *, train=(), steps=300, warmup=100, stop=False, file="metrics.jsonl"):
    """`validations`: (step, loss, similarity, verdict); `train`: (step, loss)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"optim": {"steps": steps, "warmup_steps": warmup}, "guard": {"stop": stop}}
    (folder / "config.json").write_text(json.dumps(config))
    records = [{"kind": "train", "step": step, "loss": loss} for step, loss in train]
    for step, loss, similarity, verdict in validations:
        values = {"loss": loss, "floor": FLOOR, "similarity": similarity, "verdict": verdict}
        records.append({"kind": "validation", "step": step, **values})
    records.sort(key=lambda record: record["step"])
    (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))


START = (0, 10.8, 0.0, "undecided")
COLLAPSED = (300, 7.01, 1.0, "collapsed")
HAIR = (300, 6.95, 0.99, "collapsed")
ESCAPED = (300, 5.0, 0.2, "escaped")


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # the four examples of Newcombe (1998), Statistics in Medicine 17, 857
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (0, 5, 0.0, 3.841459 / 8.841459),  # z²/(n + z²)
        (5, 5, 5 / 8.841459, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=6e-5)


@pytest.mark.parametrize(
    "config", ["{}", "[1, 2]", '{"optim": {"steps": 4}}', '{"optim": {"steps": "x"}}', "{"]
)
def test_a_damaged_config_has_no_outcome(tmp_path, config):
    write_run(tmp_path / "run", [(300, 2.0, 0.1, "escaped")], train=[(10, 3.0)])
    assert read_outcome(tmp_path / "run", {}) is not None
    (tmp_path / "run" / "config.json").write_text(config)
    assert read_outcome(tmp_path / "run", {}) is None


def test_the_share_itself_is_in_its_interval():
    for trials in range(1, 40):
        for successes in range(trials + 1):
            low, high = wilson(successes, trials)
            assert low <= successes / trials <= high


def test_wilson_solves_its_own_equation():
    """Its ends are the shares p at which |k/n − p| is z standard deviations of p itself."""
    for p in wilson(2, 7):
        assert abs(2 / 7 - p) == pytest.approx(1.959964 * (p * (1 - p) / 7) ** 0.5)
    with pytest.raises(ValueError, match="successes=3"):
        wilson(3, 2)


@pytest.mark.parametrize(
    ("last", "below", "escaped"),
    [(COLLAPSED, False, False), (HAIR, True, False), (ESCAPED, True, True)],
)
def test_the_two_rules(tmp_path, last, below, escaped):
    write_run(tmp_path, [START, last])
    outcome = read_outcome(tmp_path, {})
    assert (outcome.below_floor, outcome.escaped, outcome.ended) == (below, escaped, True)
    assert (outcome.loss, outcome.surrogate) == (last[1], False)


def test_any_validation_counts_also_one_that_was_lost_again(tmp_path):
    write_run(tmp_path, [START, (100, 5.0, 0.2, "escaped"), COLLAPSED])
    assert read_outcome(tmp_path, {}).escaped


def test_a_validation_before_the_first_step_counts_for_nothing(tmp_path):
    write_run(tmp_path, [(0, 5.0, 0.2, "escaped"), COLLAPSED])
    outcome = read_outcome(tmp_path, {})
    assert not outcome.below_floor
    assert not outcome.escaped
    write_run(tmp_path, [START])
    assert read_outcome(tmp_path, {}) is None


def test_a_reasoner_has_no_floor_to_escape(tmp_path):
    write_run(tmp_path, [])
    line = json.dumps({"kind": "validation", "step": 300, "loss": 1.0, "accuracy": 0.5})
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert read_outcome(tmp_path, {}) is None


def test_an_earlier_attempt_is_pooled(tmp_path):
    write_run(tmp_path, [START, (100, 5.0, 0.2, "escaped")], file="metrics.previous.jsonl")
    write_run(tmp_path, [START, COLLAPSED])
    outcome = read_outcome(tmp_path, {})
    assert outcome.escaped
    assert outcome.loss == COLLAPSED[1]  # the most recent attempt is what is plotted


def test_the_surrogate_is_the_mean_of_the_last_fifty_steps():
    train = [{"kind": "train", "step": step, "loss": step / 100} for step in range(10, 131, 10)]
    validation = {"kind": "validation", "step": 100, "loss": 0.5}
    records = [*train[:10], validation, *train[10:]]
    assert loss_at(records, 100) == (0.5, False)
    value, surrogate = loss_at(records, 2000)
    assert surrogate
    assert value == pytest.approx((0.9 + 1.0 + 1.1 + 1.2 + 1.3) / 5)  # steps 81 … 130
    assert loss_at([], 5) == (None, True)


def test_a_run_never_validated_after_its_start_is_told_by_the_surrogate(tmp_path):
    write_run(tmp_path, [START], train=[(40, 9.0), (80, 6.0), (90, 5.0)])
    outcome = read_outcome(tmp_path, {})
    assert (outcome.below_floor, outcome.escaped, outcome.ended) == (True, False, False)
    assert (outcome.loss, outcome.surrogate) == (pytest.approx(5.5), True)


def test_a_run_stopped_by_the_guard_has_ended_and_one_cut_off_has_not(tmp_path):
    write_run(tmp_path / "stopped", [START, (150, 7.0, 1.0, "collapsed")], stop=True)
    write_run(tmp_path / "cut", [START, (150, 7.0, 1.0, "collapsed")])
    write_run(tmp_path / "warming", [START, (50, 7.0, 1.0, "collapsed")], stop=True)
    ended = {name: read_outcome(tmp_path / name, {}).ended for name in ("stopped", "cut", "warming")}
    assert ended == {"stopped": True, "cut": False, "warming": False}


def test_counts_of_a_sweep(tmp_path):
    axes = {f"p{p}-seed{seed}": {"p": p, "seed": seed} for p in (0.25, 0.5) for seed in range(4)}
    write_sweep(tmp_path, axes)
    write_run(tmp_path / "p0.25-seed0", [START, COLLAPSED])
    write_run(tmp_path / "p0.25-seed1", [START, HAIR])
    write_run(tmp_path / "p0.25-seed2", [START, (100, 7.2, 1.0, "collapsed")])  # cut off
    # p0.25-seed3 was never begun
    write_run(tmp_path / "p0.5-seed0", [START, (300, 5.0, 0.2, "escaped")])
    write_run(tmp_path / "p0.5-seed1", [START, (300, 4.0, 0.2, "escaped")])
    write_run(tmp_path / "p0.5-seed2", [START, (200, 4.5, 0.2, "escaped")], train=[(200, 3.0), (210, 6.0)])
    write_run(tmp_path / "p0.5-seed3", [START, COLLAPSED])
    low, half = count(tmp_path)
    assert (low.axes, low.seeds, low.below_floor, low.escaped, low.cut_off) == ({"p": 0.25}, 2, 1, 0, 1)
    assert (low.mean_loss, low.escaped_interval) == (None, wilson(0, 2))
    assert (half.axes, half.seeds, half.below_floor, half.escaped, half.cut_off) == ({"p": 0.5}, 4, 3, 3, 0)
    assert (half.mean_loss, half.surrogates) == (pytest.approx((5 + 4 + 4.5) / 3), 1)
    assert half.escaped_interval == wilson(3, 4)
    assert json.loads(json.dumps(half.to_dict()))["axes"] == {"p": 0.5}
    text = table([low, half])
    assert "0.25          1/2  0.09–0.91      0/2  0.00–0.66          –        1" in text
    assert "4.500*" in text


def test_seeds_are_compared_at_a_common_step(tmp_path):
    write_sweep(tmp_path, {"a": {"seed": 0}, "b": {"seed": 1}})
    for name, early, late in (("a", 4.0, 2.0), ("b", 5.0, 3.0)):
        write_run(tmp_path / name, [START, (200, early, 0.2, "escaped"), (300, late, 0.1, "escaped")])
    assert count(tmp_path, compare_at=200)[0].mean_loss == 4.5
    assert count(tmp_path)[0].mean_loss == 2.5
