"""Validation loss against depth: one set of weights at several numbers of rounds, or with adaptive depth."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from deeploop.data.tokenizers import Tokenizer
from deeploop.eval.validation import validate
from deeploop.models.adaptive import AdaptiveDepth, ExitRule
from deeploop.models.gpt import GPTOutput, LoopedGPT


@dataclass(frozen=True)
class DepthScore:
    """Scores on a fixed set of targets."""

    loss: float
    """Nats per token."""
    bits_per_byte: float
    similarity: float
    """Mean cosine between token states; 1 means collapsed."""


@dataclass(frozen=True)
class Windows:
    """Inputs and targets (sequences, context), with settings for computing their score."""

    inputs: Tensor
    targets: Tensor
    text_bytes: int
    """UTF-8 bytes of the targets; end-of-text has none."""
    batch: int = 16
    device: torch.device | str = "cpu"
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext
    starts: Tensor | None = None
    """True where documents begin, if they are masked from each other; bool with the shape of the inputs."""

    def score(self, model: nn.Module) -> DepthScore:
        result = validate(
            model,
            self.inputs,
            self.targets,
            batch=self.batch,
            device=self.device,
            arithmetic=self.arithmetic,
            starts=self.starts,
        )
        bits = bits_per_byte(result.loss, self.text_bytes)
        return DepthScore(result.loss / result.targets, bits, result.similarity)


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """Summed nats ÷ (ln 2 · bytes). The loss of end-of-text counts, although it has no bytes."""
    return nats / (math.log(2) * text_bytes)


def count_bytes(tokenizer: Tokenizer, targets: Tensor) -> int:
    """The number of UTF-8 bytes of the targets."""
    lengths = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocabulary)])
    return int(lengths[targets.numpy()].sum())


def score_rounds(
    model: LoopedGPT, windows: Windows, rounds: Iterable[int], *, recompute_alpha: bool | None = None
) -> dict[int, DepthScore]:
    """The score at each number of rounds. The model is reset to the number it was trained with."""
    scores = {}
    try:
        for R in rounds:
            model.set_rounds(R, recompute_alpha=recompute_alpha)
            scores[R] = windows.score(model)
    finally:
        model.set_rounds(model.config.rounds)
    return scores


class Decoding(nn.Module):
    """Wrap a model to read its sequences token by token through a key-value cache."""

    def __init__(self, model: LoopedGPT) -> None:
        super().__init__()
        self.model = model
        self.bytes_per_token = 0.0

    @torch.no_grad()
    def forward(self, tokens: Tensor, targets: Tensor) -> GPTOutput:
        cache = self.model.new_cache(tokens.shape[1])
        pieces = [self.model(token, cache=cache).states for token in tokens.split(1, dim=1)]
        self.bytes_per_token = cache.nbytes / tokens.numel()
        return self.model.output(torch.cat(pieces, dim=1), targets)


@dataclass(frozen=True)
class BudgetScore(DepthScore):
    """Scores of decoding under a key-value budget."""

    slots: int
    """Slots of the cache, each with a key and a value of the model's width."""
    bytes_per_token: float
    """Memory of the cache per token of a sequence."""


def score_budget(model: LoopedGPT, windows: Windows, budget: int | None) -> BudgetScore:
    """The score of decoding with the keys and values of `budget` rounds, or of all if None."""
    model.set_cache_rounds(budget)
    try:
        decoding = Decoding(model)
        score = windows.score(decoding)
        return BudgetScore(**asdict(score), slots=model.slots, bytes_per_token=decoding.bytes_per_token)
    finally:
        model.set_cache_rounds(None)


def between_depths(losses: Mapping[int, float], rounds: float) -> float | None:
    """Interpolate the loss linearly between the two fixed depths around `rounds`; None outside of them.

    This is the expected loss of skipping rounds at random.
    """
    if not min(losses) <= rounds <= max(losses):
        return None
    below = max(R for R in losses if R - rounds <= 0)
    above = min(R for R in losses if R - rounds >= 0)
    share = (rounds - below) / (above - below) if above > below else 0.0
    return losses[below] + share * (losses[above] - losses[below])


def score_adaptive(model: LoopedGPT, windows: Windows, rule: ExitRule) -> tuple[float, DepthScore]:
    """Mean rounds per token, and the score, when tokens exit by the rule."""
    adaptive = AdaptiveDepth(model, rule)
    score = windows.score(adaptive)
    return adaptive.mean_rounds, score
