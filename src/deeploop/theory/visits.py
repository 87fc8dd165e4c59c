"""Visit schedules: every run of a residual sublayer, in execution order.

A transformer block holds two residual sublayers (attention, then MLP). A looped model stores few sublayers
and visits each many times. The theory is about visits, so a schedule lists them all, and every count of the
paper (M, N, J, R and their gradient-visible forms) is computed from that list.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

SUBLAYERS_PER_BLOCK = 2  # attention, MLP
MOST_VISITS = 10**6  # listed one by one; deeper than any model, and a second's work

Horizon = Literal["full", "last_cycle", "last_call"]
HORIZONS: tuple[Horizon, ...] = get_args(Horizon)
DepthFrom = Literal["cycles", "graph"]


class Visit(NamedTuple):
    """One run of one residual sublayer; all indices start at 0."""

    module: str
    cycle: int  # outer cycle; always 0 in a single loop
    round: int  # which run of the module within its cycle
    sublayer: int  # physical index within the module: 2 * block + (0 attention, 1 MLP)
    has_grad: bool  # True if this visit is in the training graph


class Call(NamedTuple):
    """One run of a module of a hierarchy: all of its blocks, in the role of L or of H."""

    role: Literal["L", "H"]
    cycle: int
    iterate: int  # which of the cycle's L calls
    has_grad: bool


@dataclass(frozen=True)
class Schedule:
    """Every visit in execution order, and the counts that follow from it."""

    visits: tuple[Visit, ...]

    @property
    def M(self) -> int:
        """Visits of a forward pass."""
        return len(self.visits)

    @property
    def N(self) -> int:
        """Effective depth in blocks: M / 2."""
        return self.M // SUBLAYERS_PER_BLOCK

    @property
    def J(self) -> int:
        """Physical (stored) residual sublayers."""
        return sum(len(sublayers) for sublayers in self._tally.values())

    @property
    def M_g(self) -> int:
        """Number of visits in the training graph."""
        return sum(sublayers.total() for sublayers in self._tally_g.values())

    @property
    def N_g(self) -> int:
        """Gradient-visible depth in blocks: M_g / 2."""
        return self.M_g // SUBLAYERS_PER_BLOCK

    def rule_depth(self, depth_from: DepthFrom = "cycles") -> int:
        """The depth in blocks at which a rule computes alpha and beta.

        cycles: the paper's count, all blocks of every cycle that a gradient reaches. A single loop has N; a
        hierarchy K_H + C_L·K_L under `last_cycle` and `last_call`, and C times that under `full`.
        graph: N_g, the blocks in the training graph, which under `last_call` are fewer.
        """
        if depth_from == "graph":
            return self.N_g
        reached = {visit.cycle for visit in self.visits if visit.has_grad}
        return sum(visit.cycle in reached for visit in self.visits) // SUBLAYERS_PER_BLOCK

    @property
    def modules(self) -> tuple[str, ...]:
        """Module names in the order of their first visit."""
        return tuple(self._tally)

    def J_of(self, module: str) -> int:
        """Physical residual sublayers of one module."""
        return len(self._tally[module])

    def R_of(self, module: str) -> int:
        """Number of visits of each sublayer of the module in a forward pass."""
        return self._even_count(module, self._tally[module])

    def R_g_of(self, module: str) -> int:
        """Number of visits of each sublayer of the module in the training graph."""
        return self._even_count(module, self._tally_g.get(module, Counter()))

    @cached_property
    def _tally(self) -> dict[str, Counter[int]]:
        return _tally(self.visits)

    @cached_property
    def _tally_g(self) -> dict[str, Counter[int]]:
        return _tally(visit for visit in self.visits if visit.has_grad)

    def _even_count(self, module: str, visited: Counter[int]) -> int:
        counts = {visited[sublayer] for sublayer in self._tally[module]}
        if len(counts) > 1:
            raise ValueError(f"module {module!r}: sublayers visited {sorted(counts)} times, need one count")
        return counts.pop()


def single_loop(blocks: int, rounds: int) -> Schedule:
    """K blocks applied for R rounds, all in the graph."""
    _check(blocks=blocks, rounds=rounds)
    _check_size(blocks * rounds)
    return Schedule(
        tuple(
            visit for r in range(rounds) for visit in _call("loop", blocks, cycle=0, round=r, has_grad=True)
        )
    )


def hierarchy(high_blocks: int, low_blocks: int, cycles: int, low_cycles: int, horizon: Horizon) -> Schedule:
    """Modules "H" and "L": each of C cycles runs L for C_L calls, then H once (the recurrence of HRM).

    horizon `full` keeps every visit in the graph, `last_cycle` the whole last cycle, `last_call` only the
    very last L call and the very last H call.
    """
    _check(horizon, high_blocks=high_blocks, low_blocks=low_blocks, cycles=cycles, low_cycles=low_cycles)
    _check_size(cycles * (high_blocks + low_cycles * low_blocks))
    blocks = {"H": high_blocks, "L": low_blocks}
    return Schedule(
        tuple(
            visit
            for role, cycle, iterate, has_grad in recurrence(cycles, low_cycles, horizon)
            for visit in _call(role, blocks[role], cycle, iterate, has_grad)
        )
    )


def shared_hierarchy(blocks: int, cycles: int, low_cycles: int, horizon: Horizon) -> Schedule:
    """One module, "shared", in both roles of `hierarchy`, so run C_L + 1 times per cycle (as in TRM)."""
    _check(horizon, blocks=blocks, cycles=cycles, low_cycles=low_cycles)
    _check_size(cycles * (low_cycles + 1) * blocks)
    return Schedule(
        tuple(
            visit
            for role, cycle, iterate, has_grad in recurrence(cycles, low_cycles, horizon)
            for visit in _call("shared", blocks, cycle, low_cycles if role == "H" else iterate, has_grad)
        )
    )


def recurrence(cycles: int, low_cycles: int, horizon: Horizon) -> Iterator[Call]:
    """Every call of a hierarchy in execution order: each cycle, L low_cycles times and then H once.

    The models run by this list, and the schedules count from it.
    """
    for cycle in range(cycles):
        last_cycle = cycle == cycles - 1
        for iterate in range(low_cycles):
            yield Call("L", cycle, iterate, _in_graph(horizon, last_cycle, iterate == low_cycles - 1))
        yield Call("H", cycle, 0, _in_graph(horizon, last_cycle, True))


def _in_graph(horizon: Horizon, last_cycle: bool, last_call: bool) -> bool:
    return horizon == "full" or (last_cycle and (last_call or horizon == "last_cycle"))


def _call(module: str, blocks: int, cycle: int, round: int, has_grad: bool) -> Iterator[Visit]:
    for sublayer in range(SUBLAYERS_PER_BLOCK * blocks):
        yield Visit(module, cycle, round, sublayer, has_grad)


def _tally(visits: Iterable[Visit]) -> dict[str, Counter[int]]:
    """Module → physical sublayer → visits."""
    tally: dict[str, Counter[int]] = {}
    for visit in visits:
        tally.setdefault(visit.module, Counter())[visit.sublayer] += 1
    return tally


def _check(horizon: Horizon = "full", **counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    if horizon not in HORIZONS:
        raise ValueError(f"horizon={horizon!r}: must be one of {', '.join(HORIZONS)}")


def _check_size(depth: int) -> None:
    if SUBLAYERS_PER_BLOCK * depth > MOST_VISITS:
        raise ValueError(f"depth N={depth}: must be at most {MOST_VISITS // SUBLAYERS_PER_BLOCK} blocks")
