"""TRM, the Tiny Recursive Model: one small module in both roles of the recurrence."""

from dataclasses import dataclass
from typing import Literal

from deeploop.models.reasoner_config import ReasonerConfig
from deeploop.theory.visits import Horizon, Schedule, shared_hierarchy


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
