"""The runs of a study: those of its sweeps, packed or not."""

from pathlib import Path

from deeploop.report.runs import Run, find_runs
from deeploop.runs.sweeps import read_sweep


def runs_of(folder: Path) -> list[Run]:
    """Its runs that were started, sweep by sweep in the order of the grid."""
    found: list[Run] = []
    for file in sorted(folder.rglob("sweep.json")):
        order = {name: place for place, name in enumerate(read_sweep(file.parent).cells)}
        runs = [run for run in find_runs([file.parent]) if run.fields]
        found += sorted(runs, key=lambda run: order[run.folder.name])
    return found
