"""Two gloo ranks under torchrun, DDP and FSDP2, against one rank. One launch serves the whole file."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from known_peak import expected_mfu
from safetensors.torch import load_file
from two_ranks_worker import gradients

from deeploop.config.json import to_dict
from deeploop.models import parameter_count
from deeploop.runs.folder import list_checkpoints
from deeploop.train.checkpoint import read_state
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from iterate_runs import make_iterate_config

PARALLEL = ["ddp", "fsdp"]
REASONERS = ["hrm", "trm"]
# Sums are taken in another order on two ranks; nothing else may differ.
# Measured: 2e-7 in gradients and losses, 8e-7 in weights and moments after six steps; reasoners 2e-6 in ten.
GRADIENT_TOLERANCE = 1e-6  # of each tensor's largest entry
LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 1e-5  # of each tensor's largest entry
# Rounds and micro-batches of the steps whose traffic is counted: neither may change it.
CASES = ["1-1", "3-2"]
RECOMPUTE = ["round", "block"]
# Off by default, with a parameter outside the blocks.
OPTIONS = {"model": {"unigram_bias": True}}
UNCLIPPED = {"model": OPTIONS["model"], "optim": {"clip": 0.0}}
# Muon steps as far along a gradient's smallest directions, which are rounding, as along its largest, and
# computes in bf16. Losses do not see it. Measured: 1e-7 in losses, 1.5e-3 in weights after six steps.
MUON = {"kind": "muon", "peak_lr": 7.5e-4}
MUON_WEIGHT_TOLERANCE = 5e-3
DIAGNOSE = {"every": 6, "sublayers": ("blocks.0.mlp",), "iterations": 2}
# Rounds that are drawn, from noise, with a short gradient; and an exit gate, which wants all of it.
RECURRENT_MODEL = {"prelude": 1, "coda": 1, "first_state": "noise", "rule": "flat"}
RECURRENT = {
    injection: {
        "model": RECURRENT_MODEL | {"injection": injection},
        "rounds": {"sample": "poisson-lognormal", "backprop": 2},
    }
    for injection in ("add", "linear")
} | {
    "gated": {
        "model": RECURRENT_MODEL | {"injection": "gated", "exit_gate": True},
        "rounds": {"sample": "uniform"},
    }
}
RECURRENT_CASES = [("add", "ddp"), ("linear", "fsdp"), ("gated", "fsdp")]
# Steps that nobody looks at, so that there is something to read late.
RARELY = {"log": {"every": 5}, "data": {"validate_every": 5}, "checkpoint": {"every": 10}}
RECURRENT_TOLERANCE = 1e-4  # measured: 1.8e-5 after six steps of Adam


@pytest.fixture(scope="module")
def runs(make_config, make_puzzle_config, tmp_path_factory):
    """One rank's run, and beside it what two ranks made of the same configs."""
    folder = tmp_path_factory.mktemp("ranks")
    gradients(make_config(folder / "gradients", **UNCLIPPED))
    train(make_config(folder / "one", **OPTIONS, diagnose=DIAGNOSE))

    jobs = []
    for parallel in PARALLEL:
        device = {"parallel": parallel, "micro_batch": 2}  # two micro-batches on each rank
        resumed = folder / f"one-to-{parallel}"
        shutil.copytree(folder / "one", resumed)
        shutil.rmtree(list_checkpoints(resumed)[-1])
        for do, config in [
            (
                "gradients",
                make_config(folder / f"gradients-{parallel}", device=device, **UNCLIPPED),
            ),
            ("train", make_config(folder / parallel, device=device, diagnose=DIAGNOSE, **OPTIONS)),
            ("stop_one", make_config(folder / f"stopped-{parallel}", device=device, **OPTIONS)),
            ("train", make_config(resumed, resume=True, device=device, **OPTIONS)),
            ("poison", make_config(folder / f"poison-{parallel}", device=device)),
        ]:
            jobs.append({"do": do, "kind": "language", "config": to_dict(config)})
    jobs += traffic_jobs(make_config, folder)
    jobs += recurrent_jobs(make_config, folder)
    jobs += muon_jobs(make_config, folder)
    odd = make_config(folder / "odd", optim={"batch": 7})
    jobs.append({"do": "train", "kind": "language", "config": to_dict(odd)})
    jobs += puzzle_jobs(make_puzzle_config, folder)
    jobs += iterate_jobs(folder)
    (folder / "jobs.json").write_text(json.dumps(jobs))

    worker = Path(__file__).with_name("two_ranks_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(worker), str(folder / "jobs.json")], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, stderr=done.stderr, stdout=done.stdout)


def traffic_jobs(make_config, folder):
    """Steps whose traffic is counted, and gradients with everything that changes it."""

    def settings(do):
        return UNCLIPPED if do == "gradients" else {}

    for parallel in PARALLEL:
        for case in CASES:
            rounds, pieces = map(int, case.split("-"))
            device = {"parallel": parallel, "micro_batch": 4 // pieces}
            config = make_config(
                folder / f"traffic-{parallel}-{case}", model={"rounds": rounds}, device=device
            )
            yield {"do": "traffic", "kind": "language", "config": to_dict(config)}
        for recompute in RECOMPUTE:
            device = {"parallel": parallel, "micro_batch": 2, "recompute": recompute}
            for do in ("gradients", "traffic"):
                config = make_config(folder / f"{do}-{parallel}-{recompute}", device=device, **settings(do))
                yield {"do": do, "kind": "language", "config": to_dict(config)}
    for recompute in ("off", "round"):
        device = {"parallel": "fsdp", "micro_batch": 2, "reshard": True, "recompute": recompute}
        for do in ("gradients", "traffic"):
            config = make_config(folder / f"{do}-fsdp-reshard-{recompute}", device=device, **settings(do))
            yield {"do": do, "kind": "language", "config": to_dict(config)}


def recurrent_jobs(make_config, folder):
    """Recurrent depth; one rank's own runs are made here."""
    for injection, settings in RECURRENT.items():
        train(make_config(folder / injection, **settings))
    for injection, parallel in RECURRENT_CASES:
        device = {"parallel": parallel, "micro_batch": 2}
        config = make_config(folder / f"{injection}-{parallel}", device=device, **RECURRENT[injection])
        yield {"do": "train", "kind": "language", "config": to_dict(config)}


def muon_jobs(make_config, folder):
    """Two ranks from the start and from one rank's checkpoint; one rank's own run is made here."""
    train(make_config(folder / "muon", optim=MUON))
    resumed = folder / "muon-resumed"
    shutil.copytree(folder / "muon", resumed)
    shutil.rmtree(list_checkpoints(resumed)[-1])
    device = {"micro_batch": 2}
    for config in (
        make_config(folder / "muon-ddp", optim=MUON, device=device),
        make_config(resumed, resume=True, optim=MUON, device=device),
    ):
        yield {"do": "train", "kind": "language", "config": to_dict(config)}


def puzzle_jobs(make_puzzle_config, folder):
    """Reasoners on two ranks, from the start and from one rank's checkpoint; one rank's own are made here."""
    for kind in REASONERS:
        # Validations between checkpoints: what they gather must not be trained with.
        data = {"validate_every": 3}
        train(make_puzzle_config(folder / kind, kind, data=data))
        for parallel in PARALLEL:
            device = {"parallel": parallel, "micro_batch": 2}
            resumed = folder / f"{kind}-to-{parallel}"
            shutil.copytree(folder / kind, resumed)
            shutil.rmtree(list_checkpoints(resumed)[-1])
            for config in (
                make_puzzle_config(folder / f"{kind}-{parallel}", kind, data=data, device=device),
                make_puzzle_config(resumed, kind, data=data, resume=True, device=device),
            ):
                yield {"do": "train", "kind": kind, "config": to_dict(config)}
        for do in ("train", "late"):
            device = {"parallel": "ddp", "micro_batch": 2}
            config = make_puzzle_config(folder / f"{kind}-rarely-{do}", kind, device=device, **RARELY)
            yield {"do": do, "kind": kind, "config": to_dict(config)}


def iterate_jobs(folder):
    """Induction, whose answers vary in number, from the start and from one rank's checkpoint."""
    settings = {"data": {"task": "induction", "length": 12, "validate_every": 3}}
    train(make_iterate_config(folder / "iterate", **settings))
    resumed = folder / "iterate-resumed"
    shutil.copytree(folder / "iterate", resumed)
    shutil.rmtree(list_checkpoints(resumed)[-1])
    device = {"micro_batch": 2}
    for config in (
        make_iterate_config(folder / "iterate-ddp", **settings, device=device),
        make_iterate_config(resumed, **settings, device=device, resume=True),
    ):
        yield {"do": "train", "kind": "iterate", "config": to_dict(config)}
    # 9 rows and micro-batches of 4: the first rank has two batches, the second has one.
    data = {**settings["data"], "test_examples": 9}
    uneven = make_iterate_config(folder / "iterate-uneven", data=data, device={"micro_batch": 4})
    yield {"do": "train", "kind": "iterate", "config": to_dict(uneven)}


def losses(folder, kind):
    return {record["step"]: record["loss"] for record in read_metrics(folder, kind)}


def assert_same_tensors(file, other, tolerance):
    ours, theirs = load_file(file), load_file(other)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert expected.abs().max() > 0, name
        error = (ours[name] - expected).abs().max() / expected.abs().max()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("parallel", PARALLEL)
def test_all_ranks_leave_a_validation_that_one_was_asked_to_stop(runs, parallel):
    stopped, whole = runs.folder / f"stopped-{parallel}", runs.folder / parallel
    assert losses(stopped, "validation") == losses(whole, "validation")
    assert losses(stopped, "train") == losses(whole, "train")
    one, two = (list_checkpoints(folder)[-1] for folder in (stopped, whole))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_ranks_with_unlike_numbers_of_batches_validate(runs):
    assert set(losses(runs.folder / "iterate-uneven", "validation")) == {0, 3, 6, 8}


WAYS = [
    *PARALLEL,
    *(f"{p}-{r}" for p in PARALLEL for r in RECOMPUTE),
    "fsdp-reshard-off",
    "fsdp-reshard-round",
]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_two_ranks_equal_one_ranks(runs, way):
    files = (runs.folder / name / "gradients.safetensors" for name in (f"gradients-{way}", "gradients"))
    assert_same_tensors(*files, GRADIENT_TOLERANCE)


def traffic_of(runs, way):
    """Collectives of a step by kind, without the few numbers that every step exchanges (loss, norm)."""
    calls = json.loads((runs.folder / f"traffic-{way}" / "traffic.json").read_text())
    kinds = {"allreduce": [], "allgather_base": [], "reduce_scatter_base": []}
    for name, count in calls:
        if count > 200:
            kinds[name].append(count)
    return kinds


@pytest.mark.parametrize("case", [*CASES, *RECOMPUTE])
def test_replicas_reduce_one_gradient_a_step_whatever_the_rounds(runs, make_config, case):
    traffic = traffic_of(runs, f"ddp-{case}")
    assert traffic["allreduce"] == [4 * parameter_count(make_config("x").model)]
    assert traffic["allgather_base"] == traffic["reduce_scatter_base"] == []


@pytest.mark.parametrize("case", [*CASES, *RECOMPUTE])
def test_shards_reduce_and_gather_each_block_once_a_step_whatever_the_rounds(runs, make_config, case):
    """Two blocks and the rest: three groups, each gathered once and reduced once, however many pieces."""
    traffic = traffic_of(runs, f"fsdp-{case}")
    whole = 4 * parameter_count(make_config("x").model)
    assert traffic["allreduce"] == []
    for kind in ("allgather_base", "reduce_scatter_base"):
        assert len(traffic[kind]) == 3
        assert whole <= sum(traffic[kind]) < 1.01 * whole  # padding, so that every rank has the same


@pytest.mark.parametrize("recompute", ["off", "round"])
def test_blocks_given_back_are_gathered_again_but_reduced_once(runs, recompute):
    traffic = traffic_of(runs, f"fsdp-reshard-{recompute}")
    assert len(traffic["reduce_scatter_base"]) == 3
    # Forward and backward of 2 blocks × 3 rounds, and the rest, in 2 micro-batches.
    assert len(traffic["allgather_base"]) == 2 * (2 * 2 * 3 + 1)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_accumulated_gradients_equal_the_whole_batchs(runs, tiny_config, micro_batch):
    config = tiny_config(device={"micro_batch": micro_batch}, **UNCLIPPED)
    gradients(config)
    files = (folder / "gradients.safetensors" for folder in (config.out, runs.folder / "gradients"))
    assert_same_tensors(*files, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("name", [*PARALLEL, "one-to-ddp", "one-to-fsdp"])
@pytest.mark.parametrize("kind", ["train", "validation"])
def test_losses_of_two_ranks_equal_one_ranks(runs, name, kind):
    """From the start, and resumed from one rank's checkpoint at step 4."""
    found, expected = losses(runs.folder / name, kind), losses(runs.folder / "one", kind)
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_utilization_is_a_share_of_what_both_ranks_can_do(runs, make_config, parallel):
    config = make_config(runs.folder / parallel, **OPTIONS)
    records = read_metrics(config.out, "train")
    assert [r["mfu"] for r in records] == [pytest.approx(expected_mfu(config, r, ranks=2)) for r in records]
    assert len(records) == 6


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_checkpoint_is_the_same_whoever_wrote_it(runs, parallel):
    mine, one = (list_checkpoints(runs.folder / name)[-1] for name in (parallel, "one"))
    assert mine.name == one.name == "step-00000006"
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(mine / file, one / file, WEIGHT_TOLERANCE)
    assert read_state(mine)["loader"] == read_state(one)["loader"]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_one_rank_resumes_what_two_began(runs, make_config, tmp_path, parallel):
    run = shutil.copytree(runs.folder / parallel, tmp_path / parallel)
    shutil.rmtree(list_checkpoints(run)[-1])
    train(make_config(run, resume=True, **OPTIONS))
    assert losses(run, "train") == pytest.approx(losses(runs.folder / "one", "train"), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_nan_on_one_rank_is_named_by_both(runs, parallel):
    """Only the first rank holds it (under FSDP, in its shard); neither may wait for the other."""
    for rank in (0, 1):
        message = (runs.folder / f"poison-{parallel}" / f"error-{rank}.txt").read_text()
        assert message.startswith("step 1: ")
        assert "first non-finite tensor: weight blocks.1.mlp.branch.up.weight;" in message


def test_replicas_are_diagnosed_as_one_rank_is_and_shards_say_that_they_are_not(runs):
    expected = read_metrics(runs.folder / "one", "diagnose")
    found = read_metrics(runs.folder / "ddp", "diagnose")
    assert [line["step"] for line in found] == [line["step"] for line in expected] == [0, 6]
    for key in ("kappa", "kappa_raw", "similarity"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-3)
    assert read_metrics(runs.folder / "fsdp", "diagnose") == []
    assert (runs.stdout + runs.stderr).count("κ_R is not recorded under FSDP") == 1


@pytest.mark.parametrize("way", ["ddp", "fsdp", "to-ddp", "to-fsdp"])
@pytest.mark.parametrize("kind", REASONERS)
def test_a_reasoner_on_two_ranks_equals_one(runs, kind, way):
    assert_same_reasoner(runs.folder / f"{kind}-{way}", runs.folder / kind)


def assert_same_reasoner(mine, one):
    """Losses, weights, puzzle table, average, and the puzzles that are at work in the end."""
    for record in ("train", "validation"):
        found, expected = losses(mine, record), losses(one, record)
        assert found.keys() == expected.keys()
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=WEIGHT_TOLERANCE)
    ends = [list_checkpoints(folder)[-1] for folder in (mine, one)]
    for name in ("model", "optimizer"):
        assert_same_tensors(*(end / f"{name}.safetensors" for end in ends), WEIGHT_TOLERANCE)
    ours, theirs = (load_file(end / "task.safetensors") for end in ends)
    for name in ("inputs", "labels", "ids", "steps", "halted"):
        assert torch.equal(ours[name], theirs[name]), name
    for name in ("high", "low"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=WEIGHT_TOLERANCE)
    assert read_state(ends[0])["loader"] == read_state(ends[1])["loader"]


@pytest.mark.parametrize("kind", REASONERS)
def test_reasoners_on_two_ranks_that_are_read_back_behind_are_the_same(runs, kind):
    ends = [list_checkpoints(runs.folder / f"{kind}-rarely-{do}")[-1] for do in ("train", "late")]
    for name in ("model", "optimizer", "task"):
        one, two = ((end / f"{name}.safetensors").read_bytes() for end in ends)
        assert one == two, name
    assert read_state(ends[0])["loader"] == read_state(ends[1])["loader"]
    behind = json.loads((runs.folder / f"{kind}-rarely-late" / "run.json").read_text())["execution"]
    assert behind["lag"] == 1


@pytest.mark.parametrize(("injection", "parallel"), RECURRENT_CASES)
def test_two_ranks_take_the_same_rounds_and_reach_the_same_weights(runs, injection, parallel):
    one, two = runs.folder / injection, runs.folder / f"{injection}-{parallel}"
    for kind, count in (("train", 6), ("validation", 3)):
        expected, found = losses(one, kind), losses(two, kind)
        assert len(found) == count
        assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
    files = [list_checkpoints(run)[-1] / "model.safetensors" for run in (two, one)]
    assert_same_tensors(*files, RECURRENT_TOLERANCE)
    assert torch.isfinite(load_file(files[0])["prelude.0.mlp.branch.up.weight"]).all()


@pytest.mark.parametrize("name", ["muon-ddp", "muon-resumed"])
def test_muon_on_two_ranks_equals_one(runs, name):
    found, expected = losses(runs.folder / name, "train"), losses(runs.folder / "muon", "train")
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=LOSS_TOLERANCE)
    mine, one = (list_checkpoints(runs.folder / run)[-1] for run in (name, "muon"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(mine / file, one / file, MUON_WEIGHT_TOLERANCE)


@pytest.mark.parametrize("name", ["iterate-ddp", "iterate-resumed"])
def test_an_iterated_task_on_two_ranks_equals_one(runs, name):
    for kind in ("train", "validation"):
        found, expected = losses(runs.folder / name, kind), losses(runs.folder / "iterate", kind)
        assert found.keys() == expected.keys()
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=LOSS_TOLERANCE)
    mine, one = (list_checkpoints(runs.folder / run)[-1] for run in (name, "iterate"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(mine / file, one / file, WEIGHT_TOLERANCE)


def test_a_batch_that_ranks_cannot_share_is_refused_on_both(runs):
    for rank in (0, 1):
        message = (runs.folder / "odd" / f"error-{rank}.txt").read_text()
        assert message == "optim.batch=7: must be a multiple of the 2 ranks"


def test_the_launch_ends_quietly(runs):
    assert "terminate called" not in runs.stderr
    assert "Warning" not in runs.stderr
