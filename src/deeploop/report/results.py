"""Results beside a run's metrics: eval.json, validation.json, depth.json and diagnose.json. No torch.

Commands that measure `add` a record and `read` them again, and refuse a damaged file. A report uses
`read_evaluations` and the like, which skip records of another kind.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deeploop.files import atomic_file, read_json, read_object
from deeploop.paper.published import VOTES
from deeploop.train.metrics import is_number, is_sound

Record = dict[str, Any]
RESULT = {"shots": int, "task": str, "rounds": int}
VALIDATED = {"checkpoint": str, "data": str, "sequences": int}
ARC = {"model": str, "tasks": int, "most_views": int, "halt": bool, "ladder": dict}


# ── Keeping results ─────────────────────────────────────────────────────────────────────────────────────
def check(folder: Path, name: str = "eval.json") -> None:
    """Raise ValueError if a result could not be kept in the folder; called before the work."""
    read(folder / name)
    check_writable(folder)


def check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder}: can't be written, and the result goes there; copy the run")


def add(folder: Path, record: Record, identity: Sequence[str], name: str = "eval.json") -> Path:
    """Add the record to a file of the folder, replacing one that agrees with it in these fields."""
    path = folder / name
    with atomic_file(path) as file:  # first: whoever adds another record meanwhile waits for this one
        others = [old for old in read(path) if not agree(old, record, identity)]
        file.write((json.dumps({"evaluations": [*others, record]}, indent=1) + "\n").encode())
    return path


def printed(record: Record, text: str, files: Sequence[Path], *, as_json: bool) -> str:
    """The output of a command: the record as JSON, or a text and the files written."""
    return json.dumps(record, indent=1) if as_json else f"{text}\n\nwritten: {', '.join(map(str, files))}"


def agree(old: Record, new: Record, fields: Sequence[str]) -> bool:
    return all(old.get(name) == new[name] for name in fields)


def read(path: Path) -> list[Record]:
    """Return all records of a file, the newest last; older files hold a single record."""
    try:
        found = read_object(path)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{error}; move it away") from None
    records = [found] if "trained_rounds" in found else found.get("evaluations")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path}: evaluations must be a list of objects; move it away")
    return records


def read_depth(folder: Path) -> list[Record]:
    """Return the newest record of depth.json, and earlier ones on the same scale."""
    records = read(folder / "depth.json")
    return [old for old in records if agree(old, records[-1], ("checkpoint", "data", "sequences"))]


# ── Reading untrusted files ─────────────────────────────────────────────────────────────────────────────
def read_evaluations(folder: Path) -> list[Record]:
    """Return the records of eval.json, each with its `results` and `deviations`, which may be empty."""
    found = read_json(folder / "eval.json").get("evaluations")
    return [_sound(record) for record in _list(found) if isinstance(record, dict)]


def _sound(record: Mapping[str, Any]) -> Record:
    results = [row for row in _list(record.get("results")) if isinstance(row, dict) and _fits(row, RESULT)]
    words = [text for text in _list(record.get("deviations")) if isinstance(text, str)]
    whole = record.get("kind") != "arc" or (
        _fits(record, ARC) and all(is_number(record["ladder"].get(str(K))) for K in VOTES)
    )
    own = {**record, "results": [row for row in results if is_number(row.get("acc"))], "deviations": words}
    return own if whole else own | {"kind": None}


def read_validations(folder: Path) -> list[Record]:
    """Return the records of validation.json and depth.json, written by `deeploop validate`."""
    files = (read_json(folder / name) for name in ("validation.json", "depth.json"))
    found = [record for file in files for record in _list(file.get("evaluations"))]
    return [record for record in found if isinstance(record, dict) and _fits(record, VALIDATED)]


def read_depths(folder: Path) -> dict[str, dict[int, float]]:
    """Return the losses in them: checkpoint and text → R → loss, the newest of equal keys."""
    found: dict[str, dict[int, float]] = {}
    for record in read_validations(folder):
        own = found.setdefault(_what_was_read(record), {})
        for row in _list(record.get("rounds")):
            if isinstance(row, dict) and type(row.get("rounds")) is int and is_number(row.get("loss")):
                own[row["rounds"]] = row["loss"]
    return found


def _what_was_read(record: Mapping[str, Any]) -> str:
    alpha = ", α of each R" if record.get("recompute_alpha") else ""
    return f"validate: {record['checkpoint']}, {record['sequences']:,} sequences of {record['data']}{alpha}"


def read_diagnosis(folder: Path) -> Record:
    """Read diagnose.json; empty if a value that a table shows has the wrong type."""
    found = read_json(folder / "diagnose.json")
    return found if is_sound(found) and type(found.get("step")) is int else {}


def _fits(record: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(type(record.get(name)) is kind for name, kind in kinds.items())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
