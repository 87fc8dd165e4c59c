"""Chat with a fine-tuned run in the terminal or through a pipe."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from deeploop.config.run import DeviceConfig
from deeploop.exits import memory_advice
from deeploop.files import resolve
from deeploop.runs.folder import load_config, require_checkpoint
from deeploop.tasks.chat.conversation import Conversation
from deeploop.tasks.chat.options import ChatArgs
from deeploop.tasks.chat.template import ChatTemplate, kept_template
from deeploop.terminal import printable, show
from deeploop.train.distributed import open_world
from deeploop.train.rundir import load

HELP = "/reset starts a new conversation, /quit ends"


def run(args: ChatArgs) -> int:
    """Answer questions until the input ends or /quit."""
    template, checkpoint = template_of(args.run), require_checkpoint(args.run)
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with memory_advice("--device cpu"), suppress(KeyboardInterrupt):
        with open_world(DeviceConfig(kind=args.device)) as world:
            model, tokenizer = load(args.run, device=world.device, checkpoint=checkpoint)
        if args.rounds is not None:
            model.set_rounds(args.rounds)
        conversation = Conversation(
            model, tokenizer, template, system=args.system, sampling=args, max_tokens=args.max_tokens
        )
        if on_terminal:
            print(f"{args.run} at {checkpoint.name}: {HELP}", file=sys.stderr)
        talk(conversation, lines_of_stdin(on_terminal=on_terminal))
    if on_terminal:
        print(flush=True)
    return 0


def template_of(run: Path) -> ChatTemplate:
    """The chat template of a fine-tuned run."""
    load_config(run)  # raises if the folder is not a run
    template = kept_template(resolve(run))
    if template is None:
        raise ValueError(
            f"{run}: was not trained on conversations; fine-tune it: deeploop train chat --init-from {run}"
        )
    return template


def talk(conversation: Conversation, questions: Iterator[str]) -> None:
    """Answer questions until they end or /quit."""
    is_shown = sys.stdout.isatty()  # even if the questions come from a pipe

    def write(piece: str) -> None:
        print(printable(piece, "\n\t") if is_shown else piece, end="", flush=True)

    for line in questions:
        question = line.strip()
        if question == "/quit":
            return
        if question == "/reset":
            conversation.reset()
            print("a new conversation", file=sys.stderr)
        elif question.startswith("/"):
            print(f"{question.split()[0]}: no such command; {HELP}", file=sys.stderr)
        elif question:
            before = conversation.forgotten
            try:
                conversation.ask(question, write=write)
            except ValueError as error:
                show(error, file=sys.stderr)
                continue
            print(flush=True)
            if turns := conversation.forgotten - before:
                gone = "first turn is" if turns == 1 else f"first {turns} turns are"
                print(f"the context was full: the {gone} forgotten", file=sys.stderr)


def lines_of_stdin(*, on_terminal: bool) -> Iterator[str]:
    """Yield lines as they are typed or piped. A terminal gets a prompt, and line editing if Python has it."""
    if not on_terminal:
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (input() uses it)
    with suppress(EOFError):
        while True:
            yield input("> ")
