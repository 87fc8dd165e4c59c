"""Adaptive depth at inference: a token exits the loop when its state has converged, or by an exit gate.

A token that has exited keeps its state. In later rounds, tokens that attend to it use its last keys and
values of the same block: the rule "latest" of recurrent-depth models. Whether a token exits depends only on
earlier tokens, so continuing from a cache gives the same result as reading a sequence at once. A coda uses
the states at the exits; if the rule compares predictions, through the coda, tokens are read one by one, as
the coda attends to finished ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from deeploop.models.gpt import GPTOutput, LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.nn.cache import KeyValueCache

Criterion = Literal["change", "kl", "gate"]


@dataclass(frozen=True)
class ExitRule:
    """A token exits after a round that changed it by less than `threshold`.

    change: ‖x′ − x‖ / ‖x‖ of its state; kl: KL(p′ ‖ p) in nats between the predictions of its states; gate:
    after the round at which the trained gate's cumulative exit probability reaches `threshold`.
    """

    criterion: Criterion = "change"
    threshold: float = 0.1

    def __post_init__(self) -> None:
        if self.criterion == "gate":
            if not 0 <= self.threshold <= 1:
                raise ValueError(f"threshold={self.threshold}: must be 0 (one round) to 1 (all) of a gate")
        elif not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold={self.threshold}: must be 0 (never stop early) or more")


def decodes_to_validate(config: GPTConfig, criterion: Criterion) -> bool:
    """True if even given tokens must be read one by one, which is slow."""
    return criterion == "kl" and config.coda > 0


class AdaptiveDepth(nn.Module):
    """Wrap a LoopedGPT so that each token has its own number of rounds, at most the model's.

    One token at a time (generation) this saves the skipped rounds. Tokens computed together wait for the
    slowest one, so there it only shows the possible saving.
    """

    def __init__(self, model: LoopedGPT, rule: ExitRule) -> None:
        super().__init__()
        if rule.criterion == "gate" and model.exit_gate is None:
            raise ValueError(
                "adaptive=gate: this model has no exit gate; train one with --model.exit-gate "
                "(--gate.stage gate-only --init-from RUN leaves the rest of a run as it is)"
            )
        if model.kept_rounds < model.rounds:
            raise ValueError(f"cache_rounds={model.cache_rounds}: must be unset with adaptive depth")
        self.model, self.rule = model, rule
        self.tokens_seen = self.rounds_used = 0
        self.smallest = math.inf  # distance that was compared with the threshold
        self.train(model.training)

    @property
    def config(self) -> GPTConfig:
        return self.model.config

    @property
    def mean_rounds(self) -> float:
        """Mean rounds per token over all calls so far."""
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
        cache = self.model.new_cache(tokens.shape[1]) if cache is None else cache
        if decodes_to_validate(self.config, self.rule.criterion):
            if documents is not None:
                raise ValueError("adaptive=kl: can't keep documents apart with a coda; use change")
            x = torch.cat([self._stream(token, cache) for token in tokens.split(1, dim=1)], dim=1)
        else:
            x = self._stream(tokens, cache, documents)
        return self.model.read_out(x, targets)

    def _stream(self, tokens: Tensor, cache: KeyValueCache, documents: Tensor | None = None) -> Tensor:
        """The residual stream (B, T, width) after the coda."""
        model, count = self.model, tokens.shape[1]
        context, state = model.begin(tokens, cache, documents=documents)
        x, entered = model.enter_loop(tokens, context, state)
        latest = _Latest(cache, model, active=torch.ones_like(tokens, dtype=torch.bool))

        # Until the cache advances, each call writes the coda's keys and values to the same positions.
        def finish(x: Tensor) -> Tensor:
            return model.once("coda", x, context)

        own, stops, done = context._replace(cache=latest), self._stopping(x, finish), 0
        for index in range(model.rounds):
            # The result is ignored for tokens that have exited: their keys and values are replaced.
            after = model.round(x, index, own, entered)
            x = torch.where(latest.active[..., None], after, x)
            self.rounds_used += int(latest.active.sum())
            done = index + 1
            if done < model.rounds:  # exiting after the last round would save nothing
                latest.active = latest.active & ~stops(x)
            if not latest.active.any():
                break
        latest.repeat(done, count)
        x = finish(x)
        cache.length += count
        self.tokens_seen += tokens.numel()
        return x

    def _stopping(self, x: Tensor, finish: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Make a function that maps the states after each round, in order, to the tokens (B, T) that exit."""
        if self.rule.criterion == "gate":
            left = torch.ones(x.shape[:2], device=x.device)
            least = torch.finfo(left.dtype).tiny

            def gate_stops(x: Tensor) -> Tensor:
                # A probability of 1 is never reached: in fp32, 1 - left would round to 1 after some rounds.
                left.mul_(torch.sigmoid(-self.model.exit_logits(x))).clamp_(min=least)
                return left <= 1 - self.rule.threshold

            return gate_stops
        seen = self._compared(x, finish)

        def settled(x: Tensor) -> Tensor:
            nonlocal seen
            before, seen = seen, self._compared(x, finish)
            distance = self._distance(before, seen)
            self.smallest = min(self.smallest, float(distance.min()))
            return ~(distance >= self.rule.threshold)

        return settled

    def _compared(self, x: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        """The values that the rule compares between rounds: states, or log-probabilities (B, T, V)."""
        if self.rule.criterion == "change":
            return x
        return self.model.logits(self.model.final_norm(finish(x))).log_softmax(-1)

    def _distance(self, before: Tensor, after: Tensor) -> Tensor:
        if self.rule.criterion == "change":
            return (after - before).norm(dim=-1) / before.norm(dim=-1)
        return (after.exp() * (after - before)).sum(-1).clamp(min=0)  # rounding may give a negative value


class _Latest:
    """A cache in which new tokens that are no longer active repeat their keys and values."""

    def __init__(self, cache: KeyValueCache, model: LoopedGPT, active: Tensor) -> None:
        self.cache, self.active = cache, active  # active (B, T)
        self.first, self.blocks, self.rounds = len(model.prelude), len(model.blocks), model.rounds

    def update(self, k: Tensor, v: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        if slot >= self.first + self.blocks:  # in the first round every token is active
            active = self.active[:, None, :, None]
            old_k, old_v = self.previous(slot, k.shape[2])
            k, v = torch.where(active, k, old_k), torch.where(active, v, old_v)
        return self.cache.update(k, v, slot)

    def repeat(self, done: int, count: int) -> None:
        """Fill the slots of the rounds after the first `done`, in which no token was active."""
        for slot in range(self.first + done * self.blocks, self.first + self.rounds * self.blocks):
            self.cache.update(*self.previous(slot, count), slot)

    def previous(self, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the new tokens from the same block in the previous round."""
        return self.cache.newest(slot - self.blocks, count)
