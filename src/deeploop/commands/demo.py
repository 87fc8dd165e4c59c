"""The demo: one looped block learns a step of a cellular automaton and is run fifty times as deep as trained.

The same block under pre-norm trains beside it, on the second of two CPU cores; then four layers without a
loop, half as long. The page also has the collapse of DeepNorm, from a record that comes with the package;
`--collapse` trains it anew. Nothing is fixed in advance: table, sentences and page are made from what was
measured.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeploop.commands.parsing import run_command
from deeploop.files import write_json


@dataclass(frozen=True)
class DemoConfig:
    """Trains a looped block on 1 to 4 steps of an automaton, runs it for 200, and shows what happens."""

    out: Path = Path("demo")
    """Folder of the runs, the page, its picture and demo.json."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    quick: bool = False
    """Check the installation in half a minute: 24 steps on short rows, so the models are not trained."""
    collapse: bool = False
    """Train the models of the collapse anew as well (four minutes more), in place of showing the records."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or more")


def run(config: DemoConfig) -> str:
    """Trains, evaluates, writes the page; returns what to print at the end."""
    # Now: these wait for torch and Matplotlib, --help does not.
    from deeploop.commands import demo_collapse
    from deeploop.report import collapse, demo

    record = train_and_evaluate(config)
    if config.collapse:
        collapsed = demo_collapse.train_all(config.out, config.seed, quick=config.quick)
        write_json(config.out / "collapse.json", collapsed)
    else:
        collapsed = collapse.read()
    return demo.write(config.out, record, collapsed)


def train_and_evaluate(config: DemoConfig) -> dict[str, Any]:
    """The three models of the automaton: what the page shows of them, as plain values."""
    import torch

    from deeploop.commands import demo_models as models
    from deeploop.commands.demo_training import train_beside
    from deeploop.report import demo
    from deeploop.runs.folder import provenance

    began, threads = time.monotonic(), torch.get_num_threads()
    cells = {
        name: models.cell(name, out=config.out, seed=config.seed, quick=config.quick)
        for name in models.MODELS
    }
    if config.quick:
        print(
            f"--quick checks the installation: {models.QUICK_STEPS} steps, so the models are not trained and "
            "their answers are wrong",
            flush=True,
        )
    print(demo.introduction(cells["flat"].data.train_steps, max(demo.TABLE)), flush=True)
    found: dict[str, dict[str, Any]] = {}

    def evaluate(*names: str) -> None:
        for name in names:
            found[name] = models.model_record(name, cells[name], quick=config.quick)

    loops, stack = {name: cells[name] for name in ("flat", "pre-norm")}, {"stack": cells["stack"]}
    torch.set_num_threads(1)  # as the runs have, whose neighbour this is
    try:
        if config.quick:
            train_here({**loops, **stack})
            evaluate(*cells)
        else:
            print("\nside by side, one core each: the same looped block, flat and under pre-norm", flush=True)
            train_beside(loops)
            print("\nfour layers without a loop, told the number of steps; half as long", flush=True)
            train_beside(stack, meanwhile=lambda: evaluate(*loops))
            evaluate("stack")
    finally:
        torch.set_num_threads(threads)
    return {
        "seed": config.seed,
        "quick": config.quick,
        **models.shared_record(cells["flat"], quick=config.quick),
        "models": {name: found[name] for name in cells},
        "seconds": round(time.monotonic() - began, 1),
        **{key: value for key, value in provenance().items() if key in ("deeploop", "torch", "git")},
    }


def train_here(cells: dict[str, Any]) -> None:
    """One after another in this process: what takes seconds is not worth another start of torch."""
    from deeploop.commands.demo_training import is_finished
    from deeploop.train.loop import train

    for name, config in cells.items():
        if not is_finished(config):
            print(f"{name}: {config.optim.steps} steps", flush=True)
            if train(config, quiet=True)["ended"] == "stopped":
                raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    return run_command(DemoConfig, run, arguments, prog="deeploop demo")
