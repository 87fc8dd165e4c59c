"""HRM, the Hierarchical Reasoning Model: a slow module H and a fast module L with separate blocks."""

from dataclasses import dataclass
from typing import Literal

from deeploop.models.reasoner_config import ReasonerConfig
from deeploop.theory.visits import Schedule, hierarchy


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
