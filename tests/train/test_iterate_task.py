"""Training on an iterated task: rounds follow the batch, a resumed run is the same, mistakes are one line."""

import shutil
from dataclasses import replace

import pytest
import torch

from deeploop.cli import main
from deeploop.models.gpt import LoopedGPT
from deeploop.runs.folder import last_checkpoint, list_checkpoints, load_any_config, load_config
from deeploop.tasks import read_config
from deeploop.tasks.iterate.load import load_iterate
from deeploop.tasks.iterate.problems.base import is_test
from deeploop.tasks.iterate.task import IterateTask
from deeploop.tasks.recipes import get_recipe
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.opening import open_run
from deeploop.train.steps import non_finite_report
from deeploop.train.task import set_rounds
from iterate_runs import make_iterate_config

ALONE = World(0, 1, torch.device("cpu"))
RECIPES = ["automaton", "automaton-stack", "hops", "induction", "addition", "reachability"]


def started(tmp_path, world=ALONE, **changes):
    task = IterateTask(make_iterate_config(tmp_path, **changes), world)
    task.build()
    return task


def batches(task, count=40):
    """(rounds, the whole batch) of the next steps."""
    found = []
    for step in range(task.step, task.step + count):
        data = task.batches(step)
        set_rounds(task.model, data.rounds)
        [batch] = data.batches
        found.append((data.rounds, batch))
    return found


def test_rounds_are_the_steps_asked_for_and_all_of_them_come(tmp_path):
    task = started(tmp_path)
    seen = set()
    for rounds, (inputs, targets, share) in batches(task):
        rows = inputs[:, 1:].numpy()
        state = rows
        for _ in range(rounds):
            state = task.task.advance(rows, state)
        assert targets[:, 1:].tolist() == state.tolist()
        assert (targets[:, 0] == -1).all()
        assert share * state.size == pytest.approx(1)
        assert not is_test(task.task, rows).any()
        seen.add(rounds)
    assert seen == {1, 2, 3}


def test_another_batch_on_resume_repeats_no_instance(tmp_path):
    seen = []

    class Recording(IterateTask):
        def batches(self, step):
            data = super().batches(step)
            seen.extend(inputs for inputs, *_ in data.batches)
            return data

    for steps, batch in ((2, 4), (4, 2), (6, 8)):
        optim = {"steps": steps, "batch": batch}
        train(make_iterate_config(tmp_path / "run", optim=optim, resume=steps > 2), task=Recording)
    [(_, (whole, *_))] = batches(started(tmp_path / "whole", optim={"batch": 2 * 4 + 2 * 2 + 2 * 8}), 1)
    assert torch.equal(torch.cat(seen), whole)


def test_a_step_is_repeated_at_its_own_rounds(tmp_path):
    run = open_run(make_iterate_config(tmp_path / "run"), ALONE, quiet=True)
    first, *_, other = [run.task.batches(step) for step in range(8)]
    assert first.rounds != other.rounds
    for data in (other, first):
        non_finite_report(run, 1, data, 0.0, 0.0)
        assert run.model.rounds == data.rounds
    run.close()
    assert started(tmp_path, rounds={"sample": "fixed"}).batches(0).rounds == 3


def test_fixed_and_uniform_rounds_tell_the_steps(tmp_path):
    fixed = batches(started(tmp_path, rounds={"sample": "fixed"}))
    assert {rounds for rounds, _ in fixed} == {3}
    digits = {tuple(inputs[0, 1:4].tolist()) for _, (inputs, _, _) in fixed}
    assert digits == {(3, 3, 4), (3, 3, 5), (3, 3, 6)}  # 001, 002, 003 behind a vocabulary of three
    uniform = batches(started(tmp_path, rounds={"sample": "uniform"}))
    assert {rounds for rounds, _ in uniform} == {1, 2, 3}
    told = [inputs[0, 3].item() - 3 for _, (inputs, _, _) in uniform]
    assert told != [rounds for rounds, _ in uniform], "rounds do not follow the steps"


def test_alpha_is_that_of_the_configs_rounds_unless_it_is_recomputed(tmp_path):
    for recompute in (False, True):
        task = started(tmp_path, model={"recompute_alpha": recompute})
        for _ in range(10):
            [(rounds, _)] = batches(task, 1)
            assert task.model.blocks[0].mlp.alpha == (rounds if recompute else 3)  # R sqrt K with K = 1


def test_two_ranks_share_one_ranks_batch(tmp_path):
    noisy = {"rounds": {"noise": 0.3}}
    whole = batches(started(tmp_path, **noisy), 5)
    parts = [batches(started(tmp_path, World(rank, 2, torch.device("cpu")), **noisy), 5) for rank in (0, 1)]
    for (rounds, batch), *own in zip(whole, *parts, strict=True):
        assert {part for part, _ in own} == {rounds}
        for index in (0, 1, 3):
            assert torch.equal(batch[index], torch.cat([part[index] for _, part in own]))
        assert {part[2].item() for _, part in own} == {batch[2].item()}


def test_noise_is_added_after_each_round_in_units_of_the_stream(tmp_path):
    task = started(tmp_path, rounds={"noise": 0.3}, model={"rule": "prenorm"})
    [(rounds, batch)] = batches(task, 1)
    inputs, targets, share, noise = batch
    assert noise.shape == (*inputs.shape[:1], rounds, *inputs.shape[1:], 16)
    assert noise.std().item() == pytest.approx(0.3, rel=0.05)
    model = task.model
    context, _ = model.begin(inputs)
    x = model.input_norm(model.embedding(inputs))
    for index in range(rounds):
        x = model.round(x, index, context)
        x = x + noise[:, index] * x.square().mean(-1, keepdim=True).sqrt()
    written_out = model.read_out(x, targets).loss * share
    assert task.loss(model, batch).item() == pytest.approx(written_out.item(), rel=1e-6)
    assert task.loss(model, batch[:3]).item() != pytest.approx(written_out.item(), rel=1e-4)


def test_a_run_learns_and_says_how_far_beyond_training_it_goes(tmp_path):
    config = make_iterate_config(
        tmp_path / "run",
        data={"rule": 170, "length": 6, "train_steps": 2, "test_steps": (4, 1, 2)},  # y = x: soon learned
        optim={"steps": 60, "peak_lr": 1e-2, "batch": 16},
    )
    result = train(config, quiet=True)
    last = read_metrics(config.out, "validation")[-1]
    assert last["steps"] == [1, 2, 4]
    assert last["loss"] < 0.1
    assert last["cells_by_steps"][-1] > 0.99
    assert last["loss"] == result["loss"] == pytest.approx(sum(last["loss_by_steps"][:2]) / 2)
    assert last["cells"] == pytest.approx(sum(last["cells_by_steps"][:2]) / 2)
    model, loaded = load_iterate(config.out)
    assert isinstance(model, LoopedGPT)
    assert loaded == config == load_any_config(config.out)
    assert read_config(config.out / "config.json") == config


@pytest.mark.parametrize("task", ["automaton", "induction"])
@pytest.mark.parametrize("sample", ["steps", "uniform"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, task, sample):
    settings = {"data": {"task": task, "length": 12}, "rounds": {"sample": sample, "noise": 0.3}}
    whole = make_iterate_config(tmp_path / "whole", **settings)
    train(whole, quiet=True)
    again = replace(whole, out=tmp_path / "again", resume=True)
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(list_checkpoints(again.out)[-1])
    assert last_checkpoint(again.out).name == "step-00000004"
    train(again, quiet=True)
    for name in ("model", "optimizer", "rng"):
        one, two = (last_checkpoint(run.out) / f"{name}.safetensors" for run in (whole, again))
        assert one.read_bytes() == two.read_bytes(), name
    assert read_metrics(again.out, "validation")[-1] == read_metrics(whole.out, "validation")[-1]


def test_another_task_is_not_gone_on_with(tmp_path):
    config = make_iterate_config(tmp_path / "run")
    train(config, quiet=True)
    more = replace(config, resume=True, optim=replace(config.optim, steps=20))
    with pytest.raises(
        ValueError,
        match=r"data.rule=30: the run in .* was started with data.rule=86; `deeploop train --resume",
    ):
        train(replace(more, data=replace(config.data, rule=30)), quiet=True)
    longer = replace(more, data=replace(config.data, test_steps=(1, 50)))
    assert train(longer, quiet=True)["steps"] == [1, 50]


MISTAKES = {
    "--data.rule 256": "data.rule=256: must be 0 to 255, an elementary automaton's",
    "--data.test-steps 0 3": "data.test_steps=(0, 3): must be numbers of at least 1",
    "--data.train-steps 5": "data.train_steps=5: must be at most model.rounds=4 with rounds.sample=steps",
    "--data.task induction --data.test-steps 7": "data.test_steps=7: must be at most 6 for induction at",
    "--rounds.sample fixed --data.test-steps 1000": "data.test_steps=1000: must be at most 999 for automaton",
    "--data.length 256": "model.context=256: automaton at data.length=256 needs at least 257",
    "--data.task hops": "model.vocabulary=64: hops at data.length=24 needs at least 601",
    "--model.unigram-bias": "model.unigram_bias=True: must be False",
    "--device.parallel fsdp": "device.parallel=fsdp: must be ddp",
    "--data.length 0": "data.length=0: must be at least 1",
    "--rounds.noise -1": "rounds.noise=-1.0: must be a finite number, 0 or more",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words, capsys):
    assert main(["train", "automaton", *words.split(), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert MISTAKES[words] in said
    assert said.count("\n") == 1


def test_an_unknown_task_is_one_line(capsys):
    assert main(["train", "automaton", "--data.task", "sorting"]) == 2
    said = capsys.readouterr().err
    assert "sorting" in said
    assert "automaton" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_whole(name, tmp_path):
    config = get_recipe(name)
    small = replace(
        config,
        out=tmp_path / name,
        optim=replace(config.optim, steps=1, batch=4, warmup_steps=1),
        data=replace(config.data, test_examples=2),
        device=replace(config.device, kind="cpu"),
    )
    assert train(small, quiet=True)["ended"] == "finished"


def test_other_commands_refuse_in_one_line(tmp_path, capsys):
    config = make_iterate_config(tmp_path / "run")
    train(config, quiet=True)
    with pytest.raises(ValueError, match="a run of an iterated task; this is for language models"):
        load_config(config.out)
    for command in ("validate", "generate", "diagnose"):
        assert main([command, str(config.out)]) == 2
        said = capsys.readouterr().err
        assert "a run of an iterated task; this is for language models" in said
        assert said.count("\n") == 1
    assert main(["runs", str(tmp_path)]) == 0
    assert "% after 3 steps" in capsys.readouterr().out
