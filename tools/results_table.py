"""Makes README's table of results from docs/results (`make results`); `--check` says whether it is in step.

Each docs/results/FOLDER with a results.json is a row:

{"order": 1, "what": "…", "result": "validation loss {loss:.3f}", "values": {"loss": SELECTOR}}

where a SELECTOR names one number of the files beside it:

{"last": "validation", "field": "loss"}           of the last such line of metrics.jsonl
{"median": "train", "field": "tokens_per_s"}      over all such lines
{"escaped_in": "seeds.json", "where": {…}}        entries, as in `where`, whose last validation escaped
{"escaped_runs": "paper-p0.5-*"}                  run folders whose last validation escaped
{"runs": "paper-p0.5-*"}                          how many run folders there are
{"mean_loss": "prenorm-rounds7-*"}                of the last validations of those that did not collapse
{"json": "gamma.json", "path": ["…", "gamma"]}    a number in a JSON file
the first two with "file": a metrics file of another name; these and "json" with "times": a factor
"""

import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, median
from typing import Any

from deeploop.report.packed import opened, subfolders
from deeploop.report.page import filled
from deeploop.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: written by `make results` -->", "<!-- end of results -->"


def value(folder: Path, selector: dict[str, Any]) -> float:
    """The number that a selector names."""
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


def row(folder: Path) -> tuple[int, str]:
    """Its place in the table, and its line."""
    entry = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    values = {name: value(folder, selector) for name, selector in entry["values"].items()}
    cells = (entry["what"].format(**values), entry["result"].format(**values))
    place = f"docs/results/{folder.name}"
    return entry["order"], f"| {cells[0]} | {cells[1]} | [{place}]({place}) |"


def table(results: Path) -> str:
    rows = sorted(row(path.parent) for path in results.glob("*/results.json"))
    return "\n".join(["| what | result | where |", "|---|---|---|", *(line for _, line in rows)])


def renewed(text: str, results: Path) -> str:
    """README's text with the table between the two markers made anew."""
    return filled(text, BEGIN, END, table(results))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = renewed(old, ROOT / "docs" / "results")
    if "--check" in sys.argv[1:]:
        sys.exit("README.md: its table of results is out of step; run: make results" if old != new else 0)
    readme.write_text(new, encoding="utf-8")
