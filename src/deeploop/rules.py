"""Every residual rule, once: its names, its equation, its scales, and how its matrices are drawn. No torch.

Equation                            name        scales
x ← Norm(α·x + f(Norm(x)))          deeploop    α = (2N)^p, β = (8N)^-p at p = 1/2
                                    deepnorm    at p = 1/4; inner_norm=off is DeepNorm's original block
x ← Norm(α·x + f(Norm(x)·g))        flat        α = λ·R·√K; the outer norm has no gain
x ← Norm(x + f(x))                  postnorm
x ← x + f(Norm(x))                  prenorm     with q: ε = R^-q on the branch
x ← x + ε·f(Norm(x))                averaged    ε = 1/N, the branches' mean over depth
                                    factored    ε = λ/(R·√K), arXiv 2606.18524 in its own words
x ← x + f(Norm(x)/√k)               lnscale     LayerNorm Scaling, arXiv 2502.05795; k counts stored blocks

K blocks are applied for R rounds, N = K·R. A rule is written as its name, followed by a colon and changed
parameters: `deeploop:p=0.3`, `flat:gain=2`, `deeploop:alpha=flat,beta=off`. Nothing else compares a rule's
name.
"""

import difflib
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from deeploop.theory.scaling import (
    Scales,
    ScalingRule,
    averaged_epsilon,
    factored_epsilon,
    flat_alpha,
    round_epsilon,
)

EMBEDDING_STD = 0.02
UNSCALED = ("q", "k")
BRANCH = ("v", "o", "gate", "up", "down")  # DeepNorm's set: value, output, feed-forward
OUTPUTS = ("o", "down")
FORM = "outer(α·x + ε·f(inner(x)))"
PARTS = ("p", "alpha", "gain", "beta", "outer_gain", "inner_norm", "gate", "shrink")


def is_gain(gain: float) -> bool:
    """Return True if fp32 can hold the gain of a rule, and any alpha or epsilon computed from it."""
    return 1e-9 <= gain <= 1e9


SWITCH = {"on": True, "off": False, "true": True, "false": False}


def _read(default: Any, text: str, name: str) -> Any:
    """Parse a value of the same kind as the default."""
    if isinstance(default, bool):
        if text.lower() not in SWITCH:
            raise ValueError(f"{name}={text}: must be on or off")
        return SWITCH[text.lower()]
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{name}={text}: must be a number") from None
    return text


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


@dataclass(frozen=True)
class InitRule:
    """The standard deviation of every matrix of a model, by its role (its name in the layer)."""

    width: int
    beta: float = 1.0
    output_divisor: float = 1.0  # √K where the output projections are shrunk
    scale_gate: bool = True  # whether β reaches SwiGLU's gate

    @property
    def branch(self) -> tuple[str, ...]:
        """Return the roles that are drawn at β."""
        return BRANCH if self.scale_gate else tuple(role for role in BRANCH if role != "gate")

    def std(self, role: str) -> float:
        """0.5/√width for all matrices (down too), times β in the branch, over the divisor in outputs."""
        if role in ("embedding", "head"):
            return EMBEDDING_STD
        if role not in UNSCALED + BRANCH:
            raise ValueError(f"role={role!r}: must be one of embedding, head, {', '.join(UNSCALED + BRANCH)}")
        std = 0.5 / math.sqrt(self.width)
        if role in self.branch:
            std *= self.beta
        if role in OUTPUTS:
            std /= self.output_divisor
        return std


@dataclass(frozen=True)
class Rule:
    """A residual equation with its scales; `vary` changes its parameters."""

    name: str
    label: str
    """Its name in tables and figures."""
    colour: str
    claim: str
    """How its scale changes as R grows."""
    options: tuple[str, ...]
    """The fields below that may be varied."""
    outer_norm: bool = True
    alpha: Literal["none", "paper", "flat"] = "none"
    """On the skip: 1, (2N)^p or λ·R·√K."""
    epsilon: Literal["none", "factored", "averaged"] = "none"
    """On the branch: 1, λ/(R·√K) or 1/N."""
    beta: bool = False
    """Draw the branch's matrices at β = (8N)^-p."""
    p: float = 0.5
    gain: float = 1.0
    """λ of the flat α and of the factored ε."""
    q: float = 0.0
    """ε = R^-q, by which a trained pre-norm stack is looped."""
    inner_norm: bool = True
    """Normalise the branch's input."""
    by_block: bool = False
    """Divide the normalised input by √k, k the number of the stored block from 1."""
    outer_gain: bool = True
    """Keep the gain of the outer norm, which multiplies the stream at every visit."""
    gate: bool = True
    """Draw SwiGLU's gate at β too, as its up and down matrices are."""
    shrink: bool = False
    """Divide the initial output projections by √K."""
    form: str = FORM
    """Form of the equation, which the Triton kernels must support."""

    def __post_init__(self) -> None:
        for name, holds, what in (
            ("p", math.isfinite(self.p) and self.p > 0, "a positive number"),
            ("gain", is_gain(self.gain), "1e-9 to 1e9"),
            ("q", 0 <= self.q <= 2, "0 to 2"),
            ("alpha", "alpha" not in self.options or self.alpha in ("paper", "flat"), "paper or flat"),
        ):
            if not holds:
                raise ValueError(f"{name}={_written(getattr(self, name))}: must be {what}")

    def __str__(self) -> str:
        base = NAMED[self.name]
        own = {name: getattr(self, name) for name in self.options}
        changes = [f"{k}={_written(value)}" for k, value in own.items() if value != getattr(base, k)]
        return f"{self.name}:{','.join(changes)}" if changes else self.name

    def vary(self, **changes: Any) -> "Rule":
        """Return the rule with other parameters, under the name that it then has."""
        for name in changes:
            if name not in self.options:
                known = ", ".join(self.options)
                raise ValueError(f"{name}: no parameter of {self.name}; it has {known}")
        rule = replace(self, **changes)
        if rule.alpha == "flat" and not rule.beta and not rule.outer_gain:
            return _renamed(rule, "flat")
        if rule.alpha == "none":
            return rule
        if rule.gain != 1 and rule.alpha != "flat":
            raise ValueError(f"gain={_written(rule.gain)}: must be 1 without alpha=flat")
        if rule.alpha == "flat" and not rule.beta:  # nothing is left that p could say
            if "p" in changes and rule.p != self.p:
                raise ValueError(f"p={_written(rule.p)}: must be left out with alpha=flat, beta=off")
            return replace(_renamed(rule, "deeploop"), p=NAMED["deeploop"].p)
        return _renamed(rule, "deepnorm" if rule.p == NAMED["deepnorm"].p else "deeploop")

    @property
    def title(self) -> str:
        """Return the label, with what was changed, as tables name it."""
        base = NAMED[self.name]
        name = self.label
        if self.beta or self.alpha == "paper":
            name += f" p={self.p:g}"
        gain = f" λ={self.gain:g}" if self.gain != 1 else ""
        changed = {one for one in self.options if getattr(self, one) != getattr(base, one)}
        words = {
            "alpha": f"α flat{gain}",
            "beta": "no β",
            "outer_gain": "no outer gain",
            "inner_norm": "no inner norm",
            "gate": "gate without β",
            "shrink": "outputs / √K" if self.shrink else "outputs not / √K",
            "q": f"ε = R^-{self.q:g}",
        }
        name += "" if "alpha" in changed else gain
        return ", ".join([name, *(text for one, text in words.items() if one in changed)])

    @property
    def equation(self) -> str:
        """Return the update that is computed; g is a gain if only one norm has one."""
        inner = "Norm(x)" + "/√k" * self.by_block if self.inner_norm else "x"
        if self.inner_norm and self.outer_norm and not self.outer_gain:
            inner += "·g"
        skip, branch = "α·" * self.has_alpha + "x", "ε·" * self.has_epsilon + f"f({inner})"
        return f"x ← Norm({skip} + {branch})" if self.outer_norm else f"x ← {skip} + {branch}"

    @property
    def formula(self) -> str:
        """Return the formula of the scale in the equation; empty if there is none."""
        alpha = {"none": "", "paper": "α = (2N)^p", "flat": "α = λ·R·√K"}[self.alpha]
        epsilon = {"none": "", "factored": "ε = λ/(R√K)", "averaged": "ε = 1/N"}[self.epsilon]
        return alpha or epsilon or ("ε = R^-q" if self.q else "")

    @property
    def has_alpha(self) -> bool:
        return self.alpha != "none"

    @property
    def has_epsilon(self) -> bool:
        return self.epsilon != "none" or self.q != 0

    @property
    def varies(self) -> bool:
        """True if ε is meant to follow the rounds of every step."""
        return self.q != 0

    @property
    def is_paper(self) -> bool:
        """True if the rule has all parts of the paper's block: its α, its β and the outer norm's gain."""
        return self.law is not None and self.outer_gain

    @property
    def law(self) -> ScalingRule | None:
        """The paper's scaling rule, if the rule has both its α and its β."""
        return ScalingRule(self.p) if self.alpha == "paper" and self.beta else None

    @property
    def needs_depth(self) -> bool:
        """True if α or β is computed from N, the depth in blocks."""
        return self.alpha == "paper" or self.beta

    @property
    def block(self) -> tuple[object, ...]:
        """The rule without its scales: weights can move between rules that agree in it."""
        return self.outer_norm, self.outer_gain, self.inner_norm, self.has_alpha, self.epsilon, self.form

    @property
    def gains(self) -> int:
        """Number of norms of a sublayer that have a gain."""
        return self.inner_norm + (self.outer_norm and self.outer_gain)

    def scales(self, K: int, R: int, N: int | None = None) -> Scales:
        """Return α, β and ε of K blocks at R rounds; N is K·R, unless the caller counts it."""
        for name, count in (("blocks", K), ("rounds", R)):
            if count != int(count):
                raise ValueError(f"{name}={count}: must be a whole number")
        N = K * R if N is None else N
        law = ScalingRule(self.p)
        alpha = flat_alpha(K, R, self.gain) if self.alpha == "flat" else 1.0
        if self.alpha == "paper":
            alpha = law.alpha(N)
        epsilon = round_epsilon(R, self.q)
        if self.epsilon == "factored":
            epsilon = factored_epsilon(K, R, self.gain)
        elif self.epsilon == "averaged":
            epsilon = averaged_epsilon(K, R)
        return Scales(alpha, law.beta(N) if self.beta else 1.0, epsilon)

    def input_scale(self, number: int) -> float:
        """Return the factor on the normalised input of stored block `number`, counted from 1."""
        return number**-0.5 if self.by_block else 1.0

    def init(self, width: int, K: int, beta: float) -> InitRule:
        """Return the initialization of the matrices of K blocks."""
        return InitRule(width, beta, math.sqrt(K) if self.shrink else 1.0, self.gate)


DEEPLOOP = Rule(
    "deeploop",
    "DeepLoop",
    "#D55E00",
    "its bound stays finite under aligned visits",
    PARTS,
    alpha="paper",
    beta=True,
)
POSTNORM = Rule(
    "postnorm", "post-norm", "#45C4E0", "no scale follows R", ("shrink",), inner_norm=False, shrink=True
)
PRENORM = Rule(
    "prenorm",
    "pre-norm",
    "#0072B2",
    "no scale follows R",
    ("q", "shrink"),
    outer_norm=False,
    shrink=True,
)
# The scale of the next three is in ε or α alone: no β, and outputs are not divided by √K on top of it.
AVERAGED = replace(
    PRENORM,
    name="averaged",
    label="averaged",
    colour="#CF6FE0",
    claim="the stream gets the mean of what the N visits add",
    options=("shrink",),
    epsilon="averaged",
    shrink=False,
)
FACTORED = replace(
    AVERAGED,
    name="factored",
    label="factored",
    colour="#8A3324",
    claim="all visits of a block together add as much at every R",
    options=("gain", "shrink"),
    epsilon="factored",
)
# Its authors leave the initial outputs whole: the factor does what dividing them by √K did.
LNSCALE = replace(
    PRENORM,
    name="lnscale",
    label="LayerNorm Scaling",
    colour="#9BC53D",
    claim="no scale follows R; a block's branches are read at 1/√k in every round",
    options=("shrink",),
    shrink=False,
    by_block=True,
    form="outer(α·x + ε·f(s·inner(x)))",
)
FLAT = Rule(
    "flat",
    "flat",
    "#009E73",
    "all visits together add as much at every R",
    ("gain", "inner_norm", "shrink"),
    alpha="flat",
    outer_gain=False,
)
DEEPNORM = replace(DEEPLOOP, name="deepnorm", label="DeepNorm", colour="#D9A400", p=0.25)
RULES = (DEEPLOOP, DEEPNORM, PRENORM, POSTNORM, AVERAGED, FACTORED, FLAT, LNSCALE)
NAMED = {rule.name: rule for rule in RULES}


@lru_cache(maxsize=256)
def parse(text: str, field: str = "rule") -> Rule:
    """Parse a rule such as `deeploop:p=0.3`; errors call it `field`."""
    name, colon, rest = text.partition(":")
    if name not in NAMED:
        close = difflib.get_close_matches(name, NAMED, 1)
        advice = f"; perhaps {close[0]}" if close else ""
        raise ValueError(f"{field}={text:.80}: must be one of {', '.join(NAMED)}{advice}")
    rule = NAMED[name]
    try:
        changes: dict[str, Any] = {}
        for part in rest.split(",") if colon else ():
            key, _, value = part.partition("=")
            if key in changes:
                raise ValueError(f"{key}: is given twice")
            changes[key] = _read(getattr(rule, key), value, key) if key in rule.options else value
        return rule.vary(**changes)
    except ValueError as error:
        raise ValueError(f"{field}={text:.80}: {error}") from None


def as_rule(rule: "Rule | str") -> Rule:
    """Return a rule unchanged, or the one that a text names."""
    return parse(rule) if isinstance(rule, str) else rule


def _renamed(rule: Rule, name: str) -> Rule:
    """Return the rule of that name with the parameters of this one."""
    base = NAMED[name]
    return replace(base, **{one: getattr(rule, one) for one in base.options})
