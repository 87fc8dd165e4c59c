"""The iterated tasks, whose data are generated during training: build, loss, evaluate.

The number of steps of every batch is drawn from 1 to `data.train_steps`, and its number of rounds follows
`rounds.py`. Both depend only on seed and step. The evaluation uses more steps than training.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deeploop.data.draws import keys
from deeploop.data.loader_state import check_position
from deeploop.models.accounting import flops_per_token, training_bytes
from deeploop.models.gpt import LoopedGPT
from deeploop.tasks.iterate.config import IDENTITY, IterateTrainConfig
from deeploop.tasks.iterate.problems.base import draw
from deeploop.tasks.iterate.problems.examples import held_out
from deeploop.tasks.iterate.scoring import score_sums, scores
from deeploop.tasks.rounds import NoiseSampler, RoundsSampler, draw_upto
from deeploop.train.distributed import World, arithmetic
from deeploop.train.execution import Capabilities
from deeploop.train.task import OnBatch, StepData, Task, ignore_batch

DATA_KEY, STEPS_KEY = 1, 2  # combined with the seed


def training_flops_per_token(config: IterateTrainConfig) -> int:
    """Training FLOPs per token, on average over the number of rounds."""
    most = {"steps": config.data.train_steps, "uniform": config.model.rounds}.get(config.rounds.sample)
    rounds = config.model.rounds if most is None else (1 + most) / 2
    return flops_per_token(replace(config.model, context=config.examples.tokens), rounds)


Batch = tuple[Tensor, ...]  # inputs and targets (B, T), an answer's share of the step's loss, noise if any


class IterateTask(Task):
    """A looped GPT on an iterated task."""

    config: IterateTrainConfig
    model: LoopedGPT

    def __init__(self, config: IterateTrainConfig, world: World) -> None:
        super().__init__(config, world)
        batch, data = config.optim.batch, config.data
        self.shown = config.examples
        self.task = self.shown.task
        # Memory and FLOPs depend on the actual sequence length and on the most rounds.
        most = data.train_steps if config.rounds.sample == "steps" else config.model.rounds
        actual = replace(config.model, context=self.shown.tokens, rounds=most)
        needs = partial(training_bytes, actual, muon=config.optim.kind == "muon")
        self.fit_memory(needs, self.shown.tokens)
        whole = held_out(self.task, data.test_examples)
        self.test = whole[world.rank :: world.size]
        self._rows_of_all = len(whole) // world.size  # some ranks have one more
        self.examples = config.optim.steps * batch
        self.targets_per_step = batch * self.shown.tokens
        self.flops_per_step = self.targets_per_step * training_flops_per_token(config)
        self.step = 0  # the step whose batch comes next
        self._key, self._steps_key = (keys(config.seed, number)[0] for number in (DATA_KEY, STEPS_KEY))
        self._rounds = RoundsSampler(config.seed)
        self._noise = NoiseSampler(config.rounds, seed=config.seed, device=world.device)

    @property
    def capabilities(self) -> Capabilities:
        """Steps can be captured, with a graph for each number of rounds, which is fixed within a step."""
        return Capabilities(
            recordable=True,
            draws_rounds=self.config.rounds.sample != "fixed",
            skippable=self.config.optim.non_finite == "skip",
            tokens=self.fit.micro_batch * self.shown.tokens,
        )

    @classmethod
    def tokens_and_flops(cls, config: IterateTrainConfig) -> tuple[int, float]:
        tokens = config.optim.steps * config.optim.batch * config.examples.tokens
        return tokens, training_flops_per_token(config)

    def build(self) -> LoopedGPT:
        """Build the model with freshly drawn weights, identical on every machine."""
        self.model = LoopedGPT(self.config.model, seed=self.config.seed)
        self.model.recompute = self.fit.recompute
        return self.model

    def state(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint: only the step."""
        return {"loader": {**self._identity(), "position": self.step}}

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        _, self.step = check_position({"epoch": 0, **state.get("loader", {})}, self._identity())

    def _identity(self) -> dict[str, Any]:
        """Settings that determine the sequence of batches, which a resumed run must keep."""
        settings = {name: getattr(self.config.data, name) for name in IDENTITY}
        return settings | {"sample": self.config.rounds.sample}

    def batches(self, step: int) -> StepData:
        """This rank's share of the step in pieces that fit the device, and the step's rounds."""
        batch = self.config.optim.batch
        steps = draw_upto(self._steps_key, step, self.config.data.train_steps)
        instances = draw(self.task, "train", self._key, self.drawn(step) + np.arange(batch))
        inputs, targets = map(torch.from_numpy, self.shown.batch(instances, steps))
        law = self.config.rounds.law(self.config.model.rounds, steps)
        rounds = self._rounds.at(step, law)
        noise = self._noise.at(step, (rounds, *inputs.shape, self.config.model.width))
        self.step = step + 1
        share = 1 / (targets >= 0).sum().clamp(min=1)  # over all ranks: each has drawn the whole batch
        parts = [inputs, targets] if noise is None else [inputs, targets, noise.transpose(0, 1)]
        mine = self.world.rows(batch)
        pieces = zip(*(part[mine].split(self.fit.micro_batch) for part in parts), strict=True)
        return StepData([(x, y, share, *rest) for x, y, *rest in pieces], rounds)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy summed over the micro-batch's answers, as a share of the step's."""
        inputs, targets, share, *noise = (part.to(self.world.device, non_blocking=True) for part in batch)
        output = model(inputs, targets, noise=noise[0].transpose(0, 1) if noise else None)
        loss: Tensor = output.loss * share
        return loss

    def evaluate(self, model: nn.Module, on_batch: OnBatch = ignore_batch) -> dict[str, Any]:
        """Loss and accuracy within the trained steps, and for each number in `data.test_steps`."""
        config, world = self.config, self.world
        most = config.model.rounds
        cells = [(config.rounds.at_test(h, most), h) for h in sorted(set(config.data.test_steps))]
        sums = score_sums(
            self.model,
            self.shown,
            self.test,
            cells,
            batch=self.fit.micro_batch,
            device=world.device,
            arithmetic=partial(arithmetic, config.device, world.device),
            # Only for batches that every rank has.
            before_batch=lambda row, share: on_batch(share) if row < self._rows_of_all else None,
        )
        total = world.sum(torch.stack([sums[cell] for cell in cells]))
        return summary(dict(zip(cells, total, strict=True)), config.data.train_steps)

    def describe(self, result: dict[str, Any]) -> str:
        """Format an evaluation in one line."""
        by_steps = zip(result["steps"], result["cells_by_steps"], strict=True)
        far = "  ".join(f"{h}: {share:.3f}" for h, share in by_steps)
        return (
            f"test loss {result['loss']:.4f}  exact {result['exact']:.1%}  cells {result['cells']:.1%}  "
            f"by steps {far}"
        )


def summary(sums: dict[tuple[int, int], Tensor], trained: int) -> dict[str, Any]:
    """Summarize an evaluation: means within the trained steps, and lists by steps.

    If all numbers of steps are beyond the trained ones, the smallest counts as within.
    """
    inside = [cell for cell in sums if cell[1] <= trained] or [min(sums, key=lambda cell: cell[1])]
    mean = scores({(0, 0): torch.stack([sums[cell] for cell in inside]).sum(0)})[0, 0]
    means = scores(sums)
    beyond = [1 - score.cells for (_, steps), score in means.items() if steps > trained]
    lists = {
        f"{name}_by_steps": [getattr(means[cell], name) for cell in sums]
        for name in ("loss", "cells", "exact")
    }
    return {
        "loss": mean.loss,
        "cells": mean.cells,
        "exact": mean.exact,
        "beyond": sum(beyond) / len(beyond) if beyond else None,  # every number of steps weighted equally
        "steps": [steps for _, steps in sums],
        **lists,
    }
