"""Recipes of looped GPTs."""

from dataclasses import replace
from pathlib import Path

from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, DeviceConfig, LogConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.language.config import DataConfig, TrainConfig


def gpt2_small() -> TrainConfig:
    """The paper's GPT-2 small: 12 blocks × 3 rounds, 124 M parameters, 49 B tokens of FineWeb-Edu."""
    return TrainConfig(
        out=Path("runs/gpt2-small"),
        model=GPTConfig(blocks=12, rounds=3, width=768, heads=6, hidden=2048),
        device=DeviceConfig(micro_batch=30),
    )


def gpt2_medium() -> TrainConfig:
    """The paper's GPT-2 medium: 24 blocks × 3 rounds, 354 M parameters, 49 B tokens of FineWeb-Edu."""
    return TrainConfig(
        out=Path("runs/gpt2-medium"),
        # 2730 is the faithful ⌊8·1024/3⌋; --model.hidden 2736 is a multiple of 16 and faster.
        model=GPTConfig(blocks=24, rounds=3, width=1024, heads=8, hidden=2730),
        device=DeviceConfig(micro_batch=15),
    )


def tiny() -> TrainConfig:
    """A minute on two CPU cores: 2 blocks × 3 rounds on the bytes of Python's standard library."""
    return TrainConfig(
        out=Path("runs/tiny"),
        model=GPTConfig(blocks=2, rounds=3, width=128, heads=2, hidden=344, vocabulary=257, context=128),
        data=DataConfig(path=Path("data/stdlib"), validation_sequences=64, validate_every=50),
        optim=OptimConfig(steps=300, batch=16, warmup_steps=200, floor_lr=1e-4),
        checkpoint=CheckpointConfig(every=100),
        log=LogConfig(every=5),
    )


def stable(config: TrainConfig) -> TrainConfig:
    """The recipe with what brings its start back from the unigram collapse at once (docs/escape.md)."""
    model = replace(config.model, unigram_bias=True)
    return replace(config, out=config.out.with_name(f"{config.out.name}-stable"), model=model)


def gpt2_small_stable() -> TrainConfig:
    """gpt2-small with an output bias that starts at the unigram frequencies, for a safer start."""
    return stable(gpt2_small())


def gpt2_medium_stable() -> TrainConfig:
    """gpt2-medium with the same bias."""
    return stable(gpt2_medium())


def tiny_stable() -> TrainConfig:
    """tiny with the same bias."""
    return stable(tiny())


def flat(config: TrainConfig) -> TrainConfig:
    """The recipe under the flat rule, x ← N(α·x + f(N(x)·g)) with α = R√K, and the unigram bias.

    Without the bias flat collapsed on text in all our runs but those on bytes (docs/results/bias).
    Batch, steps and rates are the recipe's own, none of them tuned for this rule. The one search there is
    (K = 4, width 384, 2.9 M tokens) found 4e-3 best, which says little about other sizes and lengths.
    """
    model = replace(config.model, rule="flat", unigram_bias=True)
    return replace(config, out=config.out.with_name(f"{config.out.name}-flat"), model=model)


def gpt2_small_flat() -> TrainConfig:
    """gpt2-small under the flat rule, at gpt2-small's own rate: it is not tuned for it."""
    return flat(gpt2_small())


def gpt2_medium_flat() -> TrainConfig:
    """gpt2-medium under the flat rule, at gpt2-medium's own rate."""
    return flat(gpt2_medium())


def tiny_flat() -> TrainConfig:
    """tiny under the flat rule, at tiny's own rate."""
    return flat(tiny())
