"""`deeploop sweep`: the cells of a grid, in parallel, until all are finished."""

from deeploop.commands.parsing import choose, parse
from deeploop.paper.grids import grids
from deeploop.sweep.arguments import SweepArgs
from deeploop.terminal import loading_torch


def main(arguments: list[str]) -> int:
    if not arguments:
        choose("sweep", arguments, grids())
        return 0
    args = parse(SweepArgs, arguments, prog="deeploop sweep")
    with loading_torch():
        from deeploop.sweep.run import run
    return run(args)
