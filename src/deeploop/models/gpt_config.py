"""GPTConfig: shape and parameterization of a looped GPT, checked, with what follows from them."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from deeploop.config.kinds import AttentionBias, InjectionKind, QKNorm
from deeploop.theory.scaling import Scales, ScalingRule, block_scales

ResidualKind = Literal["prenorm", "postnorm", "sandwich", "factored", "averaged", "flat"]
if TYPE_CHECKING:
    from deeploop.nn.init import InitRule

FirstState = Literal["embedding", "zeros", "noise"]
Part = Literal["prelude", "coda"]
PARTS: tuple[Part, ...] = get_args(Part)


def is_gain(gain: float) -> bool:
    """Whether fp32 holds the gain of a rule, and any alpha or epsilon that it makes."""
    return 1e-9 <= gain <= 1e9


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
    exit_gate: bool = False
    """Add a gate that says after each round whether a token may stop; trained as --gate.stage says."""
    width: int = 768
    """Width of the residual stream."""
    heads: int = 6
    """Attention heads; they divide the width, unless head_width is given."""
    kv_heads: int = 0
    """Heads of keys and values, which divide the heads (grouped-query attention); 0: one for each head."""
    head_width: int = 0
    """Numbers per head; 0: width / heads."""
    qk_norm: QKNorm = "after-rotary"
    """Where queries and keys are normalised by head; Qwen3 does it before they are rotated, Llama nowhere."""
    attention_bias: AttentionBias = "none"
    """Which projections of the attention have a bias: none, q k v, or o as well."""
    mlp_bias: bool = False
    """Give SwiGLU's three projections a bias."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (rope_theta)."""
    rotary_scaling: tuple[float, ...] = ()
    """A linear factor; or Llama 3's factor, low and high frequency factors, and original context."""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
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
    """Divide the initial output projections by sqrt(blocks); unset: for prenorm and postnorm."""
    epsilon_exponent: float = 0.0
    """Exponent q of pre-norm's epsilon = R^-q, by which a trained stack is looped; 0: epsilon is 1."""
    input_norm: bool = True
    """Keep the RMSNorm of the embedding."""
    final_norm: bool = True
    """Keep the RMSNorm after the last block."""
    tied_head: bool = True
    """Read out by the embedding; False gives the head a matrix of its own."""
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
        self._check_attention()
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
        self._require("factored_gain", is_gain(gain), "1e-9 to 1e9")
        self._require("factored_gain", gain == 1 or factored, f"1 with model.block={self.block}")
        self._require("mup_base_width", self.mup_base_width >= 0, "0 (off) or a width")
        exponent = self.epsilon_exponent
        self._require("epsilon_exponent", 0 <= exponent <= 2, "0 to 2")
        self._require(
            "epsilon_exponent", exponent == 0 or self.block == "prenorm", f"0 with model.block={self.block}"
        )

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
        self._require("flat_gain", is_gain(gain), "1e-9 to 1e9")
        what = f"1 with model.block={self.block}, model.alpha={self.alpha}"
        self._require("flat_gain", gain == 1 or flat, what)

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
            exit_gate=False,
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
            epsilon_exponent=self.epsilon_exponent,
        )

    @property
    def matrix_lr_multiplier(self) -> float:
        """What width-µP multiplies the logits by, and the learning rate of the blocks' matrices."""
        return self.mup_base_width / self.width if self.mup_base_width else 1.0

    @property
    def init_rule(self) -> "InitRule":
        """The standard deviation every matrix is drawn at.

        Pre-norm's and post-norm's outputs are divided by sqrt K unless `shrink_outputs` says otherwise. A
        sandwich without beta has the standard initialisation, without the division.
        """
        plain = self.block in ("prenorm", "postnorm")
        shrink = plain if self.shrink_outputs is None else self.shrink_outputs
        from deeploop.nn.init import InitRule  # now: it imports torch

        return InitRule(
            width=self.width,
            beta=self.scales.beta,
            output_divisor=math.sqrt(self.blocks) if shrink else 1.0,
            scale_gate=self.scale_gate,
        )
