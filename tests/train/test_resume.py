"""A run that is told to stop, or interrupted, and resumed, equals one that never stopped.

A process of its own and a real signal; on the CPU the equality is to the last bit. Runs that are killed:
test_puzzle_resume.py and tests/faults.
"""

import json
import os
import shutil
import signal
from functools import partial

import pytest
from acting import acting, stopped_in, stopped_in_evaluation

from deeploop.cli import main
from deeploop.runs.folder import last_checkpoint, list_checkpoints
from deeploop.train.checkpoint import read_state
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.stop import StopRequest
from forked import finish, start, wait_until
from iterate_runs import make_iterate_config

LENGTH = ["--optim.steps", 60, "--checkpoint.every", 10, "--data.validate-every", 20]
PATIENCE = 300  # seconds, for a machine with other work; one is enough
CLOCKS = ("seconds", "tokens_per_s", "mfu")


@pytest.fixture(scope="module")
def uninterrupted(train_arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(train_arguments(out, *LENGTH)) == 0
    return out


def repeatable(folder):
    """The metrics of a run, without times."""
    records = [r for r in read_metrics(folder) if r["kind"] in ("train", "validation")]
    return [{key: value for key, value in r.items() if key not in CLOCKS} for r in records]


def tensors(folder):
    """The bytes of the last checkpoint's tensor files."""
    return {path.name: path.read_bytes() for path in last_checkpoint(folder).glob("*.safetensors")}


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    uninterrupted, train_arguments, tmp_path, capsys, sent, code
):
    out, stdout, stderr = (tmp_path / name for name in ("run", "stdout", "stderr"))
    process = start(lambda: main(train_arguments(out, *LENGTH)), stdout, stderr)
    wait_until(lambda: last_checkpoint(out), process, PATIENCE)
    os.kill(process, sent)
    assert (finish(process, PATIENCE), stderr.read_text()) == (code, "")
    reached = read_state(last_checkpoint(out))["step"]
    assert reached < 60, "the run ended before the signal came"
    command = f"deeploop train --resume {out}"
    said = f"stopped at step {reached}; saved {last_checkpoint(out)}; continue with: {command}"
    assert stdout.read_text().splitlines()[-1] == said

    assert main(["train", "--resume", str(out)]) == 0  # nothing else is repeated
    assert "finished at step 60" in capsys.readouterr().out
    assert repeatable(out) == repeatable(uninterrupted)
    assert tensors(out) == tensors(uninterrupted)


def test_a_measured_rate_is_the_same_after_a_resume(train_arguments, tmp_path, capsys):
    """--auto-lr finds the same rate again; with more steps its warm-up is longer, which is said."""
    whole = tmp_path / "whole"
    more = ["--optim.steps", 12, "--optim.batch", 32, "--checkpoint.every", 6, "--model.blocks", 1]
    words = train_arguments(whole, *more, "--auto-lr")
    at = words.index("--optim.warmup-steps")  # what --auto-lr settles
    del words[at : at + 2]
    assert main(words) == 0
    halves = {name: shutil.copytree(whole, tmp_path / name) for name in ("words", "alone", "longer")}
    for half in halves.values():
        shutil.rmtree(last_checkpoint(half))
    again = [str(halves["words"]) if word == str(whole) else word for word in words]
    assert main([*again, "--resume"]) == 0
    assert main(["train", "--resume", str(halves["alone"])]) == 0
    for name in ("words", "alone"):
        assert repeatable(halves[name]) == repeatable(whole)
        assert tensors(halves[name]) == tensors(whole)
    capsys.readouterr()
    assert main(["train", "--resume", str(halves["longer"]), "--auto-lr", "--optim.steps", "24"]) == 0
    said = capsys.readouterr().out
    assert "resuming with optim.warmup_steps=" in said
    assert "optim.peak_lr=" not in said


def test_resuming_a_finished_run_changes_nothing(uninterrupted, train_arguments, capsys):
    before = tensors(uninterrupted), read_metrics(uninterrupted)
    assert main(train_arguments(uninterrupted, *LENGTH, "--resume")) == 0
    assert (tensors(uninterrupted), read_metrics(uninterrupted)) == before
    last = read_metrics(uninterrupted, "validation")[-1]["loss"]
    out = capsys.readouterr().out
    assert "already finished its 60 steps" in out
    assert f"last validation {last:.4f}" in out


def test_a_finished_run_keeps_the_settings_it_was_trained_with(train_arguments, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(train_arguments(out)) == 0
    config = (out / "config.json").read_bytes()
    assert main(train_arguments(out, "--resume", "--optim.peak-lr", 1e-2, "--optim.steps", 4)) == 0
    said = capsys.readouterr().out
    assert "already finished its 6 steps, more than the 4 asked for" in said
    assert "finished at step 6" in said
    assert (out / "config.json").read_bytes() == config
    assert read_metrics(out, "resume") == []


@pytest.mark.parametrize(
    ("warmup", "block", "says"),
    [
        (9, "deeploop", "; raise --steps or lower --warmup\n"),
        (
            9,
            "deeploop --model.no-unigram-bias",
            ", and a collapse says little yet; raise --steps (with fewer --warmup",
        ),
        (9, "averaged", "; raise --steps or lower --warmup\n"),
        (8, "deeploop", None),
    ],
)
def test_a_run_that_ends_inside_its_warm_up_says_so(train_arguments, tmp_path, capsys, warmup, block, says):
    """Its verdict `collapsed` would otherwise look like a finding, of a block that can collapse."""
    steps = ["--optim.steps", 8, "--optim.warmup-steps", warmup]
    assert main(train_arguments(tmp_path / "run", *steps, "--rule", *block.split(), "--dry-run")) == 0
    said = capsys.readouterr().out
    assert ("inside its warm-up" in said) == (says is not None)
    assert (
        says is None or f"ends at step 8, inside its warm-up of 9: the learning rate only rises{says}" in said
    )


def test_a_stop_before_the_next_validation_reports_the_last_one(
    train_arguments, tmp_path, capsys, monkeypatch
):
    assert main(train_arguments(tmp_path / "run", "--optim.steps", 5)) == 0
    loss = read_metrics(tmp_path / "run", "validation")[-1]["loss"]
    capsys.readouterr()

    class StopAtOnce(StopRequest):
        requested, exit_code = True, 143

        def __init__(self): ...

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

    monkeypatch.setattr("deeploop.commands.train.StopRequest", StopAtOnce)
    assert main(train_arguments(tmp_path / "run", "--optim.steps", 9, "--resume", "--quiet")) == 143
    assert f"last validation {loss:.4f}" in capsys.readouterr().out


def test_a_resumed_run_may_change_its_length_and_says_so(train_arguments, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(train_arguments(out, "--optim.steps", 4)) == 0
    assert main(train_arguments(out, "--optim.steps", 6, "--resume")) == 0
    assert "resuming with optim.steps=6 (was 4)" in capsys.readouterr().out
    assert read_metrics(out, "resume")[0]["changes"] == {"optim.steps": [4, 6]}
    assert [path.name for path in list_checkpoints(out)] == ["step-00000004", "step-00000006"]


def test_the_first_signal_asks_and_the_second_acts():
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs start with it ignored
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_second_sigterm_only_asks_again():
    """Schedulers and torchrun both pass theirs on; the save must outlive that."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


def test_a_validation_that_a_stop_left_out_is_made_up_for(make_config, tmp_path):
    """Told to stop at the step at which a validation is due, the run leaves at once; the resume does it."""
    train(make_config(tmp_path / "whole"))
    assert stopped_in(4, make_config(tmp_path / "run"))["ended"] == "stopped"
    assert [line["step"] for line in read_metrics(tmp_path / "run", "validation")] == [0]
    train(make_config(tmp_path / "run", resume=True))
    assert repeatable(tmp_path / "run") == repeatable(tmp_path / "whole")


@pytest.mark.parametrize("step", [0, 4, 6])
@pytest.mark.parametrize("kind", ["language", "puzzle", "iterate"])
def test_a_stop_abandons_a_validation_and_the_resume_repeats_it(
    make_config, make_puzzle_config, tmp_path, capsys, kind, step
):
    """At the start, on the way and at the last step; the batch in which the stop comes is the last one."""
    small = {"optim": {"steps": 6}, "device": {"micro_batch": 2}}
    make = {
        "language": partial(make_config, data={"validation_rounds": (1,)}),
        "puzzle": make_puzzle_config,
        "iterate": partial(make_iterate_config, data={"validate_every": 4}),
    }[kind]
    make = partial(make, **small)
    whole, out = tmp_path / "whole", tmp_path / "run"
    train(make(whole))
    result, shares = stopped_in_evaluation([0, 4, 6].index(step), make(out))
    assert (result["ended"], result["step"]) == ("stopped", step)
    assert len(shares) == 2
    assert 0 == shares[0] < shares[1] < 1
    assert step not in [line["step"] for line in read_metrics(out, "validation")]
    assert [path.name for path in list_checkpoints(out)][-1:] == ([f"step-{step:08d}"] if step else [])
    for already in (False, True):
        capsys.readouterr()
        result = train(make(out, resume=True))
        assert ("already finished its 6 steps" in capsys.readouterr().out) == already
        assert result["ended"] == "finished"
        assert result["loss"] == read_metrics(whole, "validation")[-1]["loss"]
        assert repeatable(out) == repeatable(whole)
        assert tensors(out) == tensors(whole)


def test_a_validation_repeated_twice_is_one_line(tiny_config):
    """A run that a stop ended in a validation is resumed, and killed before it saves."""

    class Killed(BaseException):
        pass

    def kill(model):
        raise Killed

    result, _ = stopped_in_evaluation(1, tiny_config(device={"micro_batch": 2}))
    assert (result["ended"], result["step"]) == ("stopped", 4)
    config = tiny_config(resume=True)
    with pytest.raises(Killed):
        train(config, task=acting(config, 5, kill))
    train(config)
    assert [line["step"] for line in read_metrics(config.out, "validation")] == [0, 4, 6]


def test_a_run_is_resumed_by_its_own_config(train_arguments, tmp_path, capsys):
    """Only what is given changes: nothing of the recipe's comes back."""
    out = tmp_path / "run"
    assert main(train_arguments(out)) == 0
    before = json.loads((out / "config.json").read_text())
    capsys.readouterr()
    assert main(["train", "--resume", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{out} already finished its 6 steps; train on with a larger --steps" in said.splitlines()
    assert "resuming with" not in said

    assert main(["train", "--optim.steps", "9", f"--resume={out}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "resuming" in line] == ["resuming with optim.steps=9 (was 6)"]
    after = json.loads((out / "config.json").read_text())
    assert (after.pop("resume"), before.pop("resume")) == (True, False)
    assert after == {**before, "optim": {**before["optim"], "steps": 9}}
    assert [record["step"] for record in read_metrics(out, "train")] == list(range(1, 10))


def test_a_moved_run_goes_on_where_it_lies(train_arguments, tmp_path):
    assert main(train_arguments(tmp_path / "run")) == 0
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert main(["train", "--resume", str(moved), "--optim.steps", "7"]) == 0
    assert last_checkpoint(moved).name == "step-00000007"
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_is_not_begun_again(train_arguments, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(train_arguments(out)) == 0
    shutil.rmtree(out / "checkpoints")
    metrics = (out / "metrics.jsonl").read_bytes()
    assert main(["train", "--resume", str(out)]) == 2
    assert f"{out}: holds no checkpoint to continue from; start a new run" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes() == metrics


def test_a_run_started_from_a_runs_config_is_the_same_run(uninterrupted, tmp_path):
    out = tmp_path / "again"
    assert main(["train", "--config", str(uninterrupted / "config.json"), "--out", str(out)]) == 0
    assert repeatable(out) == repeatable(uninterrupted)
    assert tensors(out) == tensors(uninterrupted)


def test_a_config_does_not_resume_by_itself(train_arguments, tmp_path, capsys):
    """A sweep's config.json says resume, and would go on in the folder that it came from."""
    out = tmp_path / "run"
    assert main(train_arguments(out, "--resume")) == 0
    assert main(["train", "--config", str(out / "config.json"), "--optim.steps", "9"]) == 2
    assert "already holds a run at step-00000006; add --resume" in capsys.readouterr().err
