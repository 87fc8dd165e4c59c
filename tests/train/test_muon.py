"""Muon beside AdamW: torch's own updates on two sets of parameters, exact resume, and what is refused."""

import math
import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from deeploop.cli import main
from deeploop.config.optim import OptimConfig
from deeploop.models.accounting import block_matrix_count, training_bytes
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.runs.folder import last_checkpoint, list_checkpoints
from deeploop.tasks.language.diagnose import UNDER_MUON
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.optim import learning_rate, make_optimizer, set_learning_rate, supports_conditional_step

MODEL = GPTConfig(
    blocks=2, rounds=2, width=32, heads=2, hidden=48, vocabulary=257, context=16, unigram_bias=True
)
MATRICES = {"q", "k", "v", "o", "gate", "up", "down"}
MUON = {"kind": "muon"}


def is_matrix(name):
    return name.startswith("blocks.") and name.split(".")[-2] in MATRICES


def draw_gradients(model, generator):
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def by_hand(model, config):
    """torch's two optimizers on the parameters told apart by name, and a function that sets their rates."""
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if is_matrix(name)}
    decay = config.weight_decay
    muon = torch.optim.Muon(matrices.values(), weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    rest = [named["embedding.weight"]]
    gains = [p for name, p in named.items() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": rest, "weight_decay": decay}, {"params": gains, "weight_decay": 0.0}],
        betas=config.betas,
        eps=config.eps,
    )
    assert len(matrices) + len(rest) + len(gains) == len(named)

    def step(rate):
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = rate
        muon.step()
        adamw.step()

    return step


def test_steps_are_those_of_torchs_two_optimizers():
    config = OptimConfig(steps=8, warmup_steps=3, peak_lr=1e-2, weight_decay=0.3, **MUON)
    ours = LoopedGPT(MODEL)
    theirs = deepcopy(ours)
    optimizer, step = make_optimizer(ours, config, fused=False), by_hand(theirs, config)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    for t in range(6):
        draw_gradients(ours, generators[0])
        draw_gradients(theirs, generators[1])
        rate = learning_rate(t, config)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        step(rate)
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), (t, name)


def test_every_matrix_of_a_block_moves_by_an_orthogonal_one_with_adamws_rms():
    """δ = 0.2·lr·√max(A, B)·O, where five Newton-Schulz iterations leave O's singular values around 1."""
    model = LoopedGPT(MODEL)
    config = OptimConfig(kind="muon", peak_lr=1e-2, weight_decay=0.3)
    optimizer = make_optimizer(model, config, fused=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    draw_gradients(model, torch.Generator().manual_seed(0))
    optimizer.step()
    for name, after in model.named_parameters():
        if is_matrix(name):
            moved = before[name] * (1 - 1e-2 * 0.3) - after.detach()
            values = torch.linalg.svdvals(moved / (1e-2 * 0.2 * math.sqrt(max(after.shape))))
            assert values.min() > 0.4, name
            assert values.max() < 1.4, name


def test_the_step_waits_for_the_loss():
    """Muon knows no found_inf: the caller steps, once it knows that the values are finite."""
    model = LoopedGPT(MODEL)
    optimizer = make_optimizer(model, OptimConfig(kind="muon"), fused=True)
    draw_gradients(model, torch.Generator().manual_seed(0))
    before = [p.detach().clone() for p in model.parameters()]
    assert not supports_conditional_step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.fixture(scope="module")
def run(make_config, tmp_path_factory):
    """Six steps with a checkpoint after the fourth and diagnoses before, there and after."""
    config = make_config(
        tmp_path_factory.mktemp("muon") / "run",
        model={"unigram_bias": True},
        optim=MUON,
        diagnose={"every": 4, "sublayers": ("blocks.0.mlp",), "iterations": 2},
    )
    train(config)
    return config


def test_a_checkpoint_holds_momentum_of_matrices_and_moments_of_the_rest(run):
    found = {}
    for key in load_file(last_checkpoint(run.out) / "optimizer.safetensors"):
        what, name = key.split(":")
        found.setdefault(name, set()).add(what)
    names = {name for name, _ in LoopedGPT(run.model).named_parameters()}
    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert found == {name: {"momentum_buffer"} if is_matrix(name) else adam for name in names}


def test_a_resumed_run_equals_an_uninterrupted_one(run, tmp_path):
    out = shutil.copytree(run.out, tmp_path / "run")
    shutil.rmtree(list_checkpoints(out)[-1])
    train(replace(run, out=out, resume=True))
    for name in ("model", "optimizer", "rng"):
        mine, whole = (last_checkpoint(o) / f"{name}.safetensors" for o in (out, run.out))
        assert mine.read_bytes() == whole.read_bytes(), name
    losses = [[line["loss"] for line in read_metrics(o, "train")] for o in (out, run.out)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_a_skipped_step_leaves_the_momentum_as_it_was(tiny_config, poison):
    """The fourth batch is not finite: the run ends with what it had after the third."""
    three = tiny_config("three", optim={**MUON, "steps": 3})
    train(three)
    poison(4, math.nan)
    four = tiny_config("four", optim={**MUON, "steps": 4, "non_finite": "skip"})
    train(four)
    for file in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(last_checkpoint(config.out) / file) for config in (four, three))
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs), file


def test_a_diagnosis_takes_raw_gradients_and_says_why(run, capsys):
    lines = read_metrics(run.out, "diagnose")
    assert [(line["step"], line["updates"]) for line in lines] == [(0, "raw"), (4, "raw"), (6, "raw")]
    assert all(line["kappa"] > 0 and "step_effect" not in line for line in lines)
    assert main(["diagnose", str(run.out), "--sublayers", "blocks.0.mlp", "--iterations", "2"]) == 0
    text = capsys.readouterr().out
    assert "raw updates G" in text
    assert UNDER_MUON in text


def test_a_run_keeps_its_kind_of_optimizer(run):
    changed = replace(run, resume=True, optim=replace(run.optim, kind="adamw", steps=8))
    with pytest.raises(
        ValueError, match=r"^optim\.kind=adamw: the run in .* was started with optim\.kind=muon"
    ):
        train(changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": {"parallel": "fsdp"}}, "must be adamw with device.parallel=fsdp"),
        ({"model": {"mup_base_width": 64}}, "must be adamw with model.mup_base_width=64"),
    ],
)
def test_what_muon_can_not_be_combined_with_is_named(tiny_config, change, message):
    tiny_config(**change)
    with pytest.raises(ValueError, match=f"^optim.kind=muon: {message}"):
        tiny_config(optim={"kind": "muon"}, **change)


def test_muon_keeps_one_buffer_a_matrix():
    saved = training_bytes(MODEL, 8) - training_bytes(MODEL, 8, muon=True)
    assert saved == 4 * 2 * block_matrix_count(MODEL)
