"""`deeploop plan`: alpha, beta and the stability bounds of an architecture, as a table or as JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from deeploop.commands.parsing import run_command
from deeploop.rules import parse
from deeploop.theory.depth_law import rounds_law
from deeploop.theory.plan import Training, plan_hierarchy, plan_single
from deeploop.theory.scaling import DEEPLOOP, ScalingRule
from deeploop.theory.visits import DepthFrom, Horizon


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
    """Which of a hierarchy's visits stand in the training graph."""
    depth_from: DepthFrom = "cycles"
    """A hierarchy's N: cycles, the paper's, all blocks of the last cycle; graph, those with gradients."""
    rule: str = "deeploop"
    """The --rule of train, such as deepnorm, deeploop:p=0.3 or flat."""
    high_p: float | None = None
    """A hierarchy's exponent of H, where it is not that of L."""
    json: bool = False
    """Print one JSON object instead of a table."""


def run(args: PlanArgs) -> str:
    """The text that `deeploop plan` prints."""
    chosen = parse(args.rule, "--rule")
    other = None if chosen.is_paper else chosen
    rule = chosen.law or DEEPLOOP
    loop = {"blocks": args.blocks, "rounds": args.rounds}
    modules = {name: getattr(args, name) for name in ("high_blocks", "low_blocks", "cycles", "low_cycles")}
    sizes = _whole_set(loop, modules)
    if sizes.keys() == loop.keys():
        if args.high_p is not None:
            raise ValueError(f"--high-p {args.high_p:g}: goes with --high-blocks and --low-blocks")
        if args.spread != PlanArgs.spread and args.sample != "poisson-lognormal":
            raise ValueError(f"--spread {args.spread}: goes with --sample poisson-lognormal")
        law = rounds_law(args.sample, sizes["rounds"], limit=args.limit, spread=args.spread)
        if args.backprop > law.most:
            raise ValueError(
                f"--backprop {args.backprop}: must be at most {law.most}, the most rounds of a step"
            )
        training = Training(args.sample, law, args.backprop or None)
        plan = plan_single(
            **sizes, rule=rule, prelude=args.prelude, coda=args.coda, training=training, other=other
        )
    else:
        if other:
            raise ValueError(f"--rule {other}: goes with --blocks and --rounds")
        rules = {"H": rule if args.high_p is None else ScalingRule(args.high_p), "L": rule}
        for name in ("prelude", "coda", "backprop", "sample", "limit", "spread"):
            value = getattr(args, name)
            if value != getattr(PlanArgs, name):
                raise ValueError(f"--{name} {value}: goes with --blocks and --rounds")
        plan = plan_hierarchy(**sizes, horizon=args.horizon, rules=rules, depth_from=args.depth_from)
    return json.dumps(plan.to_json(), indent=2, ensure_ascii=False) if args.json else plan.to_table()


def _whole_set(*sets: Mapping[str, int | None]) -> dict[str, int]:
    """The one set of sizes that was given, whole."""
    choices = ", or ".join(_flags(sizes) for sizes in sets)
    given = [sizes for sizes in sets if any(value is not None for value in sizes.values())]
    if len(given) != 1:
        raise ValueError(f"{'mixed' if given else 'missing'} sizes: give {choices}")
    (sizes,) = given
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise ValueError(f"missing {_flags(missing)}: give {choices}")
    return {name: value for name, value in sizes.items() if value is not None}


def _flags(names: Iterable[str]) -> str:
    return " ".join("--" + name.replace("_", "-") for name in names)


def main(arguments: list[str]) -> int:
    words = {"p": "--rule deeploop:p=…"}
    return run_command(PlanArgs, run, arguments, prog="deeploop plan", words=words)
