"""LoopedGPT: K stored blocks applied for R rounds, between an embedding and an optionally tied head.

There may be blocks before the loop (prelude) and after it (coda), visited once each; the prelude's output may
be injected into every round (`nn/injection.py`).

config = GPTConfig(blocks=12, rounds=3)
model = LoopedGPT(config, seed=1)
loss = model(tokens, targets).loss / targets.numel()
"""

from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config.loop import GateConfig
from deeploop.models.exit_gate import ExitGate, exit_loss
from deeploop.models.gpt_config import PARTS, GPTConfig, Part
from deeploop.nn.cache import Cache, KeyValueCache, causal_mask
from deeploop.nn.context import Context, Mask
from deeploop.nn.documents import document_mask, document_positions
from deeploop.nn.init import init_weights_
from deeploop.nn.injection import make_injection
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary, SwiGLU, rotary_table
from deeploop.nn.loss import linear_cross_entropy, token_losses
from deeploop.nn.recompute import Recompute, recomputed
from deeploop.nn.residual import ScaledResidual
from deeploop.nn.written import as_written
from deeploop.rules import InitRule

Places = tuple[Rotary, Mask]  # positions of tokens, and their attention mask


class Chain(Protocol):
    """An alternative computation of all rounds at once, such as Triton kernels (`deeploop.accelerate`)."""

    def takes(self, model: "LoopedGPT", context: Context, noise: Tensor | None) -> bool:
        """Return True if it supports a call."""
        ...

    def __call__(
        self, model: "LoopedGPT", x: Tensor, rounds: range, context: Context, entered: Tensor | None
    ) -> Tensor:
        """Return x after the rounds with these numbers."""
        ...


@as_written
class Block(nn.Module):
    """Attention, then SwiGLU, each in its residual equation; `number` counts stored blocks from 1."""

    def __init__(self, config: GPTConfig, number: int = 1) -> None:
        super().__init__()
        residual = partial(
            ScaledResidual,
            width=config.width,
            rule=config.residual,
            blocks=config.blocks,
            rounds=config.rounds,
            number=number,
            init=False,  # the model draws all weights itself
            norm=partial(RMSNorm, eps=config.norm_eps),
        )
        attention = CausalSelfAttention(
            config.width,
            config.heads,
            kv_heads=config.grouped_heads,
            head_size=config.head_size,
            bias=config.attention_bias,
            qk_norm=config.qk_norm,
            eps=config.norm_eps,
        )
        self.attention = residual(attention)
        self.mlp = residual(SwiGLU(config.width, config.hidden, bias=config.mlp_bias))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.attention(x, *context)
        x = self.mlp(x)
        return x


class GPTOutput(NamedTuple):
    """`states` (B, T, width) after the final norm, and `loss` summed over the targets, if any."""

    states: Tensor
    loss: Tensor | None


@as_written
class LoopedGPT(nn.Module):
    """A causal language model whose blocks are applied `rounds` times.

    With `backprop` set, gradients go through only the last `backprop` rounds; earlier ones keep no
    activations. With `gate_training` set, the loss in train mode is that of the exit gate.

    The constructor draws all weights from `seed`. For a model built on the meta device, call `to_empty` and
    `init_weights`, which also sets the rotary table.
    """

    cos: Tensor
    sin: Tensor
    first_noise: Tensor | None
    output_bias: nn.Parameter | None
    head: nn.Linear | None

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.rounds = config.rounds
        self.recompute: Recompute = "off"
        self.backprop: int | None = None
        self.cache_rounds: int | None = None
        self.gate_training: GateConfig | None = None
        self.chain: Chain | None = None
        self.embedding = nn.Embedding(config.padded_vocabulary, config.width)
        self.input_norm = RMSNorm(config.width, config.norm_eps) if config.input_norm else nn.Identity()
        number = count(1)
        self.prelude = nn.ModuleList(
            Block(config.part("prelude"), next(number)) for _ in range(config.prelude)
        )
        self.injection = make_injection(config.injection, config.width)
        self.blocks = nn.ModuleList(Block(config, next(number)) for _ in range(config.blocks))
        self.coda = nn.ModuleList(Block(config.part("coda"), next(number)) for _ in range(config.coda))
        self.final_norm = RMSNorm(config.width, config.norm_eps) if config.final_norm else nn.Identity()
        self.exit_gate = ExitGate(config.width) if config.exit_gate else None
        head = None if config.tied_head else nn.Linear(config.width, config.padded_vocabulary, bias=False)
        self.register_module("head", head)
        bias = nn.Parameter(torch.empty(config.padded_vocabulary)) if config.unigram_bias else None
        self.register_parameter("output_bias", bias)
        for name in ("cos", "sin"):
            # always fp32, which the angles of late positions need
            table = torch.empty(config.context, config.head_size // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        noise = torch.empty(config.context, config.width) if config.first_state == "noise" else None
        self.register_buffer("first_noise", noise, persistent=False)
        self.init_weights(seed)

    def init_weights(self, seed: int) -> None:
        """Set every parameter and buffer; the same seed gives the same model on every device."""
        parts: dict[str, InitRule] = {
            name: self.config.part(name).init_rule for name in PARTS if len(getattr(self, name))
        }
        init_weights_(self, self.config.init_rule, seed, parts)
        self.init_tables()

    @torch.no_grad()
    def set_unigram_bias(self, counts: Tensor) -> None:
        """Set the output bias to the log frequencies of `counts` (vocabulary,), with one added to each.

        Padding has a count of 0, like a word that never occurred.
        """
        if self.output_bias is None:
            raise ValueError("model.unigram_bias=False: must be True for a model with an output bias")
        seen = F.pad(counts.double(), (0, self.config.padded_vocabulary - len(counts))) + 1
        self.output_bias.copy_((seen / seen.sum()).log())

    def init_tables(self) -> None:
        """Set the tensors that no checkpoint holds: rotary table, varying scales, the first state's noise."""
        for module in self.modules():
            if isinstance(module, ScaledResidual):
                module.set_scales(module.alpha, module.epsilon)
        config = self.config
        cos, sin = rotary_table(config.context, config.head_size, config.rotary_base, config.rotary_scaling)
        self.cos.copy_(cos)
        self.sin.copy_(sin)
        if self.first_noise is not None:
            generator = torch.Generator(device="cpu").manual_seed(0)  # of the position alone
            self.first_noise.copy_(torch.randn(self.first_noise.shape, generator=generator, device="cpu"))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: Cache | None = None,
        places: Places | None = None,
        noise: Tensor | None = None,
        state: Tensor | None = None,
        documents: Tensor | None = None,
        embedded: Tensor | None = None,
    ) -> GPTOutput:
        """Compute tokens (B, T), and the loss if there are targets (B, T); negative targets are ignored.

        With a `cache` the tokens continue its sequence and are added to it. `places` gives the positions and
        the mask for other caches and for padding. `noise` (rounds, B, T, width) is added to the stream after
        each round, times the stream's root mean square. `state` (B, T, width) is the first state of a model
        whose `first_state` is noise: training draws one for every step; by default there is one draw per
        position, so that a cache makes no difference. `documents` are bounds (`nn/documents.py`): each
        document is computed as if alone. `embedded` (B, T, width) replaces the tokens' embeddings.
        """
        if isinstance(cache, KeyValueCache) and tokens.shape[1] > 1 and self.kept_rounds < self.rounds:
            # Under a cache budget a token needs the last round of earlier ones: they are read one by one.
            read = [self.forward(token, cache=cache).states for token in tokens.split(1, dim=1)]
            return self.output(torch.cat(read, dim=1), targets)
        context, state = self.begin(tokens, cache, places, documents, state)
        x, entered = self.enter_loop(tokens, context, state, embedded)  # embedding, prelude, first state
        if self.gate_training is not None and self.training and targets is not None:
            x, loss = exit_loss(self, self.gate_training, x, entered, context, targets)
            return GPTOutput(self.final_norm(x), loss)
        if without_grad := self.rounds_without_grad:
            with torch.no_grad():
                x = self.loop(x, range(without_grad), context, entered, noise)
            torch.clear_autocast_cache()  # older torch keeps weights that were cast without a graph
        x = self.loop(x, range(without_grad, self.rounds), context, entered, noise)
        x = self.once("coda", x, context)
        if isinstance(cache, KeyValueCache):
            cache.length += tokens.shape[1]
        return self.read_out(x, targets)

    def loop(
        self,
        x: Tensor,
        rounds: range,
        context: Context,
        entered: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Apply the rounds with these numbers."""
        if self.chain is not None and self.chain.takes(self, context, noise):
            return self.chain(self, x, rounds, context, entered)
        for index in rounds:
            # Recomputing the last round saves nothing: its activations are needed at once.
            recompute = self.recomputes("round", context) and index < self.rounds - 1
            x = (recomputed(self.round) if recompute else self.round)(x, index, context, entered)
            if noise is not None:  # relative to the stream's root mean square
                x = x + noise[index] * x.detach().square().mean(-1, keepdim=True).sqrt()
        return x

    def round(self, x: Tensor, index: int, context: Context, entered: Tensor | None = None) -> Tensor:
        """Apply round number `index`: the injection, then every block once."""
        if self.injection is not None:
            x = self.injection(x, entered)
        for number, block in enumerate(self.blocks, start=len(self.prelude) + index * len(self.blocks)):
            x = self.visit(x, block, number, context)
        return x

    def once(self, part: Part, x: Tensor, context: Context) -> Tensor:
        """Apply the blocks of the prelude or the coda."""
        blocks = self.prelude if part == "prelude" else self.coda
        for number, block in enumerate(blocks, start=0 if part == "prelude" else self.visits - len(blocks)):
            x = self.visit(x, block, number, context)
        return x

    def visit(self, x: Tensor, block: nn.Module, number: int, context: Context) -> Tensor:
        """Apply a block in visit `number` of a forward pass."""
        if context.cache is not None:
            context = context._replace(slot=self.slot_of(number))
        recompute = self.recomputes("block", context) and number < self.visits - 1
        x = (recomputed(block) if recompute else block)(x, context)
        return x

    def recomputes(self, unit: Recompute, context: Context) -> bool:
        """True if activations of that unit are recomputed in the backward pass."""
        return self.recompute == unit and context.cache is None and torch.is_grad_enabled()

    @property
    def rounds_without_grad(self) -> int:
        """The number of rounds outside the graph, before the last `backprop`."""
        if self.backprop is None or not torch.is_grad_enabled():
            return 0
        return max(0, self.rounds - self.backprop)

    def begin(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        places: Places | None = None,
        documents: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Context, Tensor | None]:
        """Positions and mask of the tokens in a forward pass, and the first state, if given."""
        if documents is not None:
            at = document_positions(documents, tokens.shape)
            places = self.document_places(at, documents)
            state = self.first_noise[at] if state is None and self.first_noise is not None else state
        if places is None:
            places = self.positions(tokens, cache if isinstance(cache, KeyValueCache) else None)
        return Context(*places, cache), state

    def enter_loop(
        self, tokens: Tensor, context: Context, state: Tensor | None = None, embedded: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The loop's first state and the input of every round, from embedding and prelude."""
        e = self.input_norm(self.embedding(tokens) if embedded is None else embedded)
        e = self.once("prelude", e, context)
        start = context.cache.length if isinstance(context.cache, KeyValueCache) else 0
        entered = None if self.injection is None else self.injection.enter(e)
        return self.initial_state(e, start, state), entered

    def initial_state(self, e: Tensor, start: int, state: Tensor | None = None) -> Tensor:
        """The loop's first state for e (B, T, width), whose first position is `start`."""
        if self.config.first_state == "embedding":
            return e
        if self.config.first_state == "zeros":
            return torch.zeros_like(e)
        assert self.first_noise is not None
        table = self.first_noise[start : start + e.shape[1]] if state is None else state
        return table.to(e.dtype).expand_as(e)

    @property
    def visits(self) -> int:
        """Block visits of a forward pass at the current number of rounds: prelude, K·R, coda."""
        return len(self.prelude) + self.rounds * len(self.blocks) + len(self.coda)

    @property
    def kept_rounds(self) -> int:
        """Rounds whose keys and values a cache keeps: `cache_rounds`, at most all."""
        return min(self.cache_rounds or self.rounds, self.rounds)

    @property
    def slots(self) -> int:
        """Slots of a cache: one per visit, or under a budget one per kept round and block of the loop."""
        return len(self.prelude) + self.kept_rounds * len(self.blocks) + len(self.coda)

    def slot_of(self, visit: int) -> int:
        """The cache slot of a visit: round r of the loop shares those of round r mod budget."""
        first, core, kept = len(self.prelude), self.rounds * len(self.blocks), self.kept_rounds
        if visit < first:
            return visit
        if visit >= first + core:
            return visit - self.visits + self.slots
        return first + (visit - first) % (kept * len(self.blocks))

    @property
    def budget_warning(self) -> str | None:
        """What the key-value budget may cost, in one line; None if it is no risk.

        With an injection the state settles, and its last rounds can stand for all.
        """
        if self.kept_rounds == self.rounds or self.config.injection != "none":
            return None
        budget, rounds = self.cache_rounds, self.rounds
        return (
            f"cache_rounds={budget}: a loop without injection may write much worse text without all {rounds} "
            f"rounds; deeploop validate RUN --cache-rounds {budget} all measures it"
        )

    def set_cache_rounds(self, budget: int | None) -> None:
        """Keep keys and values of `budget` rounds in new caches; None keeps all.

        A token in round r attends to itself in round r, and to each earlier token as in the last of its
        rounds that is r modulo `budget`: 1 keeps the last round's; a budget of all rounds or more keeps all.
        That round is known once the earlier token is finished, so tokens given together are read one by one,
        and the result does not depend on how a text is divided into calls.
        """
        if budget is not None and budget < 1:
            raise ValueError(f"cache_rounds={budget}: must be at least 1, or unset to keep all rounds")
        self.cache_rounds = budget

    def positions(self, tokens: Tensor, cache: KeyValueCache | None) -> Places:
        """Rotary table and mask of tokens that follow those in the cache."""
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        if end > self.config.context:
            raise ValueError(f"tokens of length {end}: must be at most model.context={self.config.context}")
        if cache is not None:
            cache.check(slots=self.slots, length=end)
        rotary = (self.cos[start:end], self.sin[start:end])
        return rotary, causal_mask(start, end - start, tokens.device)

    def document_places(self, at: Tensor, documents: Tensor) -> Places:
        """Rotary table and mask of tokens at the positions `at` (B, T) of their documents."""
        if at.shape[1] > self.config.context:
            raise ValueError(
                f"tokens of length {at.shape[1]}: must be at most model.context={self.config.context}"
            )
        weight = self.embedding.weight
        fast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if fast else weight.dtype
        mask = document_mask(documents, at.shape, self.config.head_size, dtype)
        return (self.cos[at][:, None], self.sin[at][:, None]), mask

    def new_cache(self, capacity: int | None = None) -> KeyValueCache:
        """An empty cache for the current number of rounds, for `capacity` tokens or the whole context."""
        capacity = self.config.context if capacity is None else capacity
        return KeyValueCache(self.slots, capacity)

    def read_out(self, x: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """Apply the final norm, and compute the loss if there are targets."""
        return self.output(self.final_norm(x), targets)

    def output(self, states: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """The output for states after the final norm, with the loss if there are targets."""
        return GPTOutput(states, None if targets is None else self.head_loss(states, targets))

    def head_loss(self, states: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Cross-entropy summed over the targets, each multiplied by its entry of `weights` (B, T)."""
        weight, bias = self._loss_head()
        return linear_cross_entropy(self._head_input(states), weight, targets, bias, weights=weights)

    def token_losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of every target (B, T), without a graph."""
        weight, bias = self._loss_head()
        return token_losses(self._head_input(states), weight, targets, bias)

    def exit_logits(self, x: Tensor) -> Tensor:
        """The exit gate's logits (B, T) for the stream after a round."""
        assert self.exit_gate is not None, "model.exit_gate is False"
        logits: Tensor = self.exit_gate(x)
        return logits

    def logits(self, states: Tensor) -> Tensor:
        """Logits over the actual vocabulary, in fp32 (not for a sharded model)."""
        weight, bias = self._head(self.config.vocabulary)
        logits = F.linear(self._head_input(states), weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if bias is None else logits + bias  # after the cast, as bf16 would lose its digits

    def set_rounds(self, rounds: int, *, recompute_alpha: bool | None = None) -> None:
        """Apply the blocks `rounds` times from now on (test-time depth), with unchanged weights.

        alpha and epsilon are the trained ones or those of the new depth, by `recompute_alpha` or else the
        config. Those of prelude and coda, which are visited once, do not change.
        """
        changed = replace(self.config, rounds=rounds)  # also checks the value
        self.rounds = rounds
        recompute = self.config.recompute_alpha if recompute_alpha is None else recompute_alpha
        scales = (changed if recompute else self.config).scales
        for module in self.blocks.modules():
            if isinstance(module, ScaledResidual):
                module.set_scales(scales.alpha, scales.epsilon)

    def _loss_head(self) -> tuple[Tensor, Tensor | None]:
        # In training the softmax includes the padding, as in the public code.
        padded = self.training or not self.config.mask_padding
        return self._head(self.config.padded_vocabulary if padded else self.config.vocabulary)

    def _head(self, words: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the first `words` logits."""
        weight, bias = (self.head or self.embedding).weight, self.output_bias
        if words == len(weight):
            return weight, bias
        return weight[:words], None if bias is None else bias[:words]

    def _head_input(self, states: Tensor) -> Tensor:
        # Scales the states instead of the logits, which are many more.
        scale = self.config.matrix_lr_multiplier
        return states if scale == 1 else states * scale
