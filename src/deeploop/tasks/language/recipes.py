"""Recipes of looped GPTs.

All have the unigram bias, an output bias initialized to the log unigram frequencies. The paper has none, but
without it `deeploop` and `flat` collapse under most learning-rate warm-ups that were tried (docs/escape.md).

huginn-small, parcae-small and ouro-small take the loop, injection, first state, distribution of rounds,
truncation and optimizer from the models they are named after, and the number of blocks, width and data from
GPT-2 small. The residual rule is flat, unlike in those models. Batch, steps and rates are gpt2-small's and
not tuned.
"""

from dataclasses import replace
from pathlib import Path

from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, DeviceConfig, LogConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.language.config import DataConfig, RoundsConfig, TrainConfig


def gpt2_small() -> TrainConfig:
    """The paper's GPT-2 small: 12 blocks × 3 rounds, 124 M parameters, 49 B tokens of FineWeb-Edu."""
    return TrainConfig(
        out=Path("runs/gpt2-small"),
        model=GPTConfig(blocks=12, rounds=3, width=768, heads=6, hidden=2048, unigram_bias=True),
        device=DeviceConfig(micro_batch=30),
    )


def gpt2_medium() -> TrainConfig:
    """The paper's GPT-2 medium: 24 blocks × 3 rounds, 354 M parameters, 49 B tokens of FineWeb-Edu."""
    return TrainConfig(
        out=Path("runs/gpt2-medium"),
        # 2730 is ⌊8·1024/3⌋, as in the public code; --model.hidden 2736 is a multiple of 16 and faster.
        model=GPTConfig(blocks=24, rounds=3, width=1024, heads=8, hidden=2730, unigram_bias=True),
        device=DeviceConfig(micro_batch=15),
    )


def tiny() -> TrainConfig:
    """Two blocks × 3 rounds on the bytes of Python's standard library; a minute on two CPU cores."""
    return TrainConfig(
        out=Path("runs/tiny"),
        model=GPTConfig(
            blocks=2, rounds=3, width=128, heads=2, hidden=344, vocabulary=257, context=128, unigram_bias=True
        ),
        data=DataConfig(path=Path("data/stdlib"), validation_sequences=64, validate_every=50),
        optim=OptimConfig(steps=300, batch=16, warmup_steps=200, floor_lr=1e-4),
        checkpoint=CheckpointConfig(every=100),
        log=LogConfig(every=5),
    )


def tiny_recurrent() -> TrainConfig:
    """tiny with a prelude and a coda, the flat rule, 4 rounds on average, gradient through the last 4."""
    base = tiny()
    return replace(
        base,
        out=Path("runs/tiny-recurrent"),
        model=replace(base.model, rule="flat", rounds=4, prelude=1, coda=1, injection="add"),
        data=replace(base.data, validation_rounds=(1, 2, 4, 8, 16)),
        rounds=RoundsConfig(sample="poisson-lognormal", backprop=4),
    )


def huginn_small() -> TrainConfig:
    """Huginn's loop, 3 / 6 / 3 blocks, 125 M parameters: 33 rounds on average, the last 8 in the graph."""
    return _small(
        "huginn-small",
        # Huginn's R is Poisson(rate) + 1 with a mean rate of 32.
        GPTConfig(blocks=6, rounds=33, prelude=3, coda=3, injection="linear", first_state="noise"),
        RoundsConfig(sample="poisson-lognormal", backprop=8),
        validation_rounds=(1, 4, 16, 64),
    )


def parcae_small() -> TrainConfig:
    """Parcae's loop, 4 / 4 / 4 blocks, 124 M parameters: 8 rounds on average, the last 4 in the graph."""
    config = _small(
        "parcae-small",
        GPTConfig(blocks=4, rounds=8, prelude=4, coda=4, injection="gated", first_state="zeros"),
        RoundsConfig(sample="poisson-lognormal", backprop=4),
        validation_rounds=(1, 2, 4, 16),
    )
    return replace(config, optim=replace(config.optim, kind="muon"))


def ouro_small() -> TrainConfig:
    """Ouro's loop, 12 blocks × 4 rounds, 124 M parameters, with an exit gate trained jointly."""
    model = GPTConfig(blocks=12, rounds=4, exit_gate=True)
    return _small("ouro-small", model, RoundsConfig(), validation_rounds=(1, 2, 3))


def _small(
    name: str, model: GPTConfig, rounds: RoundsConfig, validation_rounds: tuple[int, ...]
) -> TrainConfig:
    """gpt2-small with another loop, at the micro-batch that fits."""
    base = gpt2_small()
    return replace(
        base,
        out=Path("runs") / name,
        model=replace(model, rule="flat", unigram_bias=True),
        data=replace(base.data, validation_rounds=validation_rounds),
        device=DeviceConfig(),
        rounds=rounds,
    )
