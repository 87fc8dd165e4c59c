"""What a run folder keeps beside its metrics, for those who read many. No torch.

These are eval.json, validation.json, depth.json and diagnose.json. What is not of its kind is left out: a
report goes on without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deeploop.files import read_json
from deeploop.paper.published import VOTES
from deeploop.train.metrics import is_number, is_sound

RESULT = {"shots": int, "task": str, "rounds": int}
VALIDATED = {"checkpoint": str, "data": str, "sequences": int}
ARC = {"model": str, "tasks": int, "most_views": int, "halt": bool, "ladder": dict}


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The records of eval.json, each with its `results` and `deviations`, which may be empty."""
    found = read_json(folder / "eval.json").get("evaluations")
    return [_sound(record) for record in _list(found) if isinstance(record, dict)]


def _sound(record: Mapping[str, Any]) -> dict[str, Any]:
    results = [row for row in _list(record.get("results")) if isinstance(row, dict) and _fits(row, RESULT)]
    words = [text for text in _list(record.get("deviations")) if isinstance(text, str)]
    whole = record.get("kind") != "arc" or (
        _fits(record, ARC) and all(is_number(record["ladder"].get(str(K))) for K in VOTES)
    )
    own = {**record, "results": [row for row in results if is_number(row.get("acc"))], "deviations": words}
    return own if whole else own | {"kind": None}


def read_validations(folder: Path) -> list[dict[str, Any]]:
    """The records of validation.json and depth.json, by `deeploop validate`."""
    files = (read_json(folder / name) for name in ("validation.json", "depth.json"))
    found = [record for file in files for record in _list(file.get("evaluations"))]
    return [record for record in found if isinstance(record, dict) and _fits(record, VALIDATED)]


def read_depths(folder: Path) -> dict[str, dict[int, float]]:
    """The losses in them: what was read → R → loss, the newest of two alike."""
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


def read_diagnosis(folder: Path) -> dict[str, Any]:
    """diagnose.json; nothing where what a table shows of it is not of its kind."""
    found = read_json(folder / "diagnose.json")
    return found if is_sound(found) and type(found.get("step")) is int else {}


def _fits(record: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(type(record.get(name)) is kind for name, kind in kinds.items())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
