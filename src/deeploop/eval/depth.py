"""Validation loss against depth: the same weights at several numbers of rounds, or with adaptive depth."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from deeploop.data.tokenizers import Tokenizer
from deeploop.eval.validation import validate
from deeploop.models.adaptive import AdaptiveDepth, ExitRule
from deeploop.models.gpt import LoopedGPT


@dataclass(frozen=True)
class DepthScore:
    """How well a fixed set of targets is predicted."""

    loss: float
    """Nats a token."""
    bits_per_byte: float
    similarity: float
    """Mean cosine between token states: 1 is the collapse."""


@dataclass(frozen=True)
class Windows:
    """What is predicted: inputs and targets (sequences, context), and how it is computed."""

    inputs: Tensor
    targets: Tensor
    text_bytes: int
    """UTF-8 bytes of the targets; end-of-text has none."""
    batch: int = 16
    device: torch.device | str = "cpu"
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext
    starts: Tensor | None = None
    """Where documents begin, bool like the inputs, if they are kept apart."""

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
    """Summed nats ÷ (ln 2 · bytes): end-of-text losses are counted, but there are no bytes for them."""
    return nats / (math.log(2) * text_bytes)


def count_bytes(tokenizer: Tokenizer, targets: Tensor) -> int:
    """UTF-8 bytes that the targets stand for."""
    lengths = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocabulary)])
    return int(lengths[targets.numpy()].sum())


def score_rounds(
    model: LoopedGPT, windows: Windows, rounds: Iterable[int], *, recompute_alpha: bool | None = None
) -> dict[int, DepthScore]:
    """The score at each number of rounds; the model is left at the one it was trained with."""
    scores = {}
    try:
        for R in rounds:
            model.set_rounds(R, recompute_alpha=recompute_alpha)
            scores[R] = windows.score(model)
    finally:
        model.set_rounds(model.config.rounds)
    return scores


def score_adaptive(model: LoopedGPT, windows: Windows, rule: ExitRule) -> tuple[float, DepthScore]:
    """Mean rounds a token took, and the score, when tokens stop by the rule."""
    adaptive = AdaptiveDepth(model, rule)
    score = windows.score(adaptive)
    return adaptive.mean_rounds, score
