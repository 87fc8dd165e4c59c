"""`deeploop generate`: text from a trained model, streamed as it is produced."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from deeploop.commands.memory import memory_advice
from deeploop.commands.parsing import parse
from deeploop.eval.sampling import Sampling
from deeploop.terminal import printable

if TYPE_CHECKING:
    from deeploop.models.adaptive import ExitRule


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(Sampling):
    """Continues a prompt with the model of a run; text appears as it is produced."""

    run: Positional[Path] = Path("shipped")
    """Run folder, as `deeploop train` writes it; `shipped` is the small model that comes with deeploop."""
    prompt: str = ""
    """Text to continue; without one a new document is begun."""
    max_tokens: int = 200
    """Tokens to add at most; a document that ends, or a full context, ends the text before."""
    rounds: int | None = None
    """Rounds R at test time; unset: as trained."""
    adaptive: Literal["off", "change", "kl", "gate"] = "off"
    """Let a token stop early: by the change of its state, the KL between readouts, or the exit gate."""
    threshold: float | None = None
    """Where depth is adaptive: what counts as no longer changing (0.1), or the gate's probability (0.5)."""
    cache_rounds: int | None = None
    """Rounds whose keys and values are kept: 1 keeps the last round's; unset, or above R: all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.threshold is not None and self.adaptive == "off":
            raise ValueError(f"threshold={self.threshold}: goes with --adaptive change, kl or gate")


def exit_rule(args: GenerateArgs) -> "ExitRule":
    """When a token stops, as it was asked for."""
    from deeploop.models.adaptive import ExitRule

    assert args.adaptive != "off"
    usual = 0.5 if args.adaptive == "gate" else 0.1
    return ExitRule(args.adaptive, usual if args.threshold is None else args.threshold)


def main(arguments: list[str]) -> int:
    args = parse(GenerateArgs, arguments, prog="deeploop generate")
    # Now: these wait for torch, --help does not.
    from deeploop.config.run import DeviceConfig
    from deeploop.eval.decoding import describe
    from deeploop.eval.generation import stream_text
    from deeploop.models.adaptive import AdaptiveDepth
    from deeploop.train.distributed import open_world
    from deeploop.train.rundir import is_shipped, load, require_checkpoint

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
        print(f"mean rounds per token: {adaptive.mean_rounds:.2f} of {model.rounds}", file=sys.stderr)
    return 0
