"""`deeploop recommend`: a rule, three learning rates to compare, and the command to start with."""

import json
import math
from dataclasses import asdict, dataclass

from deeploop.report.recommend import Recommendation, recommend
from deeploop.rules import NAMED, parse

RESULTS = "docs/results/"
HEAD_SIZES = (64, 128, 32, 16, 8, 4, 2)


@dataclass(frozen=True)
class RecommendArgs:
    """Recommend a residual rule, and learning rates to compare, for a shape, a length and a batch."""

    blocks: int
    """Stored blocks K."""
    rounds: int
    """Rounds R: how often the blocks are visited."""
    width: int
    """Width of the residual stream."""
    tokens: float
    """Tokens of the whole training, such as 3e8."""
    batch: int
    """Sequences per optimizer step."""
    context: int = 1024
    """Tokens per sequence."""
    rule: str | None = None
    """Ask for the rates of this rule, such as prenorm; unset: the best one in long training."""
    json: bool = False
    """Print one JSON object instead of text."""


def run(args: RecommendArgs) -> str:
    """Return the text that `deeploop recommend` prints."""
    found = recommend(
        args.blocks, args.rounds, args.width, round(args.tokens), args.batch * args.context, rule=args.rule
    )
    if args.json:
        record = asdict(found) | {"command": command(args, found)}
        return json.dumps(record, indent=1, ensure_ascii=False)
    answer = "\n".join(f"{name:<10}  {text}".rstrip() for name, text in lines(args, found))
    return f"{answer}\n\n{command(args, found)}"


def lines(args: RecommendArgs, found: Recommendation) -> list[tuple[str, str]]:
    """Return the name and the text of every line of the answer."""
    rule, line = NAMED[found.rule], found.line
    folders = [folder.removeprefix(RESULTS) for folder in line.folders]
    scales = rule.scales(args.blocks, args.rounds)
    rates = ", ".join(f"{rate * 1e3:g}e-3" for rate in found.rates)
    shown = [f"{symbol} = {value:.4g}" for symbol, value in zip("αβε", scales, strict=True) if value != 1]
    return [
        ("rule", f"{rule.label}, {rule.equation}" + f" with {', '.join(shown)}" * bool(shown)),
        ("", standing(found)),
        ("", f"({found.order.conditions})"),
        ("rates", f"compare {rates}; if the best is at an edge, try the next octave"),
        ("rests on", f"{line.points} best rates of this rule, in {RESULTS}: {', '.join(folders)}"),
        ("", "taken to go as 1/width and √(tokens per step); they lie within"),
        ("", f"{line.spread:.1f} octaves (one standard deviation) of such a line"),
        ("warm-up", f"{found.warmup:.0%} of the steps, as in these runs"),
        *(("beyond" if not index else "", text) for index, text in enumerate(found.notes)),
    ]


def standing(found: Recommendation) -> str:
    """Describe the rule's rank in long training."""
    order = found.order
    if found.rule not in order.losses:
        return f"not among the rules of {order.folder}"
    own, best = order.losses[found.rule], min(order.losses.values())
    others = [name for name in order.losses if name != found.rule]
    if found.rule in order.level:
        level = [name for name in order.level if name != found.rule]
        behind = [f"{order.losses[name] - own:.3f} of {name}" for name in others if name not in level]
        same = f"cannot be told apart from {', '.join(level)}; " if level else ""
        return f"in long training {same}ahead by {', '.join(behind)}"
    return f"in long training {own - best:.3f} behind {order.level[0]}"


def command(args: RecommendArgs, found: Recommendation) -> str:
    """Return the training command to start with, at the middle rate."""
    steps = math.ceil(args.tokens / (args.batch * args.context))
    size = next(size for size in HEAD_SIZES if args.width % size == 0)
    options = {
        "data": "DATA",
        "rule": str(parse(found.rule)),
        "blocks": args.blocks,
        "rounds": args.rounds,
        "width": args.width,
        "model.heads": args.width // size,
        "model.hidden": -(-args.width * 8 // 3 // 16) * 16,
        "context": args.context,
        "batch": args.batch,
        "steps": steps,
        "warmup": round(found.warmup * steps),
        "lr": f"{found.rates[1]:g}",
    }
    words = [f"--{name} {value}" for name, value in options.items()]
    return " ".join(["deeploop train gpt2-small", *words])
