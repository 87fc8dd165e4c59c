"""The demo: one looped block learns a step of a cellular automaton and is run fifty times as deep as trained.

The block trains under DeepLoop and flat, side by side on two CPU cores; then under pre-norm, together with
four layers without a loop, which train half as long. Only one thing is fixed in advance: how often the two
rules extrapolate over ten seeds. Table, sentences and page are made from measurements.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeploop.config.checks import at_least

if TYPE_CHECKING:
    from deeploop.sweep.cells import SweepFolder
    from deeploop.sweep.grid import Grid


@dataclass(frozen=True)
class DemoArgs:
    """Train a looped block on 1 to 4 steps of an automaton, run it for 200, and show what happens."""

    out: Path = Path("demo")
    """Folder of the runs, the page, its picture and demo.json."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    quick: bool = False
    """Check the installation in half a minute: 24 steps on short rows, so the models are not trained."""

    def __post_init__(self) -> None:
        at_least(0, self, "seed")


def run(config: DemoArgs) -> str:
    """Train, evaluate and write the page; return the text to print at the end."""
    from deeploop.commands import demo_page  # now: it waits for Matplotlib, --help does not

    return demo_page.write(config.out, train_and_evaluate(config))


def train_and_evaluate(config: DemoArgs) -> dict[str, Any]:
    """Train and evaluate the four models of the automaton; return what the page shows of them, as plain
    values.
    """
    from deeploop.commands import demo_models as models
    from deeploop.commands import demo_page
    from deeploop.runs.folder import provenance

    began = time.monotonic()
    if config.quick:
        print(
            f"--quick checks the installation: {models.QUICK_STEPS} steps, so the models are not trained and "
            "their answers are wrong",
            flush=True,
        )
    print(demo_page.introduction(models.TRAINED_STEPS, max(demo_page.TABLE)), flush=True)
    print(
        "\ntwo at a time, one core each: a looped block under DeepLoop, flat and pre-norm; and four layers",
        flush=True,
    )
    out = config.out / "runs" / f"seed{config.seed}{'-quick' * config.quick}"
    folder = train_cells(out, models.grid(config.seed, quick=config.quick), here=config.quick)
    return {
        "seed": config.seed,
        "quick": config.quick,
        **models.shared_record(folder.configs["flat"], quick=config.quick),
        "models": {name: models.model_record(name, out / name, quick=config.quick) for name in models.MODELS},
        "seconds": round(time.monotonic() - began, 1),
        **{key: value for key, value in provenance().items() if key in ("deeploop", "torch", "git")},
    }


def train_cells(out: Path, grid: "Grid", *, here: bool) -> "SweepFolder":
    """Train unfinished cells as a sweep does, two at a time, one core each; with `here`, one after the other.

    Ctrl-C lets them save, then KeyboardInterrupt ends the demo; the same command continues.
    """
    from deeploop.files import lock_folder
    from deeploop.sweep.board import LiveTable
    from deeploop.sweep.cells import SweepFolder
    from deeploop.sweep.launch import Local
    from deeploop.train.loop import train
    from deeploop.train.stop import StopRequest

    folder = SweepFolder(out, grid, grid.cells())
    slots = [{"OMP_NUM_THREADS": "1"}] * 2
    launcher = Local(folder, slots, keep_weights=True, watch=LiveTable(folder, len(slots)).show)
    with lock_folder(out), StopRequest() as stop:
        folder.write()
        for cell in folder.cells if here else ():  # what takes seconds is not worth another start of torch
            if folder.next_command(cell):
                print(f"{cell.name}: {folder.configs[cell.name].optim.steps} steps", flush=True)
                train(replace(folder.configs[cell.name], out=out / cell.name, resume=True), quiet=True)
        if not here and any(map(folder.next_command, folder.cells)):
            launcher.run(stop)
    for name, error in launcher.failed.items():
        raise ValueError(f"{name}: {error}; its log: {out / name}.log")
    if any(map(folder.next_command, folder.cells)):
        raise KeyboardInterrupt  # asked to stop: what ran has saved
    return folder
