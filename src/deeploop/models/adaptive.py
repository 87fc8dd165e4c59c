"""Adaptive depth at inference: a token stops its rounds when they no longer change it.

A token that has stopped keeps its state, and whoever attends to it later finds, in every further round,
the keys and values it last had in the same block: the rule "latest" of recurrent-depth models. Whether a
token stops depends on the tokens before it alone, so a sequence continued from a cache is the same as one
read at once.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from deeploop.models.gpt import GPTOutput, LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.nn.cache import KeyValueCache
from deeploop.nn.documents import document_positions

Criterion = Literal["change", "kl"]


@dataclass(frozen=True)
class ExitRule:
    """A token stops after a round that moved it by less than `threshold`.

    change: ‖x′ − x‖ / ‖x‖ of its state; kl: KL(p′ ‖ p) in nats of what the state would predict.
    """

    criterion: Criterion = "change"
    threshold: float = 0.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold={self.threshold}: must be 0 (never stop early) or more")


class AdaptiveDepth(nn.Module):
    """A LoopedGPT whose tokens each take their own number of rounds, at most the model's; called like it.

    One token at a time (generation) this saves the rounds that are left out. Tokens that are computed
    together wait for the slowest of them, so there it only shows what would be saved.
    """

    def __init__(self, model: LoopedGPT, rule: ExitRule) -> None:
        super().__init__()
        model.config.require_plain_loop("adaptive depth")
        self.model, self.rule = model, rule
        self.tokens_seen = self.rounds_used = 0
        self.train(model.training)

    @property
    def config(self) -> GPTConfig:
        return self.model.config

    @property
    def mean_rounds(self) -> float:
        """Rounds a token took, over all calls so far."""
        return self.rounds_used / max(1, self.tokens_seen)

    def new_cache(self, capacity: int | None = None) -> KeyValueCache:
        return self.model.new_cache(capacity)

    def logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents: Tensor | None = None,
    ) -> GPTOutput:
        model, count = self.model, tokens.shape[1]
        cache = model.new_cache(count) if cache is None else cache
        if documents is None:
            rotary, mask = model.positions(tokens, cache)
        else:
            at = document_positions(documents, tokens.shape)
            rotary, mask = model.document_places(at, documents)
        latest = _Latest(cache, len(model.blocks), active=torch.ones_like(tokens, dtype=torch.bool))
        x = model.input_norm(model.embedding(tokens))
        seen, slot = self._compared(x), 0
        for _ in range(model.rounds):
            for block in model.blocks:
                x = torch.where(latest.active[..., None], block(x, rotary, mask, latest, slot), x)
                slot += 1
            self.rounds_used += int(latest.active.sum())
            before, seen = seen, self._compared(x)
            latest.active = latest.active & (self._distance(before, seen) >= self.rule.threshold)
            if not latest.active.any():
                break
        for left_out in range(slot, cache.slots):
            cache.update(*latest.previous(left_out, count), left_out)
        cache.length += count
        self.tokens_seen += tokens.numel()
        return model.read_out(x, targets)

    def _compared(self, x: Tensor) -> Tensor:
        """What the rule compares from round to round: states, or log-probabilities (B, T, V)."""
        if self.rule.criterion == "change":
            return x
        return self.model.logits(self.model.final_norm(x)).log_softmax(-1)

    def _distance(self, before: Tensor, after: Tensor) -> Tensor:
        if self.rule.criterion == "change":
            return (after - before).norm(dim=-1) / before.norm(dim=-1)
        return (after.exp() * (after - before)).sum(-1).clamp(min=0)  # rounding can leave it below


class _Latest:
    """A cache in which the new tokens that are no longer active repeat their keys and values."""

    def __init__(self, cache: KeyValueCache, blocks: int, active: Tensor) -> None:
        self.cache, self.blocks, self.active = cache, blocks, active  # active (B, T)

    def update(self, k: Tensor, v: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        if slot >= self.blocks:  # in the first round every token is active
            active = self.active[:, None, :, None]
            old_k, old_v = self.previous(slot, k.shape[2])
            k, v = torch.where(active, k, old_k), torch.where(active, v, old_v)
        return self.cache.update(k, v, slot)

    def previous(self, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """What the same block made of the new tokens a round before."""
        return self.cache.newest(slot - self.blocks, count)
