"""The command line: `deeploop COMMAND …`.

Each command parses its arguments into a dataclass and hands it to the room that does the work.
Mistakes of the user end in one line on stderr and exit code 2; DEEPLOOP_TRACEBACK=1 shows where from.
"""

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import deeploop

T = TypeVar("T")

# What other trainers call a field of ours. tyro goes by letters alone: to it, lr is --optim.branch-lr.
TRAIN_WORDS = {
    **dict.fromkeys(("lr", "learning-rate", "learning-rates"), "--optim.peak-lr"),
    "warmup": "--optim.warmup-steps",
    "steps": "--optim.steps",
    **dict.fromkeys(("batch", "batch-size"), "--optim.batch"),
}

USAGE = """\
deeploop: train transformers whose blocks are visited many times

  deeploop plan --blocks 12 --rounds 3          alpha, beta, visit counts and bounds of an architecture
  deeploop prepare stdlib | text | fineweb-edu  text into token shards
  deeploop prepare arc | sudoku | maze          puzzles for a reasoner
  deeploop train RECIPE [--field value …]       train; any field of the recipe can be overridden
  deeploop validate RUN [--rounds 1 2 3 5 8]    its loss and bits per byte, at any test-time depth
  deeploop eval RUN [--shots 0 1]               its accuracy on the paper's eight tasks, or any other;
                                                a reasoner's on its puzzles, with votes on ARC
  deeploop generate [RUN] --prompt "…"          text from a trained model, as it is produced
  deeploop diagnose [RUN…]                      κ_R: do the visits of its blocks align? and the step's effect
  deeploop sweep table1 | p-sweep | … | FILE    the paper's grids of runs, or your own, in parallel
  deeploop runs [FOLDER…]                       list and compare runs: settings, progress, losses, cost
  deeploop report RUN… [--out FOLDER]           tables and figures beside the paper's, as one HTML page
  deeploop export RUN FOLDER                    weights, tokenizer and code for transformers
  deeploop bench [--rounds 1 3 7]               tokens/s, share of the device's ceiling, peak memory
  deeploop demo                                 see looped depth collapse and train, in five minutes

Each command has --help. More: README.md
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # α and ─ must not end a command where output is ASCII
    try:
        code = _run(arguments)
        sys.stdout.flush()  # now, while a reader that has left can still be told from an error
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ArithmeticError, MemoryError) as error:
        if os.environ.get("DEEPLOOP_TRACEBACK"):
            raise
        name = " ".join(["deeploop", *arguments[:1]])
        print(f"{name}: error: {_message(error)}", file=sys.stderr)
        return 2


def _message(error: Exception) -> str:
    """One line; of an OSError the file and what is the matter, without Python's number for it."""
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"deeploop {deeploop.__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise ValueError(f"command {name!r}: unknown; choose one of {', '.join(COMMANDS)}")
    return COMMANDS[name](rest)


def _plan(arguments: list[str]) -> int:
    from deeploop.theory import plan

    print(plan.run(_parse(plan.PlanArgs, arguments, prog="deeploop plan")))
    return 0


def _prepare(arguments: list[str]) -> int:
    from deeploop.data import prepare, prepare_puzzles

    sources: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "stdlib": (prepare.PrepareStdlib, prepare.run),
        "text": (prepare.PrepareText, prepare.run),
        "fineweb-edu": (prepare.PrepareFinewebEdu, prepare.run),
        "arc": (prepare_puzzles.PrepareArc, prepare_puzzles.run),
        "sudoku": (prepare_puzzles.PrepareSudoku, prepare_puzzles.run),
        "maze": (prepare_puzzles.PrepareMaze, prepare_puzzles.run),
    }
    choice, rest = _choose("source", arguments, {name: _summary(kind) for name, (kind, _) in sources.items()})
    if choice is not None:
        kind, run = sources[choice]
        args = _parse(kind, rest, prog=f"deeploop prepare {choice}")
        # Ended at once, as is the default, it would leave its worker processes waiting for ever.
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            print(run(args))
        finally:
            signal.signal(signal.SIGTERM, previous)
    return 0


def _train(arguments: list[str]) -> int:
    from deeploop.experiments.recipes import RECIPES, get_recipe

    choice, rest = _choose("recipe", arguments, {name: _summary(make) for name, make in RECIPES.items()})
    if choice is None:
        return 0
    recipe = get_recipe(choice)
    prog = f"deeploop train {choice}"
    config = _parse(type(recipe), rest, prog=prog, default=recipe, words=TRAIN_WORDS)
    from deeploop.experiments.endings import MEMORY_IS_FULL, is_out_of_memory
    from deeploop.train.loop import train

    try:
        result = train(config)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        size = config.device.micro_batch
        smaller = str(max(1, size // 2)) if size else "N with an N below the one printed at the start"
        raise ValueError(
            f"{MEMORY_IS_FULL}; try --device.no-graph, --device.recompute block, or "
            f"--device.micro-batch {smaller}"
        ) from None
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            f"{result['ended']} at step {result['step']}: {config.out}, last validation {result['loss']:.4f}"
        )
    return 0


def _validate(arguments: list[str]) -> int:
    from deeploop.experiments import validate

    print(validate.run(_parse(validate.ValidateArgs, arguments, prog="deeploop validate")))
    return 0


def _eval(arguments: list[str]) -> int:
    from deeploop.experiments import evaluate

    print(evaluate.run(_parse(evaluate.EvalArgs, arguments, prog="deeploop eval")))
    return 0


def _generate(arguments: list[str]) -> int:
    from deeploop.eval import generation
    from deeploop.models.adaptive import AdaptiveDepth, ExitRule
    from deeploop.train.distributed import DeviceConfig, open_world
    from deeploop.train.rundir import is_shipped

    args = _parse(generation.GenerateArgs, arguments, prog="deeploop generate")
    if is_shipped(args.run):
        print("the small model that comes with deeploop; name a run folder for another", file=sys.stderr)
    with open_world(DeviceConfig(kind=args.device)) as world:
        model, tokenizer = deeploop.load(args.run, device=world.device)
    if args.rounds is not None:
        model.set_rounds(args.rounds)
    adaptive = (
        None if args.adaptive == "off" else AdaptiveDepth(model, ExitRule(args.adaptive, args.threshold))
    )
    ended = generation.stream_text(
        adaptive or model,
        tokenizer,
        args.prompt,
        write=lambda piece: print(piece, end="", flush=True),
        max_tokens=args.max_tokens,
        sampling=args,
    )
    print(flush=True)
    if ended == "context":
        context = model.config.context
        print(f"stopped: the model's context of {context} tokens is full", file=sys.stderr)
    if adaptive is not None:
        print(f"mean rounds a token: {adaptive.mean_rounds:.2f} of {model.rounds}", file=sys.stderr)
    return 0


def _diagnose(arguments: list[str]) -> int:
    from deeploop.experiments import diagnose

    print(diagnose.run(_parse(diagnose.DiagnoseArgs, arguments, prog="deeploop diagnose")))
    return 0


def _runs(arguments: list[str]) -> int:
    from deeploop.experiments import listing

    print(listing.run(_parse(listing.RunsArgs, arguments, prog="deeploop runs")))
    return 0


def _report(arguments: list[str]) -> int:
    from deeploop.experiments import report

    print(report.run(_parse(report.ReportArgs, arguments, prog="deeploop report")))
    return 0


def _sweep(arguments: list[str]) -> int:
    from deeploop.experiments import sweep
    from deeploop.experiments.paper_grids import GRIDS

    if not arguments:
        _choose("sweep", arguments, {name: _summary(make) for name, make in GRIDS.items()})
        return 0
    return sweep.run(_parse(sweep.SweepArgs, arguments, prog="deeploop sweep"))


def _export(arguments: list[str]) -> int:
    from deeploop.experiments import export

    print(export.run(_parse(export.ExportArgs, arguments, prog="deeploop export")))
    return 0


def _bench(arguments: list[str]) -> int:
    from deeploop.experiments import bench

    print(bench.run(_parse(bench.BenchArgs, arguments, prog="deeploop bench")))
    return 0


def _demo(arguments: list[str]) -> int:
    from deeploop.experiments import demo

    print(demo.run(_parse(demo.DemoConfig, arguments, prog="deeploop demo")))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": _plan,
    "prepare": _prepare,
    "train": _train,
    "validate": _validate,
    "eval": _eval,
    "generate": _generate,
    "diagnose": _diagnose,
    "runs": _runs,
    "report": _report,
    "sweep": _sweep,
    "export": _export,
    "bench": _bench,
    "demo": _demo,
}


def _choose(what: str, arguments: list[str], choices: dict[str, str]) -> tuple[str | None, list[str]]:
    """Takes the first word as a choice; without one, or with --help, lists what there is."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, choices))
        print(f"choose a {what}; each has its own --help:\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, text in choices.items()))
        return None, []
    if arguments[0].startswith("-"):
        raise ValueError(f"{arguments[0]}: the {what} comes first; choose one of {', '.join(choices)}")
    if arguments[0] not in choices:
        raise ValueError(f"{what} {arguments[0]!r}: unknown; choose one of {', '.join(choices)}")
    return arguments[0], arguments[1:]


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]


def _parse(
    kind: type[T],
    arguments: list[str],
    *,
    prog: str,
    default: T | None = None,
    words: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """tyro's parse, with its framed error page cut down to the one line that says what is wrong.

    `words` are names that others would use for an option, and the option that is meant.
    """
    import tyro

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            if default is None:
                return tyro.cli(kind, args=arguments, prog=prog)
            return tyro.cli(kind, args=arguments, prog=prog, default=default)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise ValueError(_one_line(stderr.getvalue(), words)) from None


def _one_line(page: str, words: Mapping[str, str]) -> str:
    """The message inside tyro's frame: the text up to the first rule, and what was meant.

    That is what `words` say of the unknown option's last part, or else tyro's own guess.
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", page)  # colours, where stdout is a terminal
    lines = [line.strip("│╭╮╰╯ ") for line in plain.splitlines()][1:]  # the first line is a title
    sections = [part for part in re.split(r"(?m)^[─-]{5,}$", "\n".join(lines)) if part.strip()]
    message = re.sub(
        r"^Error parsing ([\w.-]+: (?=\w+\.\w+=|\w+=)|\w+Args: )", "", " ".join(sections[0].split())
    )
    hint = next((s for s in sections if "Perhaps you meant" in s), "")
    unknown = re.match(r"Unrecognized options: --(?:[\w-]+\.)*([\w-]+)", message)
    meant = words.get(unknown[1].replace("_", "-")) if unknown else None
    if meant is None and (close := re.search(r"--[\w.-]+", hint)):
        meant = close.group()
    return message + (f"; perhaps you meant {meant}" if meant else "")
