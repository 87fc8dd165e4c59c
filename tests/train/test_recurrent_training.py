"""Training with a prelude, a coda, an injection and a first state."""

import shutil
from dataclasses import replace

import pytest
import torch

from deeploop.train.checkpoint import last_checkpoint, list_checkpoints
from deeploop.train.distributed import World, physical_blocks
from deeploop.train.header import Facts, header
from deeploop.train.language import LanguageTask
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.rounds import FirstStateSampler

CPU = torch.device("cpu")
PARTS = {"prelude": 1, "coda": 1, "injection": "gated", "first_state": "noise", "block": "flat"}


def losses(folder):
    return [(r["step"], r["loss"]) for r in read_metrics(folder, "train")]


def tensors(folder):
    return {path.name: path.read_bytes() for path in last_checkpoint(folder).glob("*.safetensors")}


def resumed_in_the_middle(config):
    """What a run leaves that is resumed at its first checkpoint, beside one that was never stopped."""
    train(config)
    copy = config.out.with_name("resumed")
    shutil.copytree(config.out, copy)
    shutil.rmtree(list_checkpoints(copy)[-1])
    train(replace(config, out=copy, resume=True))
    return copy


def test_a_run_whose_first_state_is_noise_resumes_bit_for_bit(tiny_config):
    config = tiny_config(model=PARTS)
    copy = resumed_in_the_middle(config)
    assert losses(copy) == losses(config.out)
    assert tensors(copy) == tensors(config.out)


def test_first_states_are_functions_of_seed_step_and_place_in_the_batch():
    def draw(step, sequences, seed=1):
        sampler = FirstStateSampler(seed=seed, batch=4, device=CPU)
        return sampler.at(step, sequences, (32, 8))

    whole = draw(5, range(4))
    assert torch.equal(torch.cat([draw(5, range(2)), draw(5, range(2, 4))]), whole)  # two ranks
    for other in (draw(6, range(4)), draw(5, range(4), seed=2), whole.roll(1, 0)):
        assert not torch.isclose(other, whole).all(-1).any()
    assert whole.std().item() == pytest.approx(1, abs=0.1)


def test_ranks_share_the_first_states_of_a_step(tiny_config):
    config = tiny_config(model=PARTS)
    whole = LanguageTask(config, World(0, 1, CPU)).micro_batches()
    halves = [LanguageTask(config, World(rank, 2, CPU)).micro_batches() for rank in range(2)]
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
    config = tiny_config(model=PARTS | {"block": "sandwich"})
    facts = Facts("tiny", parameters=1, examples=1, flops_per_step=1, step_bytes=1, device="cpu")
    model, rule = header(config, facts)[1:3]
    assert model.endswith("N = 6; prelude 1, coda 1 blocks; injection: gated; first state: noise")
    assert "α = 3.464, β = 0.1443; prelude (R = 1) α = 1.414, β = 0.3536; coda (R = 1) α" in rule


def test_a_diagnosis_while_training_is_refused(tiny_config):
    with pytest.raises(
        ValueError, match=r"diagnose.every=2: is for models with model.prelude=0, this one has 1"
    ):
        train(tiny_config(model=PARTS, diagnose={"every": 2}))
