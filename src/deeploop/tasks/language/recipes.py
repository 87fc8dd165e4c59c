"""Recipes of looped GPTs.

All have the unigram bias, an output bias initialized to the log unigram frequencies. The paper has none, but
without it `deeploop` and `flat` collapse under most learning-rate warm-ups that were tried (docs/escape.md).
"""

from pathlib import Path

from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, DeviceConfig, LogConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.language.config import DataConfig, TrainConfig


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
        # 2730 is the faithful ⌊8·1024/3⌋; --model.hidden 2736 is a multiple of 16 and faster.
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
