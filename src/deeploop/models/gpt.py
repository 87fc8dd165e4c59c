"""LoopedGPT: K stored blocks applied for R rounds, between a tied embedding and head; and its config.

Blocks may stand before the loop (prelude) and after it (coda), visited once each; the prelude's output may
enter every round again (`nn/injection.py`).

config = GPTConfig(blocks=12, rounds=3)
model = LoopedGPT(config, seed=1)
loss = model(tokens, targets).loss / targets.numel()
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.nn.cache import Cache, KeyValueCache, causal_mask
from deeploop.nn.init import InitRule, init_weights_
from deeploop.nn.injection import InjectionKind, make_injection
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary, SwiGLU, rotary_table
from deeploop.nn.loss import linear_cross_entropy
from deeploop.nn.recompute import Recompute, maybe_checkpoint
from deeploop.nn.residual import ResidualKind, ScaledResidual
from deeploop.theory.scaling import Scales, ScalingRule, block_scales

Places = tuple[Rotary, Tensor | None]  # where tokens stand, and the mask of what they see
FirstState = Literal["embedding", "zeros", "noise"]
Part = Literal["prelude", "coda"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class GPTConfig:
    """Shape and parameterization of a looped GPT; the defaults are the paper's small model at R=3."""

    blocks: int = 12
    """Physical blocks K, stored once each."""
    rounds: int = 3
    """Rounds R: how often the stack of blocks is applied."""
    prelude: int = 0
    """Blocks before the loop, visited once."""
    coda: int = 0
    """Blocks after the loop, visited once."""
    injection: InjectionKind = "none"
    """How the prelude's output e enters every round: x + e, W [x; e], or gated, whose carry contracts."""
    first_state: FirstState = "embedding"
    """What the first round starts from: the prelude's output, zeros, or Gaussian noise of unit size."""
    width: int = 768
    """Width of the residual stream."""
    heads: int = 6
    """Attention heads; they divide the width."""
    hidden: int = 2048
    """Hidden width of SwiGLU. The paper's medium model has 2730; 2736 is a multiple of 16 and faster."""
    vocabulary: int = 50257
    """Real vocabulary size; the embedding is padded to the next multiple of 64."""
    context: int = 1024
    """Longest sequence, in tokens."""
    block: ResidualKind = "sandwich"
    """DeepLoop's sandwich, flat, prenorm, postnorm, prenorm times 1/(R sqrt K) (factored), 1/N (averaged)."""
    p: float = 0.5
    """Exponent of the sandwich's rule, alpha = (2N)^p and beta = (8N)^-p: 1/2 DeepLoop, 1/4 DeepNorm."""
    alpha: Literal["paper", "flat"] = "paper"
    """The sandwich's alpha, (2N)^p or lambda R sqrt K. The flat block has alpha flat, beta off, no gain."""
    beta: Literal["on", "off"] = "on"
    """Draw the sandwich's branches at beta; off: standard initialisation, outputs not divided by sqrt K."""
    outer_gain: bool = True
    """Keep the gain of the sandwich's outer norm, which multiplies the stream at every visit."""
    flat_gain: float = 1.0
    """Lambda of the flat alpha: alpha = lambda R sqrt K."""
    factored_gain: float = 1.0
    """Lambda of the factored block: epsilon = lambda / (R sqrt K)."""
    inner_norm: bool = True
    """Normalise the sandwich's branch input; without it the block is DeepNorm's Norm(alpha x + f(x))."""
    scale_gate: bool = True
    """Draw SwiGLU's gate at beta too, as its up and down matrices are."""
    shrink_outputs: bool | None = None
    """Divide the initial output projections by sqrt(blocks); unset: where neither beta nor epsilon scales."""
    final_norm: bool = True
    """Keep the RMSNorm after the last block."""
    unigram_bias: bool = False
    """Add a learned output bias that starts at the log unigram frequencies of the training text."""
    recompute_alpha: bool = False
    """When rounds are changed at test time, take alpha (or epsilon) of the new depth, not the trained one."""
    mup_base_width: int = 0
    """Width-µP: multiply logits and the matrices' learning rate by this width / width; 0 is off."""
    mask_padding: bool = True
    """Leave the padded vocabulary out of the softmax in validation and evaluation."""

    def __post_init__(self) -> None:
        for name in ("blocks", "rounds", "width", "heads", "hidden", "vocabulary", "context"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._check_loop()
        self._require("heads", self.width % self.heads == 0, f"a divisor of model.width={self.width}")
        self._require("heads", self.head_size % 2 == 0, f"such that model.width={self.width} / heads is even")
        kinds = get_args(ResidualKind)
        self._require("block", self.block in kinds, f"one of {', '.join(kinds)}")
        self._require("p", math.isfinite(self.p) and self.p > 0, "positive and finite")
        used = self.block == "sandwich" or self.p == GPTConfig.p
        self._require("p", used, f"{GPTConfig.p} with model.block={self.block}; only the sandwich has a rule")
        self._require(
            "inner_norm",
            self.inner_norm or self.block in ("sandwich", "postnorm"),
            f"True with model.block={self.block}",
        )
        self._check_parts()
        gain, factored = self.factored_gain, self.block == "factored"
        self._require("factored_gain", math.isfinite(gain) and gain > 0, "positive and finite")
        self._require("factored_gain", gain == 1 or factored, f"1 with model.block={self.block}")
        self._require("mup_base_width", self.mup_base_width >= 0, "0 (off) or a width")

    def _check_loop(self) -> None:
        """What stands around the loop, and what enters it."""
        for name in PARTS:
            self._require(name, getattr(self, name) >= 0, "0 (none) or more")
        for field, kinds in (("injection", InjectionKind), ("first_state", FirstState)):
            known = get_args(kinds)
            self._require(field, getattr(self, field) in known, f"one of {', '.join(known)}")
        entered = self.injection != "none" or self.first_state == "embedding"
        self._require("first_state", entered, "embedding with model.injection=none, or nothing is read")
        # W starts as [I | 0], and a state of zeros has no direction that a norm could keep.
        stuck = self.injection == "linear" and self.first_state == "zeros"
        self._require("first_state", not stuck, "embedding or noise with model.injection=linear")
        scaled = not self.mup_base_width or self.injection in ("none", "add")
        self._require("mup_base_width", scaled, f"0 with model.injection={self.injection}")

    def _check_parts(self) -> None:
        """The parts of a sandwich, which other blocks do not have or settle themselves."""
        self._require("alpha", self.alpha in ("paper", "flat"), "paper or flat")
        self._require("beta", self.beta in ("on", "off"), "on or off")
        for name in ("alpha", "beta", "outer_gain"):
            default = getattr(GPTConfig, name)
            used = self.block == "sandwich" or getattr(self, name) == default
            self._require(name, used, f"left at {default} with model.block={self.block}, which settles it")
        scaled = self.alpha == "paper" or self.beta == "on"
        self._require("p", scaled or self.p == GPTConfig.p, f"{GPTConfig.p} with model.alpha=flat, beta=off")
        gain, flat = self.flat_gain, "flat" in (self.block, self.alpha)
        self._require("flat_gain", math.isfinite(gain) and gain > 0, "positive and finite")
        what = f"1 with model.block={self.block}, model.alpha={self.alpha}"
        self._require("flat_gain", gain == 1 or flat, what)

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"model.{name}={getattr(self, name)}: must be {what}")

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // 64) * 64

    @property
    def depth(self) -> int:
        """N = K·R, the unrolled depth of the loop."""
        return self.blocks * self.rounds

    @property
    def stored_blocks(self) -> int:
        """Blocks in memory: prelude, loop, coda."""
        return self.prelude + self.blocks + self.coda

    @property
    def is_plain_loop(self) -> bool:
        """Nothing around the loop, and nothing that enters it but the embedding."""
        extras = (self.prelude, self.coda, self.injection, self.first_state)
        return extras == (0, 0, "none", "embedding")

    def require_plain_loop(self, what: str) -> None:
        """Raises where `what` does not know this model's prelude, coda, injection or first state."""
        for name in (*PARTS, "injection", "first_state"):
            value, default = getattr(self, name), getattr(GPTConfig, name)
            if value != default:
                raise ValueError(f"{what}: is for models with model.{name}={default}, this one has {value}")

    def part(self, name: Part) -> "GPTConfig":
        """The prelude or the coda as a config of its own: its rule is that of its blocks at R = 1."""
        return replace(
            self,
            blocks=getattr(self, name),
            rounds=1,
            prelude=0,
            coda=0,
            injection="none",
            first_state="embedding",
        )

    @property
    def rule(self) -> ScalingRule | None:
        """The paper's rule, of a sandwich that has both its alpha and its beta; others have none."""
        whole = self.block == "sandwich" and (self.alpha, self.beta) == ("paper", "on")
        return ScalingRule(self.p) if whole else None

    @property
    def scales(self) -> Scales:
        """alpha, beta and epsilon of the block at K and R."""
        return block_scales(
            self.block,
            self.blocks,
            self.rounds,
            p=self.p,
            alpha=self.alpha,
            beta=self.beta,
            flat_gain=self.flat_gain,
            factored_gain=self.factored_gain,
        )

    @property
    def matrix_lr_multiplier(self) -> float:
        """What width-µP multiplies the logits by, and the learning rate of the blocks' matrices."""
        return self.mup_base_width / self.width if self.mup_base_width else 1.0

    @property
    def init_rule(self) -> InitRule:
        """The standard deviation every matrix is drawn at.

        Pre-norm's and post-norm's outputs are divided by sqrt K unless `shrink_outputs` says otherwise. A
        sandwich without beta has the standard initialisation, without the division.
        """
        plain = self.block in ("prenorm", "postnorm")
        shrink = plain if self.shrink_outputs is None else self.shrink_outputs
        return InitRule(
            width=self.width,
            beta=self.scales.beta,
            output_divisor=math.sqrt(self.blocks) if shrink else 1.0,
            scale_gate=self.scale_gate,
        )


class Block(nn.Module):
    """Attention, then SwiGLU, each inside its residual equation."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        residual = partial(
            ScaledResidual,
            width=config.width,
            kind=config.block,
            alpha=config.scales.alpha,
            epsilon=config.scales.epsilon,
            inner_norm=config.inner_norm,
            outer_gain=config.outer_gain,
        )
        self.attention = residual(CausalSelfAttention(config.width, config.heads))
        self.mlp = residual(SwiGLU(config.width, config.hidden))

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        slot: int = 0,
    ) -> Tensor:
        x = self.attention(x, rotary, mask, cache, slot)
        x = self.mlp(x)
        return x


class GPTOutput(NamedTuple):
    """`states` (B, T, width) after the final norm; `loss` summed over the targets, if there were any."""

    states: Tensor
    loss: Tensor | None


class LoopedGPT(nn.Module):
    """A causal language model whose blocks are applied `rounds` times.

    With `backprop` set, gradients go through the last so many rounds: the earlier ones keep no activations.

    The constructor draws all weights from `seed`. A model built on the meta device has none: give it
    memory with `to_empty` and call `init_weights` (the rotary table is set there as well).
    """

    cos: Tensor
    sin: Tensor
    first_noise: Tensor | None
    output_bias: nn.Parameter | None

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.rounds = config.rounds
        self.recompute: Recompute = "off"
        self.backprop: int | None = None
        self.embedding = nn.Embedding(config.padded_vocabulary, config.width)
        self.input_norm = RMSNorm(config.width)
        self.prelude = nn.ModuleList(Block(config.part("prelude")) for _ in range(config.prelude))
        self.injection = make_injection(config.injection, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.coda = nn.ModuleList(Block(config.part("coda")) for _ in range(config.coda))
        self.final_norm = RMSNorm(config.width) if config.final_norm else nn.Identity()
        bias = nn.Parameter(torch.empty(config.padded_vocabulary)) if config.unigram_bias else None
        self.register_parameter("output_bias", bias)
        for name in ("cos", "sin"):
            # fp32 whatever the weights are: the angles of late positions need it.
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
        """Start the output bias at the log frequencies of `counts` (vocabulary,), one added to each.

        The padding has the count 0 of a word that was never seen.
        """
        if self.output_bias is None:
            raise ValueError("model.unigram_bias=False: must be True for a model with an output bias")
        seen = F.pad(counts.double(), (0, self.config.padded_vocabulary - len(counts))) + 1
        self.output_bias.copy_((seen / seen.sum()).log())

    def init_tables(self) -> None:
        """Set what no checkpoint holds: the rotary table, and the first state's noise outside of training."""
        cos, sin = rotary_table(self.config.context, self.config.head_size)
        self.cos.copy_(cos)
        self.sin.copy_(sin)
        if self.first_noise is not None:
            generator = torch.Generator(device="cpu").manual_seed(0)  # one for all models: by position alone
            self.first_noise.copy_(torch.randn(self.first_noise.shape, generator=generator, device="cpu"))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: Cache | None = None,
        places: Places | None = None,
        noise: Tensor | None = None,
        state: Tensor | None = None,
    ) -> GPTOutput:
        """tokens and targets (B, T); targets below 0 are not counted.

        With a `cache` the tokens continue what it holds, and are added to it. `places` is for a cache that
        is not ours, and for padding: who gives it says where the tokens stand and what they see. `noise`
        (rounds, B, T, width) is added to the stream after each round, times the stream's root mean square.
        `state` (B, T, width) is the first state of a model whose `first_state` is noise: training draws it
        anew for every step; without it there is one draw per position, so that a cache changes nothing.
        """
        own = cache if isinstance(cache, KeyValueCache) else None
        rotary, mask = self.positions(tokens, own) if places is None else places
        embedded = self.input_norm(self.embedding(tokens))
        e = self.run_once("prelude", embedded, rotary, mask, cache)
        x = self.initial_state(e, 0 if own is None else own.length, state)
        entered = None if self.injection is None else self.injection.enter(e)
        x = self.run_loop(x, rotary, mask, cache, noise, entered)
        x = self.run_once("coda", x, rotary, mask, cache)
        if own is not None:
            own.length += tokens.shape[1]
        return self.read_out(x, targets)

    def run_once(
        self, part: Part, x: Tensor, rotary: Rotary, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """The blocks of the prelude or the coda, one after the other."""
        blocks = self.prelude if part == "prelude" else self.coda
        first = 0 if part == "prelude" else self.visits - len(self.coda)
        for slot, block in enumerate(blocks, start=first):
            x = self.visit(block, x, slot, rotary, mask, cache)
        return x

    def initial_state(self, e: Tensor, start: int, state: Tensor | None = None) -> Tensor:
        """What the first round starts from, where e (B, T, width) stands from position `start` on."""
        if self.config.first_state == "embedding":
            return e
        if self.config.first_state == "zeros":
            return torch.zeros_like(e)
        assert self.first_noise is not None
        table = self.first_noise[start : start + e.shape[1]] if state is None else state
        return table.to(e.dtype).expand_as(e)

    def run_loop(
        self,
        x: Tensor,
        rotary: Rotary,
        mask: Tensor | None,
        cache: Cache | None,
        noise: Tensor | None,
        entered: Tensor | None,
    ) -> Tensor:
        """All rounds; those before the last `backprop` stand outside of the graph."""
        free = 0
        if self.backprop is not None and torch.is_grad_enabled():
            free = max(0, self.rounds - self.backprop)
        if free:
            with torch.no_grad():
                x = self.run_rounds(x, rotary, mask, cache, noise, entered, range(free))
            torch.clear_autocast_cache()  # where older torch keeps weights cast without a graph
        return self.run_rounds(x, rotary, mask, cache, noise, entered, range(free, self.rounds))

    def run_rounds(
        self,
        x: Tensor,
        rotary: Rotary,
        mask: Tensor | None,
        cache: Cache | None,
        noise: Tensor | None = None,
        entered: Tensor | None = None,
        indices: range | None = None,
    ) -> Tensor:
        """The loop: all blocks, `rounds` times; or the rounds of those numbers alone."""
        for index in range(self.rounds) if indices is None else indices:
            # The last round's activations are needed at once: there is nothing to gain in it.
            recompute = self.recompute == "round" and cache is None and index < self.rounds - 1
            x = maybe_checkpoint(self.run_round, x, index, rotary, mask, cache, entered, recompute=recompute)
            if noise is not None:
                x = x + noise[index] * x.detach().square().mean(-1, keepdim=True).sqrt()
        return x

    def run_round(
        self,
        x: Tensor,
        index: int,
        rotary: Rotary,
        mask: Tensor | None,
        cache: Cache | None,
        entered: Tensor | None = None,
    ) -> Tensor:
        """Round number `index`: the injection, then every block once."""
        if self.injection is not None:
            x = self.injection(x, entered)
        for slot, block in enumerate(self.blocks, start=len(self.prelude) + index * len(self.blocks)):
            x = self.visit(block, x, slot, rotary, mask, cache)
        return x

    def visit(
        self,
        block: nn.Module,
        x: Tensor,
        slot: int,
        rotary: Rotary,
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Visit number `slot` of a forward pass, which has that slot of a cache."""
        if cache is not None:
            return block(x, rotary, mask, cache, slot)
        # Compiled blocks must not see a number that changes.
        recompute = self.recompute == "block" and slot < self.visits - 1
        return maybe_checkpoint(block, x, rotary, mask, recompute=recompute)

    @property
    def visits(self) -> int:
        """Block visits of a forward pass at the rounds set now: prelude, K·R, coda."""
        return len(self.prelude) + self.rounds * len(self.blocks) + len(self.coda)

    def positions(self, tokens: Tensor, cache: KeyValueCache | None) -> Places:
        """Rotary table and mask of tokens that stand behind those in the cache."""
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        if end > self.config.context:
            raise ValueError(f"tokens of length {end}: must be at most model.context={self.config.context}")
        if cache is not None:
            cache.check(slots=self.visits, length=end)
        rotary = (self.cos[start:end], self.sin[start:end])
        return rotary, causal_mask(start, end - start, tokens.device)

    def new_cache(self, capacity: int | None = None) -> KeyValueCache:
        """An empty cache for the rounds set now; room for the whole context unless less is enough."""
        capacity = self.config.context if capacity is None else capacity
        return KeyValueCache(self.visits, capacity)

    def read_out(self, x: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """The final norm, and the loss if there are targets."""
        states = self.final_norm(x)
        if targets is None:
            return GPTOutput(states, None)
        # In training the padding takes part in the softmax, as in the paper's lineage.
        padded = self.training or not self.config.mask_padding
        weight, bias = self._head(self.config.padded_vocabulary if padded else self.config.vocabulary)
        return GPTOutput(states, linear_cross_entropy(self._head_input(states), weight, targets, bias))

    def logits(self, states: Tensor) -> Tensor:
        """Logits over the real vocabulary, in fp32 (of a model that is not sharded)."""
        weight, bias = self._head(self.config.vocabulary)
        logits = F.linear(self._head_input(states), weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if bias is None else logits + bias  # after the cast: in bf16 it would lose its digits

    def set_rounds(self, rounds: int, *, recompute_alpha: bool | None = None) -> None:
        """Apply the blocks `rounds` times from now on: test-time depth. The weights stay.

        alpha and epsilon are the trained ones or the new depth's, as asked here or else in the config.
        Those of prelude and coda, which are visited once, stay.
        """
        changed = replace(self.config, rounds=rounds)  # also checks the value
        self.rounds = rounds
        recompute = self.config.recompute_alpha if recompute_alpha is None else recompute_alpha
        scales = (changed if recompute else self.config).scales
        for module in self.blocks.modules():
            if isinstance(module, ScaledResidual):
                module.alpha, module.epsilon = scales.alpha, scales.epsilon

    def _head(self, words: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the first `words` logits."""
        weight, bias = self.embedding.weight, self.output_bias
        if words == len(weight):
            return weight, bias
        return weight[:words], None if bias is None else bias[:words]

    def _head_input(self, states: Tensor) -> Tensor:
        # Scaling the states scales the logits, at width instead of vocabulary many products.
        scale = self.config.matrix_lr_multiplier
        return states if scale == 1 else states * scale
