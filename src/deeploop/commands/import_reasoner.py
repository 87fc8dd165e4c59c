"""`deeploop import`: a checkpoint of HRM's or TRM's public code as a run folder."""

from deeploop.commands.parsing import run_command
from deeploop.tasks.puzzles.options import ImportArgs


def run(args: ImportArgs) -> str:
    from deeploop.tasks.puzzles.public import run

    return run(args)


def main(arguments: list[str]) -> int:
    return run_command(ImportArgs, run, arguments, prog="deeploop import")
