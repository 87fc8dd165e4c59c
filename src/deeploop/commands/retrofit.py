"""`deeploop retrofit`: a pretrained model with a loop."""

from deeploop.commands.parsing import run_command
from deeploop.retrofit.options import RetrofitArgs


def run(args: RetrofitArgs) -> str:
    from deeploop.retrofit.make import run

    return run(args)


def main(arguments: list[str]) -> int:
    return run_command(RetrofitArgs, run, arguments, prog="deeploop retrofit")
