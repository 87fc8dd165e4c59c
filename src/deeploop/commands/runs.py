"""`deeploop runs`: list run folders with the settings in which they differ."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from deeploop.report.listing import as_json, text
from deeploop.report.runs import Run, differing, find_runs


@dataclass(frozen=True)
class RunsArgs:
    """List run folders and sweeps: settings that differ, progress, last validation, speed and cost."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),)
    """Run folders, sweep folders, or folders of them."""
    sort: Literal["name", "loss", "started"] = "name"
    """Order of the rows."""
    json: bool = False
    """Print everything as JSON."""


def run(args: RunsArgs, width: int | None = None) -> str:
    """Format the list, at most `width` wide: by default as wide as the terminal, or unlimited in a pipe."""
    runs = sorted(find_runs(args.folders), key=ORDERS[args.sort])  # stable: equal keys stay ordered by name
    if args.json:
        settings = differing(runs)
        return json.dumps([as_json(one, settings) for one in runs], indent=1)
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    return text(runs, width)


ORDERS: dict[str, Callable[[Run], Any]] = {
    "name": lambda run: 0,
    "loss": lambda run: run.validation.get("loss") or math.inf,
    "started": lambda run: run.stamp.get("written", ""),
}
