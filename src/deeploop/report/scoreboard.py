"""Results kept in the run folder, newest last: eval.json, the paper's table, the picture against rounds.

`deeploop validate` keeps validation.json and depth.json in the same way.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deeploop.eval.tasks import PAPER_TASKS
from deeploop.files import atomic_file, read_object
from deeploop.report.page import text_table

# Results that agree in these replace one another; any other stays beside them in eval.json.
IDENTITY = ("tasks", "shots", "limit", "data", "checkpoint", "rounds", "recompute_alpha", "precision")


def averages(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The unweighted mean of the tasks' accuracies, for each number of shots and rounds."""
    if not all("acc" in row for row in rows):
        return []
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        cells.setdefault((row["shots"], row["rounds"]), []).append(row["acc"])
    return [{"shots": shots, "rounds": R, "acc": sum(accs) / len(accs)} for (shots, R), accs in cells.items()]


def deviations(settings: dict[str, Any], stamp: dict[str, Any]) -> list[str]:
    """Where the model or the settings differ from the paper's evaluation, in words."""
    checks = [
        (settings["limit"], f"only the first {settings['limit']} documents of each task"),
        (stamp["tokenizer"] != "gpt2", f"{stamp['tokenizer']} tokens, not GPT-2's"),
        (stamp["context"] != 1024, f"context {stamp['context']}, not 1024"),
        (stamp["precision"] != "bf16", f"{stamp['precision']} arithmetic, not bf16"),
        (
            stamp["cut_requests"],
            f"{stamp['cut_requests']:,} requests lost their beginning to fit the context",
        ),
    ]
    return [text for holds, text in checks if holds]


def left_out(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which tasks have items that were not scored, in words; once for all numbers of rounds."""
    found = {
        (row["task"], row["shots"]): (row["left_out"], row["items"] + row["left_out"])
        for row in rows
        if "left_out" in row
    }
    return [
        f"{task}, {shots}-shot: {count:,} of {items:,} items left out, with an answer longer than the context"
        for (task, shots), (count, items) in found.items()
    ]


def check(folder: Path, name: str = "eval.json") -> None:
    """Raises where a result could not be kept: better before the work than after it."""
    read(folder / name)
    check_writable(folder)


def check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder}: can't be written, and the result goes there; copy the run")


def add(folder: Path, record: dict[str, Any], identity: Sequence[str], name: str = "eval.json") -> Path:
    """Adds the record to a file of the folder, in place of one that agrees with it in these fields."""
    path = folder / name
    with atomic_file(path) as file:  # first: whoever adds another record meanwhile waits for this one
        others = [old for old in read(path) if not agree(old, record, identity)]
        file.write((json.dumps({"evaluations": [*others, record]}, indent=1) + "\n").encode())
    return path


def keep(folder: Path, record: dict[str, Any]) -> list[Path]:
    """Adds the record to the folder's eval.json, and draws the picture of several rounds."""
    path = add(folder, record, IDENTITY)
    if len(record["rounds"]) == 1 or not record["average"]:
        return [path]
    from deeploop.report import plots  # here: scoring has no need of matplotlib

    losses = read_depth(folder)
    plots.save_png(plots.accuracy_against_rounds(record, losses), folder / "accuracy.png")
    return [path, folder / "accuracy.png"]


def read_depth(folder: Path) -> list[dict[str, Any]]:
    """The newest record of depth.json, and those before it that stand on the same scale."""
    records = read(folder / "depth.json")
    return [old for old in records if agree(old, records[-1], ("checkpoint", "data", "sequences"))]


def agree(old: dict[str, Any], new: dict[str, Any], fields: Sequence[str]) -> bool:
    return all(old.get(name) == new[name] for name in fields)


def read(path: Path) -> list[dict[str, Any]]:
    """All records kept in a file; one of before there were several is the only one."""
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


def report(folder: Path, record: dict[str, Any]) -> str:
    """The result for a terminal."""
    limit = f", the first {record['limit']} documents of each" if record["limit"] else ""
    parts = [
        f"{folder} at {record['checkpoint']}: {len(record['tasks'])} tasks{limit}",
        table(record),
        speed(record, sum(row["items"] for row in record["results"]) // len(record["rounds"])),
    ]
    if record["deviations"]:
        lines = [f"  {text}" for text in record["deviations"]]
        parts.append("\n".join(["deviates from the paper's evaluation:", *lines]))
    return "\n\n".join(parts)


def table(record: dict[str, Any]) -> str:
    """Accuracy in percent, laid out as the paper's Table 2; other tasks one below the other."""
    if not all(row["task"] in PAPER_TASKS and "acc" in row for row in record["results"]):
        return long_table(record["results"])
    cells = {(row["shots"], row["rounds"], row["task"]): row["acc"] for row in record["results"]}
    names = [name for name in PAPER_TASKS if any(row["task"] == name for row in record["results"])]
    header = ("acc, %", *(PAPER_TASKS[name].heading for name in names), "Avg")
    rows = []
    for average in record["average"]:
        shots, R = average["shots"], average["rounds"]
        accs = [*(cells[shots, R, name] for name in names), average["acc"]]
        rows.append((f"{shots}-shot R={R}", *(f"{100 * acc:.2f}" for acc in accs)))
    return text_table(header, rows)


def long_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        values = {"acc": row["acc"], "acc_stderr": row["stderr"]} if "acc" in row else row["metrics"]
        for name, value in values.items():
            if "_stderr" not in name:
                where = (row["task"], str(row["shots"]), str(row["rounds"]), str(row["items"]))
                lines.append((*where, name, f"{value:.4f}"))
    return text_table(("task", "shots", "R", "items", "metric", "value"), lines)


def speed(record: dict[str, Any], items: int) -> str:
    """How fast it went; an item is a document with all its answers."""
    seconds = max(record["seconds"], 1e-3)
    items *= len(record["rounds"])
    return (
        f"{record['requests']:,} requests, {items:,} items in {seconds:,.1f} s on {record['device']} "
        f"({record['precision']}): {items / seconds:,.1f} items/s"
    )
