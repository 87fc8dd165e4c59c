"""Generate text with a run's model, streaming it to stdout."""

import math
import sys
from pathlib import Path

from deeploop.config.run import DeviceConfig
from deeploop.eval.decoding import describe
from deeploop.eval.generation import stream_text
from deeploop.exits import memory_advice
from deeploop.files import is_shipped
from deeploop.models.adaptive import AdaptiveDepth, ExitRule
from deeploop.runs.folder import require_checkpoint
from deeploop.tasks.language.options import GenerateArgs
from deeploop.terminal import printable
from deeploop.train.distributed import open_world
from deeploop.train.rundir import load


def run(args: GenerateArgs) -> int:
    """Write the text to stdout, and messages to stderr."""
    if is_shipped(args.run):
        print("the small model that comes with deeploop; name a run folder for another", file=sys.stderr)
    checkpoint = require_checkpoint(args.run)
    with memory_advice("--device cpu, or a smaller --max-tokens"):
        with open_world(DeviceConfig(kind=args.device)) as world:
            model, tokenizer = load(args.run, device=world.device, checkpoint=checkpoint)
        if args.rounds is not None:
            model.set_rounds(args.rounds)
        model.set_cache_rounds(args.cache_rounds)
        adaptive = None if args.adaptive == "off" else AdaptiveDepth(model, exit_rule(args))
        if model.budget_warning:
            print(f"warning: {model.budget_warning}", file=sys.stderr)
        if world.device.type == "cuda":
            print(f"decoding: {describe(adaptive or model)}", file=sys.stderr)
        shown = sys.stdout.isatty()
        ended = stream_text(
            adaptive or model,
            tokenizer,
            args.prompt,
            write=lambda piece: print(printable(piece, "\n\t") if shown else piece, end="", flush=True),
            max_tokens=args.max_tokens,
            sampling=args,
        )
    print(flush=True)
    if not is_shipped(args.run):
        print(f"written by {args.run} at {checkpoint.name}", file=sys.stderr)
    if ended == "context":
        context = model.config.context
        print(f"stopped: the model's context of {context} tokens is full", file=sys.stderr)
    if adaptive is not None:
        print(rounds_used(adaptive, args.run), file=sys.stderr)
    return 0


def rounds_used(adaptive: AdaptiveDepth, run: Path) -> str:
    """The mean rounds per token, and why no token exited early."""
    rule, smallest = adaptive.rule, adaptive.smallest
    text = f"mean rounds per token: {adaptive.mean_rounds:.2f} of {adaptive.model.rounds}"
    if not 0 < rule.threshold <= smallest < math.inf:
        return text
    return (
        f"{text}; no token exited early, as the smallest {rule.criterion} in a round was {smallest:.2g} and "
        f"the threshold is {rule.threshold:g} (others: `deeploop validate {run} --adaptive {rule.criterion}`)"
    )


def exit_rule(args: GenerateArgs) -> ExitRule:
    """The exit rule of the options, with the default threshold of its criterion."""
    assert args.adaptive != "off"
    usual = 0.5 if args.adaptive == "gate" else 0.1
    return ExitRule(args.adaptive, usual if args.threshold is None else args.threshold)
