"""The results in docs/paper.md and docs/results/measured.md, each row quoted from the files of a study.

Each docs/results/FOLDER with a results.json is a row of measured.md:

{"order": 1, "what": "…", "result": "validation loss {loss:.3f}", "values": {"loss": SELECTOR}}

and rows beside the paper's numbers, where it has

"paper": [{"order": 1, "what": "…", "theirs": "…", "ours": "…", "verdict": "…"}, …]

A SELECTOR names one number of the files beside it:

{"last": "validation", "field": "loss"}           of the last such line of metrics.jsonl
{"median": "train", "field": "tokens_per_s"}      over all such lines
{"escaped_in": "seeds.json", "where": {…}}        entries, as in `where`, whose last validation escaped
{"escaped_runs": "paper-p0.5-*"}                  run folders whose last validation escaped
{"mean_loss": "prenorm-rounds7-*"}                of the last validations of those that did not collapse
{"mean": "exact", "of": "seed*-hrm-C2-*"}         of a field over the last validations of those run folders
{"json": "gamma.json", "path": ["…", "gamma"]}    a number in a JSON file
{"published": "LOSS", "key": ["small", "deeploop", 3]}   a number of the paper, by `paper.published`
{"minus": [SELECTOR, SELECTOR]}                   the first minus the second; "over" divides
{"gain": 3}                                       of DeepLoop over pre-norm at R = 3, in results/gain
all but counts with "times": a factor
"""

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, median
from typing import Any

from deeploop.paper import published
from deeploop.runs.packed import opened, subfolders
from deeploop.train.metrics import read_metrics
from research.tables.by_windows import gain_cells, gains


def value(folder: Path, selector: dict[str, Any] | float) -> float:
    """The number that a selector names."""
    if isinstance(selector, int | float):
        return selector
    if "gain" in selector:
        return gains(gain_cells(folder.parent))[selector["gain"]]
    if "over" in selector:
        first, second = (value(folder, one) for one in selector["over"])
        return first / second
    if "minus" in selector:
        first, second = (value(folder, one) for one in selector["minus"])
        return first - second
    if "escaped_in" in selector:
        entries = json.loads((folder / selector["escaped_in"]).read_text(encoding="utf-8"))
        chosen = [one for one in entries if selector["where"].items() <= one.items()]
        return sum(one["validations"][-1]["verdict"] == "escaped" for one in chosen)
    if "escaped_runs" in selector:
        verdicts = [last["verdict"] for last in last_validations(folder, selector["escaped_runs"])]
        return verdicts.count("escaped")
    if "mean_loss" in selector:
        lasts = last_validations(folder, selector["mean_loss"])
        return fmean(last["loss"] for last in lasts if last["verdict"] != "collapsed")
    if "mean" in selector:
        lasts = last_validations(folder, selector["of"])
        return fmean(last[selector["mean"]] for last in lasts) * selector.get("times", 1)
    if "published" in selector:
        key = selector["key"]
        numbers = getattr(published, selector["published"])
        return numbers[tuple(key) if isinstance(key, list) else key].number * selector.get("times", 1)
    if "json" in selector:
        found = json.loads((folder / selector["json"]).read_text(encoding="utf-8"))
        for key in selector["path"]:
            found = found[key]
        return found * selector.get("times", 1)
    kind = selector.get("last") or selector["median"]
    lines = read_metrics(folder, kind)
    numbers = [line[selector["field"]] for line in lines if line.get(selector["field"]) is not None]
    if not numbers:
        raise ValueError(f"{folder}: no {kind} line has {selector['field']}")
    return (numbers[-1] if "last" in selector else median(numbers)) * selector.get("times", 1)


def last_validations(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Of each run folder that the pattern names."""
    *above, name = pattern.split("/")
    runs = [run for run in subfolders(folder.joinpath(*above)) if fnmatchcase(run.name, name)]
    found = {run: read_metrics(opened(run), "validation") for run in runs}
    for run, validations in found.items():
        if not validations or validations[-1]["loss"] is None:
            raise ValueError(f"{run}: its last validation has no loss")
    if not found:
        raise ValueError(f"{folder}: no run is named {pattern}")
    return [validations[-1] for validations in found.values()]


def read_entry(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """A folder's results.json, and its values."""
    entry = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return entry, {name: value(folder, selector) for name, selector in entry["values"].items()}


def measured(results: Path) -> str:
    """A row for each study."""
    rows = [
        (entry["order"], [entry[part].format(**values) for part in ("what", "result")], f"[{name}]({name})")
        for name, entry, values in _entries(results)
    ]
    return _table(["what", "result", "files"], rows)


def beside(results: Path) -> str:
    """The paper's numbers beside ours."""
    parts = ("what", "theirs", "ours", "verdict")
    rows = [
        (row["order"], [row[part].format(**values) for part in parts], f"[{name}](results/{name})")
        for name, entry, values in _entries(results)
        for row in entry.get("paper", [])
    ]
    return _table(["in the paper", "paper", "ours", "verdict", "files"], rows)


def _entries(results: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, float]]]:
    """Folder, entry and values of each results.json."""
    for path in sorted(results.glob("*/results.json")):
        yield path.parent.name, *read_entry(path.parent)


def _table(header: list[str], rows: list[tuple[int, list[str], str]]) -> str:
    """By order; cells are Markdown already."""
    lines = [f"| {' | '.join([*cells, link])} |" for _, cells, link in sorted(rows)]
    return "\n".join([f"| {' | '.join(header)} |", "|" + "---|" * len(header), *lines])


TABLES = {"paper.md": {"beside": beside}, "results/measured.md": {"results": measured}}
