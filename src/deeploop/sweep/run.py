"""Run a sweep: the cells of a grid, in parallel, until all are finished.

A sweep can be stopped or killed at any time and started again with the same command: finished cells are not
repeated, and interrupted ones resume from their last checkpoint.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deeploop.exits import INTERRUPTED
from deeploop.files import lock_folder
from deeploop.paper.grids import Scale, grids
from deeploop.report.groups import Histories
from deeploop.report.means import seeds_tables
from deeploop.report.runs import find_runs
from deeploop.report.tables import text_table
from deeploop.runs.sweeps import SweepRecord
from deeploop.sweep import board, slurm
from deeploop.sweep.arguments import SweepArgs
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import Cell, Grid, named_grid, read_grid
from deeploop.sweep.launch import Local, local_slots
from deeploop.sweep.tuning import tuned
from deeploop.tasks.language.vocabulary import corpus_of_other_vocabulary
from deeploop.tasks.puzzles.config import ReasonerTrainConfig
from deeploop.tasks.puzzles.recipes import PUZZLES
from deeploop.terminal import show
from deeploop.train.stop import StopRequest

OWN = {"chat": "chat FILE", "hrm": "pairs FILE", "trm": "pairs FILE"}  # words of `prepare` for your own data


def run(args: SweepArgs) -> int:
    """Run the command; return 1 if a cell failed, 130 if cells are left to run."""
    grid = get_grid(args.name, args.scale)
    cells = choose_cells(grid.cells(args.overrides()), args.only)
    if not args.status:
        cells = [cell_with_vocabulary(cell) for cell in cells]
    if args.tuned is not None and not args.status:
        cells = tuned(cells, args.tuned, args.overrides())
    folder = SweepFolder(
        args.out or Path("runs/sweeps") / f"{grid.family}-{grid.scale}",
        grid,
        cells,
        gpus=args.gpus,
        torchrun=args.launcher == "slurm",
        tasks=args.tasks,
    )
    if args.status:
        show(status(folder))
        return 0
    check_compare_at(folder)
    if args.dry_run:
        return preview(folder, cells, args.utilization)
    record = folder.unchanged_record()
    if record and folder.is_done(record):  # before the lock, which writes to the folder
        return show_done(folder, record, args)
    check_data(folder)
    if args.launcher == "slurm":
        slurm.require_submitit()
    with lock_folder(folder.out):
        if args.launcher == "slurm":
            folder.write()  # SLURM jobs do not share devices
            return submit(folder, args)
        folder.write(args.jobs)
        return run_here(folder, args)


def preview(folder: SweepFolder, cells: list[Cell], utilization: float) -> int:
    """Print the cells and what they cost, then what is missing or differs from the paper's data."""
    from deeploop.sweep import budget  # now: its accounting imports torch

    print(f"{budget.table(folder.grid, cells, utilization)}\ncells  {folder.out}")
    try:
        check_data(folder)
        for text in data_differences(folder):
            show(f"warning: {text}", file=sys.stderr)
    except ValueError as error:  # costs are counted without a corpus
        show(error, file=sys.stderr)
    return 0


def get_grid(name: str, scale: Scale) -> Grid:
    """Return a sweep that `deeploop sweep` lists, or the one in a file."""
    if name in grids():
        return named_grid(name, scale)
    if name.endswith((".toml", ".json")):
        return read_grid(Path(name))
    raise ValueError(f"sweep {name!r}: unknown; choose one of {', '.join(grids())}, or a .toml or .json file")


def choose_cells(cells: list[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells whose labels are among those given, `axis=label,label` for each axis."""
    for word in only:
        axis, equals, labels = word.partition("=")
        known = {_by_value(cell.axes[axis]) for cell in cells if axis in cell.axes}
        wanted = {_by_value(label) for label in labels.split(",")}
        if not equals or not wanted <= known:
            all_labels = {
                name: dict.fromkeys(str(cell.axes[name]) for cell in cells) for name in cells[0].axes
            }
            axes = "; ".join(f"{name}={','.join(own)}" for name, own in all_labels.items())
            raise ValueError(f"only={word}: must be an axis and some of its labels: {axes}")
        cells = [cell for cell in cells if _by_value(cell.axes[axis]) in wanted]
    return cells


def _by_value(label: object) -> str:
    """A label such that 4e-3 and 0.004 are equal."""
    try:
        return str(float(str(label)))
    except ValueError:
        return str(label)


def cell_with_vocabulary(cell: Cell) -> Cell:
    """Use the vocabulary of the cell's corpus unless the grid sets one, as `deeploop train` does."""
    corpus = None if "model.vocabulary" in cell.settings else corpus_of_other_vocabulary(cell.config())
    if corpus is None:
        return cell
    return replace(cell, settings={**cell.settings, "model.vocabulary": corpus.vocabulary})


def check_compare_at(folder: SweepFolder) -> None:
    """Raise ValueError if a run never reaches the step at which losses are compared."""
    for name, config in folder.configs.items():
        if folder.grid.compare_at is not None and not 1 <= folder.grid.compare_at <= config.optim.steps:
            raise ValueError(
                f"compare_at={folder.grid.compare_at}: must be a step of every run, and {name} has "
                f"optim.steps={config.optim.steps}; change compare_at in the grid's file, or the steps"
            )


def check_data(folder: SweepFolder) -> None:
    """Raise ValueError for a missing data folder, once for all cells."""
    tasks = {path: config.task for config in folder.configs.values() for path in config.folders}
    for path in sorted(tasks):
        if not path.is_dir():
            words = OWN.get(tasks[path], "text FILE…")
            if path.name in PUZZLES:
                words = PUZZLES[path.name].prepare
            elif path.name in ("stdlib", "fineweb-edu"):
                words = path.name
            how = f"`deeploop prepare {words} --out {path}`"
            raise ValueError(f"data.path={path}: no such folder; make it with {how}, or name one with --data")


def data_differences(folder: SweepFolder) -> list[str]:
    """List how the ARC sets of the cells, and their epochs, differ from the paper's."""
    from deeploop.tasks.puzzles.data.arc import arc_differences  # imported here: --help needs no numpy
    from deeploop.tasks.puzzles.data.sets import PuzzleSet

    reasoners = [config for config in folder.configs.values() if isinstance(config, ReasonerTrainConfig)]
    trained = {(config.data.path, config.optim.steps, config.optim.batch) for config in reasoners}
    sets = {path: PuzzleSet.open(path) for path, _, _ in trained}
    differences = [arc_differences(sets[path], steps, batch) for path, steps, batch in sorted(trained)]
    return [*dict.fromkeys(text for texts in differences for text in texts)]


def show_done(folder: SweepFolder, record: SweepRecord, args: SweepArgs) -> int:
    """Print the results of a sweep with nothing left to do."""
    if not args.keep_weights:
        for cell in folder.cells:
            folder.drop_weights(cell)
    show(report(folder))
    print(
        f"all {len(folder.cells)} cells were finished already (last started on {record.day}); "
        "nothing was trained; to train them anew, choose another --out"
    )
    return 0


def run_here(folder: SweepFolder, args: SweepArgs) -> int:
    slots = local_slots(args.gpus, args.jobs)
    shown = board.LiveTable(folder, len(slots))
    launcher = Local(folder, slots, args.keep_weights, shown.show, args.minutes)
    with StopRequest() as stop:
        launcher.run(stop)
    show(report(folder) if not shown.live else closing(folder))
    if launcher.given_up:
        fit = len(slots) - len(launcher.given_up)
        print(f"GPU memory had room for {fit} of {len(slots)} cells at a time", file=sys.stderr)
    for name, error in launcher.failed.items():
        show(f"failed: {name}: {error} ({folder.out / name}.log)", file=sys.stderr)
    if stop.requested:
        print(f"stopped; continue with the same command: {_command()}", file=sys.stderr)
        return INTERRUPTED
    if launcher.failed:
        return 1
    if left := [cell.name for cell in folder.cells if folder.next_command(cell)]:
        print(f"{len(left)} cells are left; continue with the same command: {_command()}", file=sys.stderr)
        return INTERRUPTED
    return 0


def submit(folder: SweepFolder, args: SweepArgs) -> int:
    jobs = slurm.submit(folder, args.slurm, keep_weights=args.keep_weights)
    print("\n".join(f"{name}: job {job.job_id}" for name, job in jobs.items()) or "every cell is finished")
    print(f"see how far they are: {_command()} --status")
    return 0


def status(folder: SweepFolder) -> str:
    """The cells that were started, with the settings that they were started with."""
    record = folder.record()
    if record is None:
        raise ValueError(f"out={folder.out}: holds no sweep")
    return f"{report(folder.as_recorded(record))}\nlast started on {record.day} with: {record.command}"


def report(folder: SweepFolder) -> str:
    """A table of the cells' progress, a summary, and means over seeds."""
    progress = {cell.name: folder.progress(cell) for cell in folder.cells}
    return (
        f"{text_table(board.HEADER, board.rows(progress))}\n{board.summary(progress, 1)}\n{closing(folder)}"
    )


def closing(folder: SweepFolder) -> str:
    """Means over seeds, as in a report, and the folder of the cells."""
    runs = [run for run in find_runs([folder.out]) if run.fields] if folder.record() else []
    tables = [f"\n{table.title}\n{table.text()}" for table in seeds_tables(runs, Histories())]
    return "\n".join([*tables, f"\ncells  {folder.out}" if tables else f"cells  {folder.out}"])


def _command() -> str:
    return shlex.join(["deeploop", *sys.argv[1:]])
