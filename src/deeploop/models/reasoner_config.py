"""Configs of HRM, with a slow and a fast module, and of TRM, one module in both roles: validated."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from deeploop.rules import NAMED, Rule, parse
from deeploop.theory.scaling import Scales
from deeploop.theory.visits import HORIZONS, DepthFrom, Horizon, Schedule, hierarchy, shared_hierarchy

Mixer = Literal["attention", "mlp"]
VARIED = ("p", "alpha", "beta", "gain")  # parameters of a rule that a block without gains and inner norm has


@dataclass(frozen=True)
class ReasonerConfig:
    """Shape, recurrence and parameterization shared by HRM and TRM."""

    width: int = 512
    """Width of both states."""
    heads: int = 8
    """Attention heads; a divisor of the width."""
    hidden: int = 1536
    """Hidden width of SwiGLU; published: 8/3 of the width, rounded up to a multiple of 256."""
    cycles: int = 2
    """Cycles C of a segment; H is called once in each."""
    low_cycles: int = 2
    """Calls C_L of L in a cycle."""
    horizon: Horizon = "last_call"
    """Calls with gradients: the last of each role, the last cycle, or all."""
    rule: str = "postnorm"
    """Residual rule, without an inner norm: postnorm, as published; deeploop, deepnorm, flat."""
    depth: int = 0
    """The rule's N; 0: counted from the schedule."""
    depth_from: DepthFrom = "cycles"
    """Blocks that N counts: cycles, the paper's N_g, all of the last cycle; graph, those with gradients."""
    puzzle_positions: int = 1
    """Positions before the board: the puzzle's embedding, and zeros if there are more."""
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
        self._require("depth_from", counted, f"cycles with model.depth={self.depth}, which is not counted")
        self._check_rule("rule")

    def _check_rule(self, name: str) -> None:
        """Refuse a rule with an equation other than Norm(αx + f(x)); write it as every config does."""
        rule = parse(str(getattr(self, name)), f"model.{name}")
        base = NAMED[rule.name]
        others = [
            one for one in rule.options if one not in VARIED and getattr(rule, one) != getattr(base, one)
        ]
        fits = rule.outer_norm and (not rule.inner_norm or "inner_norm" in rule.options)
        self._require(name, fits, "postnorm, deeploop, deepnorm or flat in a reasoner")
        self._require(name, not others, f"a rule with {', '.join(VARIED)} alone in a reasoner")
        counts = rule.needs_depth or not rule.has_alpha
        self._require(
            "depth", counts or not self.depth, f"0 with model.{name}={rule}, which counts no blocks"
        )
        object.__setattr__(self, name, str(rule))

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
        """The module with a role in the recurrence."""
        raise NotImplementedError

    @property
    def schedule(self) -> Schedule:
        """All visits of one segment."""
        raise NotImplementedError

    def rule_of(self, module: str) -> Rule:
        """The residual rule of a module's blocks, which have no inner norm."""
        rule = parse(self._rule_named(module))
        return rule.vary(inner_norm=False) if rule.inner_norm else rule

    def _rule_named(self, module: str) -> str:
        return self.rule

    def scales_of(self, module: str) -> Scales:
        """α and β of a module's blocks."""
        return self.rule_of(module).scales(self.blocks_of[module], self.schedule.R_g_of(module), self.N)

    @property
    def N(self) -> int:
        """The depth for the rule: counted from the schedule, unless it was set."""
        return self.depth or self.schedule.rule_depth(self.depth_from)


@dataclass(frozen=True)
class HRMConfig(ReasonerConfig):
    """HRM; the defaults are the published model, whose graph has only the last call of L and of H."""

    high_blocks: int = 4
    """Stored blocks K_H of module H."""
    low_blocks: int = 4
    """Stored blocks K_L of module L."""
    high_rule: str = ""
    """Residual rule of module H, if it is not that of L."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("high_blocks", "low_blocks"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        if self.high_rule:
            self._check_rule("high_rule")

    @property
    def blocks_of(self) -> dict[str, int]:
        return {"H": self.high_blocks, "L": self.low_blocks}

    def module_of(self, role: Literal["L", "H"]) -> str:
        return role

    @property
    def schedule(self) -> Schedule:
        return hierarchy(self.high_blocks, self.low_blocks, self.cycles, self.low_cycles, self.horizon)

    def _rule_named(self, module: str) -> str:
        return self.high_rule if module == "H" and self.high_rule else self.rule


@dataclass(frozen=True)
class TRMConfig(ReasonerConfig):
    """TRM; the defaults are the published ARC model, whose graph has the whole last cycle."""

    cycles: int = 3
    """Cycles T of a segment; the module is called once in the role of H in each."""
    low_cycles: int = 4
    """Calls n in the role of L in a cycle."""
    horizon: Horizon = "last_cycle"
    """Calls with gradients: the last of each role, the last cycle, or all."""
    puzzle_positions: int = 16
    """Positions before the board: the puzzle's embedding, and zeros if there are more."""
    blocks: int = 2
    """Stored blocks of the one module."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("blocks", self.blocks >= 1, "at least 1")

    @property
    def blocks_of(self) -> dict[str, int]:
        return {"shared": self.blocks}

    def module_of(self, role: Literal["L", "H"]) -> str:
        return "shared"

    @property
    def schedule(self) -> Schedule:
        return shared_hierarchy(self.blocks, self.cycles, self.low_cycles, self.horizon)


class PuzzleShape(NamedTuple):
    """Sizes of a model that the data determine."""

    vocabulary: int
    length: int
    puzzle_ids: int
