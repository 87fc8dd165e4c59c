"""The tables of docs/paper.md, each row quoted from the files of a study.

Each docs/results/FOLDER with a results.json is a row of the full table:

{"order": 1, "what": "…", "result": "validation loss {loss:.3f}", "values": {"loss": SELECTOR}}

and, where it has "paper": {"order": 1, "says": "…", "here": "…"}, one of the short table beside the paper's;
where a SELECTOR names one number of the files beside it:

{"last": "validation", "field": "loss"}           of the last such line of metrics.jsonl
{"median": "train", "field": "tokens_per_s"}      over all such lines
{"escaped_in": "seeds.json", "where": {…}}        entries, as in `where`, whose last validation escaped
{"escaped_runs": "paper-p0.5-*"}                  run folders whose last validation escaped
{"runs": "paper-p0.5-*"}                          how many run folders there are
{"mean_loss": "prenorm-rounds7-*"}                of the last validations of those that did not collapse
{"mean": "exact", "of": "seed*-hrm-C2-*"}         of a field over the last validations of those run folders
{"json": "gamma.json", "path": ["…", "gamma"]}    a number in a JSON file
{"published": "LOSS", "key": ["small", "deeploop", 3]}   a number of the paper, by `paper.published`
{"minus": [SELECTOR, SELECTOR]}                   the first minus the second
the first two with "file": a metrics file of another name; all but counts with "times": a factor
"""

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, median
from typing import Any

from deeploop.paper import published
from deeploop.report.packed import opened, subfolders
from deeploop.train.metrics import read_metrics


def value(folder: Path, selector: dict[str, Any] | float) -> float:
    """The number that a selector names."""
    if isinstance(selector, int | float):
        return selector
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
    if "runs" in selector:
        return len(last_validations(folder, selector["runs"]))
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
    lines = read_metrics(folder, kind, file=selector.get("file", "metrics.jsonl"))
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


def full_table(results: Path) -> str:
    """Every row."""
    return _table(results, ["what", "result", "files"], lambda entry: entry)


def short_table(results: Path) -> str:
    """The paper beside ours."""
    return _table(results, ["the paper", "here", "files"], lambda entry: entry.get("paper"))


def _table(results: Path, header: list[str], choose: Callable[[dict[str, Any]], Any]) -> str:
    """By the order that each entry gives; cells are Markdown already."""
    rows = []
    for path in sorted(results.glob("*/results.json")):
        entry, values = read_entry(path.parent)
        if row := choose(entry):
            cells = [row[key].format(**values) for key in ("what", "result", "says", "here") if key in row]
            link = f"[results/{path.parent.name}](results/{path.parent.name})"
            rows.append((row["order"], [*cells, link]))
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *(cells for _, cells in sorted(rows)))]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


TABLES = {"beside": short_table, "results": full_table}
