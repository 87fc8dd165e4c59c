"""GPTConfig: shape and parameterization of a looped GPT, validated, with derived quantities."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from deeploop.config.kinds import AttentionBias, InjectionKind, QKNorm
from deeploop.rules import InitRule, Rule, parse
from deeploop.theory.scaling import Scales

FirstState = Literal["embedding", "zeros", "noise"]
Part = Literal["prelude", "coda"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class GPTConfig:
    """Shape and parameterization of a looped GPT; the defaults are the paper's small model at R=3."""

    blocks: int = 12
    """Physical blocks K, stored once each."""
    rounds: int = 3
    """Rounds R: number of times that the blocks are applied."""
    prelude: int = 0
    """Blocks before the loop, visited once."""
    coda: int = 0
    """Blocks after the loop, visited once."""
    injection: InjectionKind = "none"
    """Injection of the prelude's output e into every round: x + e, W [x; e], or gated (contractive)."""
    first_state: FirstState = "embedding"
    """First state of the loop: the prelude's output, zeros, or Gaussian noise of unit RMS."""
    exit_gate: bool = False
    """Add a gate that predicts after each round whether a token may exit; trained by --gate.stage."""
    width: int = 768
    """Width of the residual stream."""
    heads: int = 6
    """Attention heads; a divisor of the width, unless head_width is given."""
    kv_heads: int = 0
    """Heads of keys and values, a divisor of the heads (grouped-query attention); 0: one for each head."""
    head_width: int = 0
    """Width of a head; 0: width / heads."""
    qk_norm: QKNorm = "after-rotary"
    """Where to normalize queries and keys by head; Qwen3 does so before the rotation, Llama never."""
    attention_bias: AttentionBias = "none"
    """Projections of the attention with a bias: none; q, k and v; or o as well."""
    mlp_bias: bool = False
    """Give SwiGLU's three projections a bias."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (rope_theta)."""
    rotary_scaling: tuple[float, ...] = ()
    """A linear factor; or Llama 3's factor, low and high frequency factors, and original context."""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
    hidden: int = 2048
    """Hidden width of SwiGLU. The public medium config has 2730; 2736 is a multiple of 16 and faster."""
    vocabulary: int = 50257
    """Real vocabulary size; the embedding is padded to the next multiple of 64."""
    context: int = 1024
    """Longest sequence, in tokens."""
    rule: str = "deeploop"
    """Residual rule, such as deeploop, deepnorm, prenorm or flat:gain=2; docs/model.md has all of them."""
    input_norm: bool = True
    """Keep the RMSNorm of the embedding."""
    final_norm: bool = True
    """Keep the RMSNorm after the last block."""
    tied_head: bool = True
    """Use the embedding as output matrix; False gives the head its own matrix."""
    unigram_bias: bool = False
    """Add a learned output bias that starts at the log unigram frequencies of the training text."""
    recompute_alpha: bool = False
    """When rounds are changed at test time, use alpha (or epsilon) of the new depth, not the trained one."""
    mup_base_width: int = 0
    """Width-µP: multiply logits and the matrices' learning rate by this width / width; 0: off."""
    mask_padding: bool = True
    """Exclude the padded vocabulary from the softmax in validation and evaluation."""

    def __post_init__(self) -> None:
        for name in ("blocks", "rounds", "width", "heads", "hidden", "vocabulary", "context"):
            count = getattr(self, name)
            self._require(name, isinstance(count, int), "a whole number")
            self._require(name, count >= 1, "at least 1")
        self._check_loop()
        self._check_attention()
        # Rules that compute the same have the same text, so that configs compare equal.
        object.__setattr__(self, "rule", str(parse(str(self.rule), "model.rule")))
        self._require("mup_base_width", self.mup_base_width >= 0, "0 (off) or a width")

    def _check_attention(self) -> None:
        divides = self.head_width or self.width % self.heads == 0
        self._require("heads", bool(divides), f"a divisor of model.width={self.width}")
        self._require(
            "head_width", self.head_width >= 0 and self.head_width % 2 == 0, "0 (width / heads), or even"
        )
        self._require("heads", self.head_size % 2 == 0, f"such that model.width={self.width} / heads is even")
        shared = self.kv_heads >= 0 and self.heads % (self.kv_heads or self.heads) == 0
        self._require("kv_heads", shared, f"0 or a divisor of model.heads={self.heads}")
        for field, kinds in (("qk_norm", QKNorm), ("attention_bias", AttentionBias)):
            known = get_args(kinds)
            self._require(field, getattr(self, field) in known, f"one of {', '.join(known)}")
        for name in ("rotary_base", "norm_eps"):
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value > 0, "positive and finite")
        scaling = self.rotary_scaling
        whole = len(scaling) in (0, 1, 4) and all(math.isfinite(one) and one > 0 for one in scaling)
        whole = whole and (len(scaling) < 4 or scaling[1] < scaling[2])
        self._require(
            "rotary_scaling", whole, "empty, a factor, or factor, low, high > low, original context"
        )

    def _check_loop(self) -> None:
        """Check prelude, coda, injection and first state."""
        for name in PARTS:
            self._require(name, getattr(self, name) >= 0, "0 (none) or more")
        for field, kinds in (("injection", InjectionKind), ("first_state", FirstState)):
            known = get_args(kinds)
            self._require(field, getattr(self, field) in known, f"one of {', '.join(known)}")
        entered = self.injection != "none" or self.first_state == "embedding"
        self._require("first_state", entered, "embedding with model.injection=none, or nothing is read")
        # W starts as [I | 0], and a state of zeros has no direction for a norm to keep.
        stuck = self.injection == "linear" and self.first_state == "zeros"
        self._require("first_state", not stuck, "embedding or noise with model.injection=linear")
        scaled = not self.mup_base_width or self.injection in ("none", "add")
        self._require("mup_base_width", scaled, f"0 with model.injection={self.injection}")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"model.{name}={getattr(self, name)}: must be {what}")

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def grouped_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // 64) * 64

    @property
    def depth(self) -> int:
        """N = K·R, the unrolled depth of the loop."""
        return self.blocks * self.rounds

    @property
    def stored_blocks(self) -> int:
        """The number of blocks in memory: prelude, loop, coda."""
        return self.prelude + self.blocks + self.coda

    @property
    def is_plain_loop(self) -> bool:
        """True if there is nothing around the loop, and only the embedding enters it."""
        extras = (self.prelude, self.coda, self.injection, self.first_state)
        return extras == (0, 0, "none", "embedding")

    def require_plain_loop(self, what: str) -> None:
        """Raise ValueError if the model has a prelude, coda, injection or first state; `what` needs none."""
        for name in (*PARTS, "injection", "first_state"):
            value, default = getattr(self, name), getattr(GPTConfig, name)
            if value != default:
                raise ValueError(f"{what}: is for models with model.{name}={default}, this one has {value}")

    def part(self, name: Part) -> "GPTConfig":
        """The prelude or the coda as a config of its own, with the rule of its blocks at R = 1."""
        return replace(
            self,
            blocks=getattr(self, name),
            rounds=1,
            prelude=0,
            coda=0,
            injection="none",
            first_state="embedding",
            exit_gate=False,
        )

    @property
    def residual(self) -> Rule:
        """The residual rule named by `rule`."""
        return parse(self.rule)

    @property
    def scales(self) -> Scales:
        """alpha, beta and epsilon of the rule at K and R."""
        return self.residual.scales(self.blocks, self.rounds)

    @property
    def matrix_lr_multiplier(self) -> float:
        """Factor of width-µP for the logits and for the learning rate of the blocks' matrices."""
        return self.mup_base_width / self.width if self.mup_base_width else 1.0

    @property
    def init_rule(self) -> InitRule:
        """The standard deviations that matrices are drawn with."""
        return self.residual.init(self.width, self.blocks, self.scales.beta)
