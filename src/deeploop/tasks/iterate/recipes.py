"""Recipes for iterated tasks: looped blocks that learn one step of a task, in minutes on a CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, LogConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.iterate.config import IterateDataConfig, IterateRoundsConfig, IterateTrainConfig


def automaton() -> IterateTrainConfig:
    """One block learns the step of a cellular automaton: trained on 1 to 4 steps, tested on up to 200."""
    return IterateTrainConfig(
        out=Path("runs/automaton"),
        model=GPTConfig(
            blocks=1, rounds=4, width=64, heads=2, hidden=172, vocabulary=64, context=256, rule="flat"
        ),
        data=IterateDataConfig(test_steps=(1, 2, 4, 8, 16, 32, 64, 77, 127, 200), test_examples=100),
        optim=OptimConfig(steps=2_000, batch=64, peak_lr=4e-3, floor_lr=4e-4, warmup_steps=100),
        # With noise 16 of 17 seeds extrapolate to 200 steps, without it about half (docs/depth.md).
        rounds=IterateRoundsConfig(noise=0.3),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(every=20),
    )


def automaton_stack() -> IterateTrainConfig:
    """The automaton for four layers without a loop, which read the number of steps in the input."""
    looped = automaton()
    return replace(
        looped,
        out=Path("runs/automaton-stack"),
        model=replace(looped.model, blocks=4, rounds=1),
        rounds=IterateRoundsConfig(sample="fixed"),
    )


def hops() -> IterateTrainConfig:
    """A permutation of 8 nodes is in the context; one block learns to follow it, one hop per round."""
    base = _like_automaton("hops", length=8, vocabulary=128, test_steps=(1, 2, 4, 8, 12, 24, 77, 200))
    # 2,000 steps are too few: only one seed of three has learned the task by then.
    return _with_injection(replace(base, optim=replace(base.optim, steps=4_000)))


def induction() -> IterateTrainConfig:
    """p-hop induction over 32 symbols with two blocks, as an induction head takes two layers."""
    config = _like_automaton("induction", length=32, vocabulary=64, test_steps=(1, 2, 4, 6, 8))
    return replace(config, model=replace(config.model, blocks=2))


def addition() -> IterateTrainConfig:
    """One block learns to add two numbers of 24 digits, carrying by one place per round."""
    base = _like_automaton("addition", length=24, vocabulary=128, test_steps=(1, 2, 4, 8, 16, 24, 77, 200))
    return _with_injection(base)


def reachability() -> IterateTrainConfig:
    """A graph of 8 nodes is in the context; one block learns which are reachable, one step per round."""
    return _like_automaton("reachability", length=8, vocabulary=128, test_steps=(1, 2, 4, 6, 8))


def _with_injection(config: IterateTrainConfig) -> IterateTrainConfig:
    """Inject the input into every round; without it these tasks extrapolate little (docs/depth.md)."""
    model = replace(config.model, injection="gated")
    return replace(config, model=model, rounds=IterateRoundsConfig(noise=0.3))


def _like_automaton(
    task: Literal["hops", "induction", "addition", "reachability"],
    *,
    length: int,
    vocabulary: int,
    test_steps: tuple[int, ...],
) -> IterateTrainConfig:
    """Make the config of another task, with the automaton's block, learning rate and batch."""
    base = automaton()
    return replace(
        base,
        out=Path("runs") / task,
        model=replace(base.model, vocabulary=vocabulary),
        data=replace(base.data, task=task, length=length, test_steps=test_steps),
        rounds=IterateRoundsConfig(),
    )
