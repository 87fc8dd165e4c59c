"""`deeploop bench`: how fast training and decoding are."""

from deeploop.bench.options import BenchArgs
from deeploop.commands.parsing import run_command


def run(args: BenchArgs) -> str:
    from deeploop.bench import decode, training

    return decode.run(args) if args.decode else training.run(args)


def main(arguments: list[str]) -> int:
    return run_command(BenchArgs, run, arguments, prog="deeploop bench")
