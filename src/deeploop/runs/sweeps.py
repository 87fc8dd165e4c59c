"""Read sweep.json, the record of a sweep's cells and of its last start. Imports no torch."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeploop.config import old_names
from deeploop.files import read_object

FORMAT = 1


@dataclass(frozen=True)
class RecordedCell:
    """A cell as recorded when it was started."""

    recipe: str
    settings: dict[str, Any]
    axes: dict[str, Any]


@dataclass(frozen=True)
class SweepRecord:
    """The content of sweep.json."""

    sweep: str
    scale: str
    compare_at: int | None
    """The step at which losses are compared; None: the last."""
    jobs: int
    """Cells run at a time on each device."""
    cells: dict[str, RecordedCell]
    command: str
    """The command line of the last start."""
    day: str
    """The day of the last start, such as 2026-11-15."""


def read_sweep(folder: Path) -> SweepRecord:
    """Read OUT/sweep.json. Raises OSError if it is missing, ValueError if it is invalid."""
    path = folder / "sweep.json"
    try:
        record = read_object(path)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, this deeploop reads {FORMAT}")
        command = [str(word) for word in record.get("command") or []]
        return SweepRecord(
            str(record["sweep"]),
            str(record["scale"]),
            record.get("compare_at"),
            int(record["jobs"]) if "jobs" in record else _jobs_of(command),
            {str(name): _cell(cell) for name, cell in record["cells"].items()},
            shlex.join(command),
            str(record.get("written", ""))[:10],
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: not a sweep's ({why})") from None


def _cell(recorded: dict[str, Any]) -> RecordedCell:
    recipe, settings = old_names.cell(dict(recorded["settings"]), str(recorded["recipe"]))
    return RecordedCell(recipe, settings, dict(recorded["axes"]))


def _jobs_of(command: list[str]) -> int:
    """The number of jobs from the command, for files without the field `jobs`."""
    return max((int(jobs) for jobs in re.findall(r"--jobs[ =]([0-9]+)", " ".join(command))), default=1)
