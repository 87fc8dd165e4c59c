"""Makes the tables of docs/depth.md from docs/results (`make results`); `--check`: are they in step?"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from deeploop.data.iterate import make_task
from deeploop.data.iterate.examples import held_out
from deeploop.eval.iterated import copying
from deeploop.report.beyond import goes_on
from deeploop.report.page import MISSING, filled, markdown_table
from deeploop.report.runs import Run, find_runs
from deeploop.report.sweeps import read_sweep

DOCS = Path(__file__).resolve().parent.parent / "docs"
TRAINED = 4
NAMES = {"size": "RMS", "far": "distance"}
COPIED = 256  # held-out instances that copying is scored on
SHOWN = ("4", "9", "24", "200")
ROUNDS = (1, 4, 8, 16, 32, 64, 128, 200)
STEPS = {"automaton": (4, 8, 16, 77, 200), "addition": (4, 8, 16, 24), "hops": (4, 8, 12, 24)}


def study_table(study: dict[str, list[dict[str, Any]]]) -> str:
    """How many models go on, and the mean share of right cells at some depths, by variant and rate."""
    rows = []
    for name, models in study.items():
        for rate in sorted({model["rate"] for model in models}):
            own = [model["cells"] for model in models if model["rate"] == rate]
            reach = sum(
                bool(goes_on({int(h): share for h, share in cells.items()}, TRAINED)) for cells in own
            )
            means = [f"{fmean(cells[h] for cells in own):.3f}" for h in SHOWN]
            rows.append([name, f"{rate:g}", f"{reach} of {len(own)}", *means])
    header = ["variant", "peak rate", "goes on to 200 steps", *(f"{h} steps" for h in SHOWN)]
    return markdown_table(header, rows)


def stream_table(stream: dict[str, list[dict[str, float]]]) -> str:
    """Size of the stream and distance from the trained states, by round."""
    rows = [
        [name, NAMES[what], *(format(records[r - 1][what], form) for r in ROUNDS)]
        for name, records in stream.items()
        for what, form in (("size", ".2f"), ("far", ".1e"))
    ]
    return markdown_table(["block", "", *(f"round {r}" for r in ROUNDS)], rows)


def search_tables(folder: Path) -> str:
    """For every task: each rule at the trial with the least error beyond training in its worse seed.

    Of trials that are level the grid's first is taken, as `sweep --tuned` does.
    """
    order = list(read_sweep(folder).cells)
    runs = sorted(find_runs([folder]), key=lambda run: order.index(run.folder.name))
    trials: dict[tuple[str, str], dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        trials[run.axes["task"], run.axes["rule"]][run.axes["trial"]].append(run)
    tables = []
    for task, steps in STEPS.items():
        rows = []
        for (of, rule), tried in trials.items():
            if of == task:
                best = min(tried, key=lambda trial: max(run.validation["beyond"] for run in tried[trial]))
                shares = [shares_by_steps(run) for run in tried[best]]
                means = [f"{fmean(one[h] for one in shares):.3f}" for h in steps]
                rows.append([task, rule, best.replace("+", ", noise "), *means])
        task_of = next(run.fields for run in runs if run.axes["task"] == task)
        generated = make_task(task, task_of["data.length"], task_of["data.rule"])
        copied = copying(generated, held_out(generated, COPIED), steps, task_of["data.train_steps"])
        rows.append([task, "copying", "", *(f"{copied[h]:.3f}" if h in copied else MISSING for h in steps)])
        header = ["task", "rule", "rate", *(f"{h} steps" for h in steps)]
        tables.append(markdown_table(header, rows))
    return "\n\n".join(tables)


def shares_by_steps(run: Run) -> dict[int, float]:
    last = run.validation
    return dict(zip(last["steps"], last["cells_by_steps"], strict=True))


def make(text: str, results: Path) -> str:
    """The page with its tables as the files say."""
    study, stream = (json.loads((results / "depth" / f"{n}.json").read_text()) for n in ("study", "stream"))
    parts = {
        "depth": f"{study_table(study)}\n\n{stream_table(stream)}",
        "iterate": search_tables(results / "iterate-search"),
    }
    for name, body in parts.items():
        text = filled(text, f"<!-- {name}: written by `make results` -->", f"<!-- end of {name} -->", body)
    return text


if __name__ == "__main__":
    page = DOCS / "depth.md"
    old = page.read_text(encoding="utf-8")
    new = make(old, DOCS / "results")
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == old else "depth.md: out of step with docs/results; run: make results")
    page.write_text(new, encoding="utf-8")
