"""`deeploop generate`: text from a trained model, streamed as it is produced."""

from deeploop.commands.parsing import parse
from deeploop.tasks.language.options import GenerateArgs


def main(arguments: list[str]) -> int:
    args = parse(GenerateArgs, arguments, prog="deeploop generate")
    from deeploop.tasks.language.generate import run

    return run(args)
