"""`deeploop diagnose`: measure how the visits of a run's blocks align; `diagnose.py` of each task does it."""

from deeploop.runs.folder import load_any_config
from deeploop.tasks.options import DiagnoseArgs
from deeploop.tasks.puzzles.config import ReasonerTrainConfig


def run(args: DiagnoseArgs) -> str:
    from deeploop.tasks.language import diagnose as language
    from deeploop.tasks.puzzles import diagnose as puzzles

    if any(isinstance(load_any_config(path), ReasonerTrainConfig) for path in args.runs):
        return puzzles.run(args)
    return language.run(args)
