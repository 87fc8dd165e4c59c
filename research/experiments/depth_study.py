"""Which settings let a loop extrapolate beyond its trained depth: variants of `automaton`, by seed and rate.

python -m research.experiments.depth_study train VARIANT … --out study.json    trains, adds to the file
python -m research.experiments.depth_study stream RUN … --out stream.json      the stream of runs by depth

`make results` makes the tables of docs/depth.md of both files.

`train` puts all seeds and rates of a variant into one process (`torch.func.vmap`): on a GPU fifty models of
this size take little longer than one. What it trains is the recipe `automaton` but for what the variant
changes; rows are drawn without a held-out split, for 2^24 of them hardly repeat.
"""

import argparse
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from deeploop.files import write_json
from deeploop.models.gpt import LoopedGPT
from deeploop.nn.context import Context
from deeploop.tasks.iterate.config import IterateTrainConfig
from deeploop.tasks.iterate.problems.automaton import BEGIN
from deeploop.tasks.iterate.problems.examples import held_out
from deeploop.tasks.recipes import get_recipe
from deeploop.train.optim import learning_rate

TESTS = (1, 2, 4, 6, 9, 13, 24, 77, 127, 200)


@dataclass(frozen=True)
class Variant:
    """Changes to the recipe `automaton`, and the rates to try."""

    model: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = (1e-3, 2e-3, 3e-3, 4e-3, 6e-3)
    noise: float = 0.0
    renormalise: bool = False
    """Bring the stream back to size 1 after each round."""
    only_longest: bool = False
    """Train on four steps alone, not on one to four."""
    rule: int = 86


LOW = (3e-4, 5e-4, 1e-3, 2e-3, 3e-3)
NOISY = (4e-3, 6e-3, 1e-2)
VARIANTS = {
    "flat": Variant(),
    "flat, second batch": Variant(rates=(6e-3, 1e-2)),
    "DeepLoop": Variant({"rule": "deeploop"}),
    "DeepLoop without outer gain": Variant({"rule": "deeploop:outer_gain=off"}),
    "pre-norm": Variant({"rule": "prenorm"}, LOW),
    "averaged": Variant({"rule": "averaged"}),
    "pre-norm, stream renormalised each round": Variant({"rule": "prenorm"}, (1e-3, 3e-3), renormalise=True),
    "post-norm without inner norm": Variant({"rule": "postnorm"}, (1e-3, 3e-3)),
    "flat, four steps only": Variant({}, (4e-3, 6e-3), only_longest=True),
    "flat, noise 0.1": Variant({}, NOISY, noise=0.1),
    "flat, noise 0.3": Variant({}, NOISY, noise=0.3),
    "DeepLoop, noise 0.3": Variant({"rule": "deeploop"}, (4e-3, 6e-3), noise=0.3),
    "pre-norm, noise 0.3": Variant({"rule": "prenorm"}, (1e-3, 3e-3), noise=0.3),
    **{f"flat, rule {rule}": Variant({}, (2e-3, 3e-3, 4e-3), rule=rule) for rule in (30, 102, 106, 169)},
}


# ── Many models at once ─────────────────────────────────────────────────────────────────────────────────
class Loop(LoopedGPT):
    """The model, with what variants do between rounds."""

    noise, renormalised = 0.0, False

    def round(self, *args: Any, **options: Any) -> Tensor:
        x = super().round(*args, **options)
        if self.renormalised:
            x = F.rms_norm(x, x.shape[-1:])
        if self.noise:
            x = x + self.noise * x.detach().square().mean(-1, keepdim=True).sqrt() * torch.randn_like(x)
        return x


def automaton_rows(
    generator: torch.Generator, shape: tuple[int, ...], steps: int, rule: int
) -> tuple[Tensor, Tensor]:
    """Random rows behind a begin token, and what they are after `steps` steps."""
    x = torch.randint(0, 2, shape, generator=generator, device=generator.device)
    becomes = torch.tensor([rule >> index & 1 for index in range(8)], device=x.device)
    y = x
    for _ in range(steps):
        before = F.pad(y, (2, 0))
        y = becomes[4 * before[..., :-2] + 2 * before[..., 1:-1] + y]
    return F.pad(x, (1, 0), value=BEGIN), y


class Stack:
    """Models of one shape, each with a seed and a rate of its own, trained side by side."""

    def __init__(self, variant: Variant, seeds: list[int], device: str) -> None:
        recipe = get_recipe("automaton")
        assert isinstance(recipe, IterateTrainConfig)
        self.variant, self.optim, self.data = variant, recipe.optim, recipe.data
        self.pairs = [(seed, rate) for rate in variant.rates for seed in seeds]
        config = replace(recipe.model, **variant.model)
        models = [Loop(config, seed=seed) for seed, _ in self.pairs]
        self.model = models[0].to(device)
        self.model.renormalised = variant.renormalise
        self.buffers = dict(self.model.named_buffers())
        states = [dict(model.named_parameters()) for model in models]
        self.weights = {
            name: torch.stack([state[name].detach().to(device) for state in states]) for name in states[0]
        }
        self.moments = [{name: torch.zeros_like(w) for name, w in self.weights.items()} for _ in range(2)]
        self.rates = torch.tensor([rate for _, rate in self.pairs], device=device)
        self.generator = torch.Generator(device).manual_seed(1234)

    def logits(self, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        states = functional_call(self.model, (weights, self.buffers), (tokens,)).states
        return (states @ weights["embedding.weight"].T)[:, 1:]

    def loss(self, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(weights, tokens).flatten(0, 1), targets.flatten())

    def train(self, steps: int) -> None:
        gradients = vmap(grad_and_value(self.loss), randomness="different")
        order = torch.Generator().manual_seed(77)
        self.model.noise = self.variant.noise
        for step in range(steps):
            drawn = int(torch.randint(1, self.data.train_steps + 1, (1,), generator=order))
            asked = self.data.train_steps if self.variant.only_longest else drawn
            self.model.set_rounds(asked)
            shape = (len(self.pairs), self.optim.batch, self.data.length)
            self.update(
                gradients(self.weights, *automaton_rows(self.generator, shape, asked, self.variant.rule))[0],
                step,
                steps,
            )
        self.model.noise = 0.0

    def update(self, gradients: dict[str, Tensor], step: int, steps: int) -> None:
        """AdamW as the recipe's, each model clipped by itself and at its own rate."""
        optim = replace(self.optim, steps=steps, peak_lr=1.0, floor_lr=0.1)
        rates = self.rates * learning_rate(step, optim)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        kept = (optim.clip / (norms + 1e-6)).clamp(max=1)
        for name, weight in self.weights.items():
            each = (-1, *[1] * (weight.dim() - 1))
            gradient = gradients[name] * kept.view(each)
            for moment, beta, value in zip(self.moments, optim.betas, (gradient, gradient**2), strict=True):
                moment[name].lerp_(value, 1 - beta)
            first, second = (
                moment[name] / (1 - beta ** (step + 1))
                for moment, beta in zip(self.moments, optim.betas, strict=True)
            )
            rate = rates.view(each)
            decay = optim.weight_decay if weight.dim() > 2 else 0.0
            weight.mul_(1 - rate * decay).sub_(rate * first / (second.sqrt() + optim.eps))

    @torch.no_grad()
    def test(self, rows: int = 64) -> list[dict[str, Any]]:
        """Share of cells that are right, by steps, for each model."""
        generator = torch.Generator(self.generator.device).manual_seed(9)
        shares: list[dict[str, float]] = [{} for _ in self.pairs]
        for steps in TESTS:
            self.model.set_rounds(steps)
            tokens, truth = automaton_rows(generator, (rows, self.data.length), steps, self.variant.rule)
            said = vmap(self.logits, in_dims=(0, None))(self.weights, tokens).argmax(-1)
            for own, right in zip(shares, (said == truth).float().mean((1, 2)).tolist(), strict=True):
                own[str(steps)] = round(right, 4)
        return [{"seed": s, "rate": r, "cells": own} for (s, r), own in zip(self.pairs, shares, strict=True)]


def train_variants(names: list[str], seeds: list[int], steps: int, device: str, out: Path) -> None:
    found = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for vmap
            stack = Stack(VARIANTS[name], seeds, device)
            stack.train(steps)
            found[name] = stack.test()
        write_json(out, found)
        for model in found[name]:
            print(name, model, flush=True)


# ── The stream of trained runs ──────────────────────────────────────────────────────────────────────────
@torch.no_grad()
def stream(run: Path, deepest: int = 200, rows: int = 64) -> list[dict[str, float]]:
    """Size of the stream after each round, and how far it is from where it was in training.

    Far: 1 − the cosine of a position's state to the nearest state of the same position in rounds 1 to 4,
    over other rows than these, in the median.
    """
    from deeploop.tasks.iterate.load import load_iterate
    from deeploop.tasks.iterate.scoring import positions

    model, config = load_iterate(run)
    task = config.examples.task
    inputs = torch.from_numpy(task.inputs(held_out(task, 8 * rows)))
    context = Context(positions(model, inputs))
    x = model.input_norm(model.embedding(inputs))
    known, states, found = [], [], list[dict[str, float]]()
    for index in range(deepest):
        x = model.round(x, 0, context)
        state = F.normalize(x, dim=-1).transpose(0, 1)  # positions, rows, width
        if index < config.data.train_steps:
            known.append(state[:, rows:])
        size = x[:rows].square().mean(-1).sqrt().mean()
        found.append({"round": index + 1, "size": float(size)})
        states.append(state[:, :rows])
    trained = torch.cat(known, dim=1)
    for record, state in zip(found, states, strict=True):
        nearest = (state @ trained.transpose(1, 2)).amax(-1)[1:]  # the begin token never moves
        record["far"] = float((1 - nearest).median())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("variants", nargs="+", choices=[*VARIANTS, "all"])
    train.add_argument("--seeds", type=int, default=10)
    train.add_argument("--steps", type=int, default=2_000)
    train.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    streams = commands.add_parser("stream")
    streams.add_argument("runs", nargs="+", type=Path)
    for one in (train, streams):
        one.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "train":
        names = list(VARIANTS) if "all" in args.variants else args.variants
        train_variants(names, list(range(args.seeds)), args.steps, args.device, args.out)
    else:
        write_json(args.out, {run.name: stream(run) for run in args.runs})
