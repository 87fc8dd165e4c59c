"""A run of an iterated task that takes a second."""

from dataclasses import replace

from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, DeviceConfig, LogConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.iterate.config import IterateDataConfig, IterateTrainConfig


def make_iterate_config(out, **changes):
    """`make_iterate_config(out, data={"task": "hops"})`: a tiny run with some fields changed."""
    base = IterateTrainConfig(
        model=GPTConfig(
            blocks=1, rounds=3, width=16, heads=2, hidden=32, vocabulary=64, context=64, rule="flat"
        ),
        data=IterateDataConfig(
            length=10, train_steps=3, test_steps=(1, 2, 3), test_examples=8, validate_every=8
        ),
        optim=OptimConfig(steps=8, batch=8, warmup_steps=4, peak_lr=3e-3, floor_lr=3e-4),
        checkpoint=CheckpointConfig(every=4),
        device=DeviceConfig(kind="cpu"),
        log=LogConfig(every=1),
    )
    parts = {
        name: replace(getattr(base, name), **change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return replace(base, out=out, **parts)
