"""`deeploop validate`: the loss of a run, at any depth and on any corpus of its tokenizer."""

from deeploop.commands.parsing import run_command
from deeploop.tasks.language.options import ValidateArgs


def run(args: ValidateArgs) -> str:
    from deeploop.tasks.language.validate import run

    return run(args)


def main(arguments: list[str]) -> int:
    return run_command(ValidateArgs, run, arguments, prog="deeploop validate")
