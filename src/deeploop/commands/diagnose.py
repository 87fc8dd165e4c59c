"""`deeploop diagnose`: do the visits of a run's blocks align?"""

from deeploop.commands.parsing import run_command
from deeploop.tasks.language.options import DiagnoseArgs


def run(args: DiagnoseArgs) -> str:
    from deeploop.tasks.language.diagnose import run

    return run(args)


def main(arguments: list[str]) -> int:
    return run_command(DiagnoseArgs, run, arguments, prog="deeploop diagnose")
