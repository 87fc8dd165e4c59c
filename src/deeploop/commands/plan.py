"""`deeploop plan`: alpha, beta and the stability bounds of an architecture, as a table or as JSON."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from deeploop.rules import parse
from deeploop.theory.depth_law import rounds_law
from deeploop.theory.plan import plan_hierarchy, plan_single, plan_training, render
from deeploop.theory.scaling import DEEPLOOP, ScalingRule
from deeploop.theory.visits import DepthFrom, Horizon

LOOP = ("blocks", "rounds")
HIERARCHY = ("high_blocks", "low_blocks", "cycles", "low_cycles")


@dataclass(frozen=True)
class PlanArgs:
    """Print alpha, beta and the stability bounds of a looped architecture, and the scales of other rules."""

    blocks: int | None = None
    """Stored blocks K of a single loop."""
    rounds: int | None = None
    """Rounds R: how often the blocks are visited."""
    prelude: int = 0
    """Blocks before a single loop, visited once."""
    coda: int = 0
    """Blocks after it, visited once."""
    backprop: int = 0
    """Rounds G that gradients go through, the last min(R, G); 0: all."""
    sample: Literal["fixed", "uniform", "poisson-lognormal"] = "fixed"
    """How the rounds of a training step are drawn, around the mean that --rounds gives."""
    limit: int = 0
    """Most rounds of a step; 0: 2 rounds − 1 of uniform, 4 rounds of poisson-lognormal."""
    spread: float = 0.5
    """Standard deviation of the log rate of poisson-lognormal."""
    high_blocks: int | None = None
    """Blocks K_H of a hierarchy's high-level module."""
    low_blocks: int | None = None
    """Blocks K_L of a hierarchy's low-level module."""
    cycles: int | None = None
    """Outer cycles C of a hierarchy."""
    low_cycles: int | None = None
    """Runs C_L of the low-level module in each cycle."""
    horizon: Horizon = "last_cycle"
    """Visits of a hierarchy that are in the training graph."""
    depth_from: DepthFrom = "cycles"
    """A hierarchy's N: cycles, the paper's, all blocks of the last cycle; graph, those with gradients."""
    rule: str = "deeploop"
    """The --rule of train, such as deepnorm, deeploop:p=0.3 or flat."""
    high_p: float | None = None
    """Exponent of a hierarchy's module H, if it differs from L's."""
    json: bool = False
    """Print one JSON object instead of a table."""


def run(args: PlanArgs) -> str:
    """Return the text that `deeploop plan` prints."""
    chosen = parse(args.rule, "--rule")
    rule, other = chosen.law or DEEPLOOP, None if chosen.is_paper else chosen
    given = tuple(name for name in LOOP + HIERARCHY if getattr(args, name) is not None)
    if given not in (LOOP, HIERARCHY):
        raise ValueError(f"{flags(given) or 'no sizes'}: give {flags(LOOP)}, or {flags(HIERARCHY)}")
    sizes = {name: getattr(args, name) for name in given}
    if given == LOOP:
        refuse(args, ("high_p",), HIERARCHY)
        if args.spread != PlanArgs.spread and args.sample != "poisson-lognormal":
            raise ValueError(f"--spread {args.spread}: goes with --sample poisson-lognormal")
        law = rounds_law(args.sample, sizes["rounds"], limit=args.limit, spread=args.spread)
        if (kept := args.backprop) > law.most:
            raise ValueError(f"--backprop {kept}: must be at most {law.most}, the most rounds of a step")
        training = plan_training(sizes["blocks"], rule, args.sample, law, kept or None)
        parts = {"prelude": args.prelude, "coda": args.coda}
        plan = plan_single(**sizes, rule=rule, **parts, training=training, other=other)
    else:
        refuse(args, ("prelude", "coda", "backprop", "sample", "limit", "spread"), LOOP)
        if other:
            raise ValueError(f"--rule {other}: goes with {flags(LOOP, ' and ')}")
        rules = {"H": rule if args.high_p is None else ScalingRule(args.high_p), "L": rule}
        plan = plan_hierarchy(**sizes, horizon=args.horizon, rules=rules, depth_from=args.depth_from)
    return json.dumps(plan, indent=2, ensure_ascii=False, default=float) if args.json else render(plan, other)


def refuse(args: PlanArgs, names: Iterable[str], needed: Iterable[str]) -> None:
    """Raise ValueError if one of these options is given; they are valid only with the `needed` ones."""
    for name in names:
        if (value := getattr(args, name)) != getattr(PlanArgs, name):
            raise ValueError(f"{flags([name])} {value}: goes with {flags(needed, ' and ')}")


def flags(names: Iterable[str], between: str = " ") -> str:
    return between.join("--" + name.replace("_", "-") for name in names)
