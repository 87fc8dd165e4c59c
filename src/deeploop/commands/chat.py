"""`deeploop chat`: a conversation with a fine-tuned run, in the terminal or through a pipe."""

from deeploop.commands.parsing import parse
from deeploop.tasks.chat.options import ChatArgs


def main(arguments: list[str]) -> int:
    args = parse(ChatArgs, arguments, prog="deeploop chat")
    from deeploop.tasks.chat.talk import run

    return run(args)
