"""Training with a prelude, a coda, an injection and a first state."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from resumed_runs import losses, resumed_in_the_middle, tensors

from deeploop.cli import main
from deeploop.models.accounting import parameter_count
from deeploop.runs.folder import list_checkpoints
from deeploop.tasks.iterate.config import IterateRoundsConfig
from deeploop.tasks.language.config import RoundsConfig
from deeploop.tasks.language.task import LanguageTask
from deeploop.tasks.recipes import get_recipe
from deeploop.tasks.rounds import FirstStateSampler, RoundsSampler
from deeploop.train.active import ActiveRun
from deeploop.train.distributed import World, physical_blocks
from deeploop.train.header import header
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.rundir import load

CPU = torch.device("cpu")
SAMPLED = {"sample": "poisson-lognormal"}
SUBLAYERS = ("blocks.0.attention", "blocks.1.mlp")
PARTS = {"prelude": 1, "coda": 1, "injection": "gated", "first_state": "noise", "rule": "flat"}


def test_a_run_whose_first_state_is_noise_resumes_bit_for_bit(tiny_config):
    config = tiny_config(model=PARTS)
    copy = resumed_in_the_middle(config)
    assert losses(copy) == losses(config.out)
    assert tensors(copy) == tensors(config.out)
    assert "rounds" not in read_metrics(copy, "train")[-1]  # they are fixed


def test_first_states_are_functions_of_seed_and_sequence():
    def draw(sequences, seed=1):
        return FirstStateSampler(seed=seed, device=CPU).at(sequences, (32, 8))

    whole = draw(range(20, 24))
    assert torch.equal(torch.cat([draw(range(20, 22)), draw(range(22, 24))]), whole)  # two ranks
    for other in (draw(range(24, 28)), draw(range(20, 24), seed=2), whole.roll(1, 0)):
        assert not torch.isclose(other, whole).all(-1).any()
    assert whole.std().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("counted", [True, False])  # version 0.2.0 did not
def test_another_batch_on_resume_repeats_no_first_state(counted, tiny_config, monkeypatch):
    seen, state = [], ActiveRun.state

    class Recording(LanguageTask):
        def batches(self, step):
            data = super().batches(step)
            seen.extend(first for _, _, first in data.batches)
            return data

    def are_the_first(count, config):
        shape = (config.model.context, config.model.width)
        return torch.equal(
            torch.cat(seen), FirstStateSampler(seed=config.seed, device=CPU).at(range(count), shape)
        )

    new = () if counted else ("drawn", "begun_with")
    monkeypatch.setattr(
        ActiveRun, "state", lambda run: {name: own for name, own in state(run).items() if name not in new}
    )
    train(tiny_config(model=PARTS, optim={"steps": 2, "batch": 2}), task=Recording)
    config = tiny_config(model=PARTS, optim={"steps": 4, "batch": 4}, resume=True)
    train(config, task=Recording)
    assert are_the_first(2 * 2 + 2 * 4, config)
    if counted:  # a second change: the sequences of both batches are behind it
        train(tiny_config(model=PARTS, optim={"steps": 6, "batch": 2}, resume=True), task=Recording)
        assert are_the_first(2 * 2 + 2 * 4 + 2 * 2, config)


def test_more_steps_on_resume_keep_the_ramp_that_was_begun(tiny_config, capsys):
    ramp = {"ramp": "linear", "ramp_share": 0.5}
    short = tiny_config(model={"rounds": 5}, rounds=ramp, optim={"steps": 12})
    copy = short.out.with_name("longer")
    train(short, quiet=True)
    shutil.copytree(short.out, copy)
    train(replace(short, out=copy, resume=True, optim=replace(short.optim, steps=16)), source="here")
    whole = [record["rounds"] for record in read_metrics(copy, "train")]
    assert whole == [record["rounds"] for record in read_metrics(short.out, "train")] + [5] * 4
    assert whole[:7] == [1, 2, 2, 3, 4, 4, 5]
    assert "mean from 1 to 5 over 6 steps" in capsys.readouterr().out
    shutil.rmtree(copy)  # and in the middle of it, twice
    shutil.copytree(short.out, copy)
    for checkpoint in list_checkpoints(copy)[1:]:
        shutil.rmtree(checkpoint)
    for steps in (24, 48):
        train(replace(short, out=copy, resume=True, optim=replace(short.optim, steps=steps)), quiet=True)
    assert [record["rounds"] for record in read_metrics(copy, "train")] == whole[:12] + [5] * 36


def test_ranks_share_the_first_states_of_a_step(tiny_config):
    config = tiny_config(model=PARTS)
    whole = LanguageTask(config, World(0, 1, CPU)).batches(0).batches
    halves = [LanguageTask(config, World(rank, 2, CPU)).batches(0).batches for rank in range(2)]
    for part in range(3):
        assert torch.equal(torch.cat([half[0][part] for half in halves]), whole[0][part])


def test_an_injection_is_not_decayed_and_all_blocks_are_matrices(tiny_config):
    config = tiny_config(model=PARTS)
    task = LanguageTask(config, World(0, 1, CPU))
    model = task.build()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = task.make_optimizer(model).param_groups
    plain = {names[p] for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    assert {"injection.A_log", "injection.dt", "injection.B", "prelude.0.mlp.inner.weight"} <= plain
    matrices = {names[p].split(".")[0] for p in groups[0]["params"]}
    assert matrices == {"prelude", "blocks", "coda"}
    assert [*physical_blocks(model)] == [*model.prelude, *model.blocks, *model.coda]


def test_the_header_says_what_stands_around_the_loop(tiny_config):
    config = tiny_config(model=PARTS | {"rule": "deeploop"})
    facts = {"parameters": 1, "examples": 1, "flops_per_step": 1, "step_bytes": 1, "device": "cpu"}
    model, rule = header(config, "tiny", **facts)[1:3]
    assert model.endswith("N = 6; prelude 1, coda 1 blocks; injection: gated; first state: noise")
    assert "α = 3.464, β = 0.1443; prelude (R = 1) α = 1.414, β = 0.3536; coda (R = 1) α" in rule


@pytest.mark.parametrize("block", ["flat", "deeploop"])
def test_a_diagnosis_is_of_the_loop_at_all_its_rounds(block, tiny_config, capsys, undrawn):
    """While training, with rounds drawn and a truncated gradient, and of its checkpoint."""
    config = tiny_config(
        model=PARTS | {"rule": block},
        rounds=SAMPLED | {"backprop": 2},
        diagnose={"every": 6, "iterations": 2, "sublayers": SUBLAYERS},
    )
    train(config, quiet=True)
    last = read_metrics(config.out, "diagnose")[-1]
    words = ["diagnose", str(config.out), "--iterations", "2", "--sublayers", *SUBLAYERS, "--json"]
    assert main([*words, "--sequences", "1"]) == 0
    found = json.loads(capsys.readouterr().out)[str(config.out)]
    assert found["audit"] == []
    assert found["sublayers"].keys() == last["sublayers"].keys()
    for name, own in found["sublayers"].items():
        assert name.startswith("blocks.")
        assert len(own["update_norms"]) == len(own["sensitivity_norms"]) == 3  # of which two are trained
    assert found["kappa"] == pytest.approx(last["kappa"], rel=1e-3)
    assert found["step_effect"]["measured"] == pytest.approx(last["step_effect"]["measured"], rel=1e-2)
    assert len(found["stream"]["coda.0.mlp"]["ratio"]) == 1
    assert main([*words[:-1], "--at", "init"]) == 0
    said = (
        "each of 2 blocks is visited 3 times, prelude and coda (2 blocks) once, α is right at all 8 residuals"
    )
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("sample", ["uniform", "poisson-lognormal"])
def test_sampled_rounds_resume_bit_for_bit(sample, tiny_config):
    seen = []

    class Noting(LanguageTask):
        def loss(self, model, batch):
            seen.append(model.rounds)
            return super().loss(model, batch)

    config = tiny_config(model=PARTS, rounds={"sample": sample, "backprop": 2})
    copy = resumed_in_the_middle(config, Noting)
    assert len(set(seen[:6])) > 1
    assert seen[6:] == seen[4:6]
    assert [r["rounds"] for r in read_metrics(copy, "train")] == seen[:6]
    assert losses(copy) == losses(config.out)
    assert tensors(copy) == tensors(config.out)


def test_ranks_draw_the_same_rounds_and_seeds_draw_others(tiny_config):
    def drawn(rank=0, size=1, seed=0):
        task = LanguageTask(tiny_config(rounds=SAMPLED, seed=seed), World(rank, size, CPU))
        return [task.rounds_at(step) for step in range(20)]

    assert drawn() == drawn(0, 2) == drawn(1, 2) != drawn(seed=1)


def test_draws_have_the_law_that_is_stated():
    config = RoundsConfig(sample="poisson-lognormal")
    law = config.law(4)
    sampler = RoundsSampler(seed=1)
    drawn = [sampler.at(step, law) for step in range(4000)]
    assert (min(drawn), law.most) == (1, 16)
    assert sum(drawn) / 4000 == pytest.approx(4, abs=0.12)
    uniform = RoundsConfig(sample="uniform").law(4)
    assert (uniform.least, uniform.most, uniform.mean) == (1, 7, 4)
    narrow = RoundsConfig(sample="uniform", limit=5).law(4)
    assert (narrow.least, narrow.most, narrow.mean) == (3, 5, 4)


def test_iterated_tasks_draw_what_they_always_did():
    law = IterateRoundsConfig(sample="uniform").law(4, 2)
    sampler = RoundsSampler(seed=3)
    assert [sampler.at(step, law) for step in range(12)] == [1, 4, 1, 4, 2, 2, 3, 2, 3, 3, 3, 2]
    assert sampler.at(0, IterateRoundsConfig().law(4, 2)) == 2


@pytest.mark.parametrize(("ramp", "means"), [("linear", [1, 3, 5, 7, 9]), ("sqrt", [1, 2, 3, 5, 9])])
def test_the_mean_rises_over_the_first_share_of_the_steps(ramp, means):
    config = RoundsConfig(sample="uniform", ramp=ramp, ramp_share=0.5)
    assert [config.mean_at(step, mean=9, steps=80) for step in (0, 10, 20, 30, 40)] == means
    assert config.mean_at(79, mean=9, steps=80) == 9
    assert config.law_at(0, mean=9, steps=80).most == 1
    assert config.law_at(20, mean=9, steps=80).mean == means[2]


def test_a_validation_at_a_list_of_depths(tiny_config):
    config = tiny_config(model=PARTS, rounds=SAMPLED, data={"validation_rounds": (5, 1, 3)})
    train(config)
    last = read_metrics(config.out, "validation")[-1]
    assert last["validation_rounds"] == [1, 3, 5]
    assert last["loss_by_rounds"][1] == last["loss"]  # model.rounds
    assert len(set(last["loss_by_rounds"])) == 3
    assert "  by rounds 1: " in LanguageTask(config, World(0, 1, CPU)).describe(last)


def test_the_header_says_how_rounds_are_drawn(tiny_config):
    config = tiny_config(rounds={"sample": "uniform", "ramp": "linear", "ramp_share": 0.5})
    facts = {"parameters": 1, "examples": 1, "flops_per_step": 1, "step_bytes": 1, "device": "cpu"}
    assert (
        header(config, "tiny", **facts)[-1]
        == "rounds:    uniform, mean 3, 1 to 5; mean from 1 to 3 over 3 steps (linear)"
    )
    assert not any(line.startswith("rounds") for line in header(tiny_config(), "tiny", **facts))


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ({"limit": 4}, "rounds.limit=4: must be 0 with rounds.sample=fixed"),
        (SAMPLED | {"limit": 2}, "rounds.limit=2: must be at least model.rounds=3, the mean of the draws"),
        (
            SAMPLED | {"limit": 10**11},
            f"rounds.limit={10**11}: must be at most 10000; lower it, or model.rounds=3",
        ),
        ({"sample": "uniform", "limit": 6}, "rounds.limit=6: must be at most 5 with rounds.sample=uniform"),
        (SAMPLED | {"spread": 0.0}, "rounds.spread=0.0: must be above 0"),
        ({"ramp_share": 0.0}, "rounds.ramp_share=0.0: must be above 0"),
        ({"backprop": -1}, "rounds.backprop=-1: must be 0 (all rounds) or more"),
        ({"backprop": 4}, "rounds.backprop=4: must be at most 3, the most rounds of a step"),
        (SAMPLED | {"backprop": 13}, "rounds.backprop=13: must be at most 12, the most rounds of a step"),
        (SAMPLED | {"backprop": 2}, "rounds.backprop=2: must be 0 with model.injection=none"),
    ],
)
def test_rounds_that_can_not_be_are_errors_of_one_line(rounds, message, tiny_config):
    with pytest.raises(ValueError) as caught:
        tiny_config(rounds=rounds)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_memory_and_flops_are_those_of_the_rounds_in_the_graph(tiny_config):
    def task(**rounds):
        return LanguageTask(tiny_config(model=PARTS, rounds=rounds), World(0, 1, CPU))

    fixed, sampled = task(), task(**SAMPLED)
    assert sampled.step_bytes > fixed.step_bytes  # of the most rounds there are
    assert task(**SAMPLED, backprop=3).step_bytes == fixed.step_bytes
    assert sampled.flops_per_step == pytest.approx(fixed.flops_per_step, rel=1e-3)  # the same mean
    assert 0.75 < task(**SAMPLED, backprop=2).flops_per_step / fixed.flops_per_step < 0.85
    assert task(**SAMPLED, backprop=2).build().backprop == 2


def test_a_resume_under_another_distribution_is_refused(tiny_config):
    config = tiny_config(rounds=SAMPLED)
    train(config)
    with pytest.raises(
        ValueError, match=r"rounds.sample=uniform: the run in .* with rounds.sample=poisson-logn"
    ):
        train(replace(config, resume=True, rounds=RoundsConfig(sample="uniform")))


def test_the_recipe_is_what_its_page_says(tmp_path, corpus):
    config = get_recipe("tiny-recurrent")
    model = config.model
    assert (model.prelude, model.blocks, model.coda, model.rounds) == (1, 2, 1, 4)
    assert (model.injection, model.rule) == ("add", "flat")
    assert (config.rounds.sample, config.rounds.backprop) == ("poisson-lognormal", 4)
    small = replace(model, width=32, heads=2, hidden=64, context=32)
    config = replace(
        config,
        out=tmp_path / "run",
        model=small,
        data=replace(config.data, path=corpus),
        optim=replace(config.optim, steps=2, warmup_steps=1),
    )
    assert train(config, quiet=True)["ended"] == "finished"
    assert read_metrics(config.out, "validation")[-1]["validation_rounds"] == [1, 2, 4, 8, 16]
    loaded, _ = load(config.out)
    assert loaded.visits == 1 + 2 * 4 + 1
    assert loaded.backprop is None  # evaluation and generation have no graph to cut


@pytest.mark.parametrize(
    ("name", "blocks", "millions", "rounds", "rest"),
    [
        ("huginn-small", (3, 6, 3), 124.8, "1 to 132; gradient through the last 8", "adamw"),
        ("parcae-small", (4, 4, 4), 124.2, "1 to 32; gradient through the last 4", "muon"),
        ("ouro-small", (0, 12, 0), 123.6, None, "adamw"),
    ],
)
def test_recipes_of_gpt2_small_s_size(name, blocks, millions, rounds, rest, tmp_path, corpus, capsys):
    config = get_recipe(name)
    model = config.model
    assert (model.prelude, model.blocks, model.coda) == blocks
    assert parameter_count(model) / 1e6 == pytest.approx(millions, abs=0.05)
    assert config.optim.kind == rest
    # The recipe itself, shown and trained for a step, at a width that a CPU takes.
    words = (
        f"train {name} --out {tmp_path / 'run'} --data.path {corpus} --model.vocabulary 257 --model.width 16 "
        "--model.heads 2 --model.hidden 16 --model.context 16 --optim.batch 2 --optim.steps 1 "
        "--optim.warmup-steps 1 --data.validation-sequences 2 --device.kind cpu"
    ).split()
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    shown = [line for line in out.splitlines() if line.startswith("rounds:")]
    assert (rounds in shown[0]) if rounds else not shown
    assert ("gate:      joint" in out) == (name == "ouro-small")
    assert main([*words, "--quiet"]) == 0
    assert len(read_metrics(tmp_path / "run", "validation")[-1]["loss_by_rounds"]) in (3, 4)
