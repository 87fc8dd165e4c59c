"""The command line: `deeploop COMMAND …`. A command is a line of `DIRECT`, or a `main` in `commands`.

A user's mistake ends in one line on stderr, with a code of `exits.py`; DEEPLOOP_TRACEBACK=1 shows where it
was raised.
"""

import io
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import deeploop
from deeploop.commands.parsing import parse, require_known
from deeploop.exits import INTERRUPTED, MISTAKE, OUT_OF_MEMORY, OutOfDeviceMemory, is_out_of_memory
from deeploop.terminal import printable, show

COMMANDS = (
    "plan",
    "recommend",
    "prepare",
    "data",
    "inspect",
    "retrofit",
    "import",
    "train",
    "validate",
    "eval",
    "solve",
    "generate",
    "chat",
    "diagnose",
    "sweep",
    "runs",
    "report",
    "export",
    "bench",
    "demo",
    "doctor",
)
# The class of a command's arguments, and the function that is given them; others read their words themselves.
DIRECT = {
    **{
        name: (f"deeploop.commands.{name}:{name.capitalize()}Args", f"deeploop.commands.{name}:run")
        for name in ["data", "demo", "doctor", "export", "inspect", "plan", "recommend", "report", "runs"]
    },
    "bench": ("deeploop.bench.options:BenchArgs", "deeploop.bench:run"),
    "chat": ("deeploop.tasks.chat.options:ChatArgs", "deeploop.tasks.chat.talk:run"),
    "diagnose": ("deeploop.tasks.options:DiagnoseArgs", "deeploop.commands.diagnose:run"),
    "eval": ("deeploop.tasks.options:EvalArgs", "deeploop.commands.eval:run"),
    "generate": ("deeploop.tasks.language.options:GenerateArgs", "deeploop.tasks.language.generate:run"),
    "import": ("deeploop.tasks.puzzles.options:ImportArgs", "deeploop.tasks.puzzles.public:run"),
    "retrofit": ("deeploop.retrofit.options:RetrofitArgs", "deeploop.retrofit.make:run"),
    "solve": ("deeploop.tasks.puzzles.options:SolveArgs", "deeploop.tasks.puzzles.solve:run"),
    "validate": ("deeploop.tasks.language.options:ValidateArgs", "deeploop.tasks.language.validate:run"),
}
# Options that are not there, and what is meant by them.
WORDS = {
    "demo": {"collapse": "deeploop sweep docs/results/demo-collapse/grid.toml, in a clone of the repository"},
    "export": {"rounds": "rounds=… in from_pretrained, one export serves all"},
    "plan": {"p": "--rule deeploop:p=…"},
}
MOVED = {"pack": "python -m research.pack, in a clone of the repository"}
USAGE = """\
deeploop: train transformers that apply K stored blocks R times

  deeploop plan --blocks 12 --rounds 3          alpha, beta, visit counts and bounds of a shape
  deeploop recommend --blocks 4 --rounds 16 …   a rule, and learning rates to compare
  deeploop prepare stdlib | text | fineweb-edu  text as shards of tokens
  deeploop prepare chat FILE.jsonl              conversations, for deeploop train chat
  deeploop prepare arc | sudoku | maze          puzzles for a reasoner
  deeploop prepare pairs FILE.jsonl             puzzles of your own, one pair per line
  deeploop data FOLDER [--verify]               describe and check a prepared folder
  deeploop train RECIPE [--rounds 4 …]          train; RECIPE --help lists the first options,
                                                --help-all every field; --auto-lr takes the rate
                                                of `recommend`; --dry-run trains nothing
  deeploop train --resume RUN                   continue a run with its own config
  deeploop train --config FILE                  train with the config in a file
  deeploop inspect MODEL                        layers and sizes of a pretrained model
  deeploop retrofit MODEL --core 8-15 …         loop a pretrained model, to be trained further
  deeploop import hrm | trm CHECKPOINT …        a checkpoint of the public code, for eval
  deeploop validate RUN [--rounds 1 2 3 5 8]    loss and bits per byte, at any test-time depth
  deeploop eval RUN [--shots 0 1]               accuracy on the paper's eight tasks, or any other;
                                                a reasoner's on its puzzles, with votes on ARC;
                                                an iterated task's: --steps 1 2 4 8 16 32
  deeploop solve RUN "98.7..6..75…"             a reasoner's board after each segment
  deeploop generate [RUN] --prompt "…"          text from a trained model, as it is produced
  deeploop chat RUN                             talk to a fine-tuned model in the terminal
  deeploop diagnose [RUN…]                      alignment κ_R of a run's visits, effect of a step
  deeploop sweep table1 | p-sweep | … | FILE    the paper's grids of runs, or your own, in parallel
  deeploop runs [FOLDER…]                       list and compare runs: settings, losses, cost
  deeploop report RUN… [--out FOLDER]           tables and figures of runs, as one HTML page
  deeploop export RUN FOLDER                    weights, tokenizer and code for transformers
  deeploop bench [--rounds 1 3 7]               tokens/s, share of the product ceiling, memory
  deeploop demo                                 train a loop on 1 to 4 steps, run it for 200
  deeploop doctor                               installed packages, what training uses, a self-test

Each command has --help; -V, --version. More: README.md
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # α and ─ must not end a command where output is ASCII
    try:
        command = _command(arguments)
        code = command(arguments[1:]) if command else 0
        sys.stdout.flush()  # now, while a reader that has left can still be told from an error
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ArithmeticError, MemoryError, RuntimeError, OutOfDeviceMemory) as error:
        is_device = isinstance(error, OutOfDeviceMemory) or _is_device_memory(error)
        mistake = is_device or not isinstance(error, RuntimeError)
        if os.environ.get("DEEPLOOP_TRACEBACK") or not (mistake or _is_memory(error)):
            raise
        name = " ".join(["deeploop", *arguments[:1]])
        print(f"{name}: error: {_message(error)}", file=sys.stderr)
        return OUT_OF_MEMORY if is_device else MISTAKE


def _message(error: Exception) -> str:
    """Format an error in one line; for an OSError the file and the reason, without Python's number for it."""
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) or _is_memory(error):
        size = re.search(r"tried to allocate (\d+) bytes", text)
        asked = f" ({int(size[1]):,} bytes at once)" if size else ""
        text = f"more memory than there is{asked}; a smaller model, batch or context needs less"
    if _is_device_memory(error):
        text = "the GPU's memory is full; a smaller model, batch or context needs less"
    return printable(" ".join(text.split())) or type(error).__name__


def _is_memory(error: Exception) -> bool:
    """Return True if torch ran out of memory on the CPU, or was asked for an impossible size."""
    words = (
        "can't allocate memory",
        "Storage size calculation overflowed",
        "integer multiplication overflow",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _is_device_memory(error: Exception) -> bool:
    """Return True if torch ran out of GPU memory, in a command without advice of its own."""
    return isinstance(error, RuntimeError) and is_out_of_memory(error)


def _command(arguments: list[str]) -> Callable[[list[str]], int] | None:
    """Import and return the command that is asked for; None if the answer was printed here."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return None
    if arguments[0] in ("-V", "--version"):
        print(f"deeploop {deeploop.__version__}")
        return None
    if arguments[0] in MOVED:
        raise ValueError(f"is now {MOVED[arguments[0]]}")
    require_known("command", arguments[0], COMMANDS)
    if arguments[0] in DIRECT:
        return partial(_direct, arguments[0])
    command: Callable[[list[str]], int] = import_module(f"deeploop.commands.{arguments[0]}").main
    return command


def _direct(name: str, arguments: list[str]) -> int:
    """Parse the arguments and call the function, which returns text to show or an exit code."""
    kind, run = DIRECT[name]
    args = parse(_named(kind), arguments, prog=f"deeploop {name}", words=WORDS.get(name, {}))
    result = _named(run)(args)
    if isinstance(result, int):
        return result
    show(result)
    return 0


def _named(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)
