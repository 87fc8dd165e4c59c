"""ReasonerConfig: shape, recurrence and parameterization that HRM and TRM share, checked."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deeploop.rules import DEEPLOOP, FLAT, POSTNORM, Rule, is_gain
from deeploop.theory.scaling import ScalingRule, flat_alpha
from deeploop.theory.visits import HORIZONS, DepthFrom, Horizon, Schedule

Mixer = Literal["attention", "mlp"]


@dataclass(frozen=True)
class ReasonerConfig:
    """Shape, recurrence and parameterization that HRM and TRM share."""

    width: int = 512
    """Width of both states."""
    heads: int = 8
    """Attention heads; they divide the width."""
    hidden: int = 1536
    """Hidden width of SwiGLU; published: 8/3 of the width, up to a multiple of 256."""
    cycles: int = 2
    """Cycles C of a segment; H is called once in each."""
    low_cycles: int = 2
    """Calls C_L of L in a cycle."""
    horizon: Horizon = "last_call"
    """Calls with gradients: the last of each role, the last cycle, or all."""
    p: float = 0.0
    """Exponent of alpha = (2N)^p and beta = (8N)^-p: 0 the published block, 1/2 DeepLoop, 1/4 DeepNorm."""
    flat: bool = False
    """Take the flat rule in place of p: alpha = lambda R sqrt K of each module, R its visits in the graph."""
    flat_gain: float = 1.0
    """Lambda of the flat rule."""
    depth: int = 0
    """The rule's N; 0 counts it from the schedule."""
    depth_from: DepthFrom = "cycles"
    """Blocks that N counts: cycles, the paper's N_g, all of the last cycle; graph, those with gradients."""
    puzzle_positions: int = 1
    """Positions before the board: the puzzle's vector, and zeros if there are more."""
    mixer: Mixer = "attention"
    """Mixer of positions: attention with rotary embedding, or an MLP over the sequence without."""

    def __post_init__(self) -> None:
        for name in ("width", "heads", "hidden", "cycles", "low_cycles", "puzzle_positions"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("heads", self.width % self.heads == 0, f"a divisor of model.width={self.width}")
        self._require("heads", self.head_size % 2 == 0, f"such that model.width={self.width} / heads is even")
        self._require("horizon", self.horizon in HORIZONS, f"one of {', '.join(HORIZONS)}")
        self._require("mixer", self.mixer in ("attention", "mlp"), "attention or mlp")
        self._require("depth", self.depth >= 0, "0 (counted) or a number of blocks")
        self._require("depth_from", self.depth_from in ("cycles", "graph"), "cycles or graph")
        counted = self.depth_from == "cycles" or not self.depth
        self._require("depth_from", counted, f"cycles with model.depth={self.depth}, which nobody counts")
        self._require("p", math.isfinite(self.p) and self.p >= 0, "0 (no rule) or more, and finite")
        gain = self.flat_gain
        self._require("flat_gain", is_gain(gain), "1e-9 to 1e9")
        self._require("flat_gain", gain == 1 or self.flat, "1 without model.flat")
        for name in ("p", "depth"):
            self._require(
                name, not (self.flat and getattr(self, name)), "0 with model.flat, which needs none"
            )

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"model.{name}={getattr(self, name)}: must be {what}")

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def blocks_of(self) -> dict[str, int]:
        """Stored blocks of each module."""
        raise NotImplementedError

    def module_of(self, role: Literal["L", "H"]) -> str:
        """The module that plays a role of the recurrence."""
        raise NotImplementedError

    @property
    def schedule(self) -> Schedule:
        """Every visit of one segment."""
        raise NotImplementedError

    def exponent(self, module: str) -> float:
        """p of a module's rule; 0 where it has none."""
        return self.p

    def rule_of(self, module: str) -> Rule:
        """The residual rule of a module's blocks, which have no inner norm."""
        if self.flat:
            return FLAT.vary(gain=self.flat_gain, inner_norm=False)
        p = self.exponent(module)
        return DEEPLOOP.vary(p=p, inner_norm=False) if p else POSTNORM

    @property
    def N(self) -> int:
        """The depth that the rule is taken at: counted from the schedule, unless it was set."""
        return self.depth or self.schedule.rule_depth(self.depth_from)

    def alpha(self, module: str) -> float:
        if self.flat:
            return flat_alpha(self.blocks_of[module], self.schedule.R_g_of(module), self.flat_gain)
        p = self.exponent(module)
        return ScalingRule(p).alpha(self.N) if p else 1.0

    def beta(self, module: str) -> float:
        p = self.exponent(module)
        return ScalingRule(p).beta(self.N) if p else 1.0


class PuzzleShape(NamedTuple):
    """Sizes of a model that the data decide."""

    vocabulary: int
    length: int
    puzzle_ids: int
