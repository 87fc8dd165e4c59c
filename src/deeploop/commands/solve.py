"""`deeploop solve`: one puzzle, and the reasoner's board after each segment."""

from deeploop.commands.parsing import run_command
from deeploop.tasks.puzzles.options import SolveArgs


def run(args: SolveArgs) -> str:
    from deeploop.tasks.puzzles.solve import run

    return run(args)


def main(arguments: list[str]) -> int:
    return run_command(SolveArgs, run, arguments, prog="deeploop solve")
