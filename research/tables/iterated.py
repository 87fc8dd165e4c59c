"""The tables behind docs/depth.md: who learns the step of an iterated task, and who extrapolates."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from deeploop.diagnose.exponent import half_width
from deeploop.report.beyond import RIGHT, goes_on
from deeploop.report.runs import Run
from deeploop.report.tables import MISSING, markdown_table
from deeploop.runs.sweeps import read_sweep
from deeploop.tasks.iterate.problems import make_task
from deeploop.tasks.iterate.problems.examples import held_out
from deeploop.tasks.iterate.scoring import copying
from research.study import runs_of

TRAINED = 4
NAMES = {"size": "RMS", "far": "distance"}
COPIED = 256  # held-out instances that copying is scored on
SHOWN = ("4", "9", "24", "200")
HELD_OUT = 11  # no choice was made on seeds from this one on
SEED_STEPS = (4, 9, 24, 127, 200)
ROUNDS = (1, 4, 8, 16, 32, 64, 128, 200)
RECALL_STEPS = (4, 8, 24, 77, 200)
STEPS = {"automaton": (4, 8, 16, 77, 200), "addition": (4, 8, 16, 24), "hops": (4, 8, 12, 24)}


def study_table(study: dict[str, list[dict[str, Any]]]) -> str:
    """The number of models that extrapolate, by variant and rate, and the mean accuracy at some depths."""
    rows = []
    for name, models in study.items():
        for rate, own in by_rate(models).items():
            shares = [f"{fmean(model['cells'][h] for model in own):.3f}" for h in SHOWN]
            rows.append([name, f"{rate:g}", f"{extrapolating(own)} of {len(own)}", *shares])
    header = ["variant", "peak rate", "extrapolates to 200 steps", *(f"{h} steps" for h in SHOWN)]
    return markdown_table(header, rows)


def variants_table(study: dict[str, list[dict[str, Any]]]) -> str:
    """The number of models that extrapolate: a row for each variant, with its rates in one cell."""
    rows = []
    for name, models in study.items():
        rates = [f"{rate:g}: {extrapolating(own)} of {len(own)}" for rate, own in by_rate(models).items()]
        rows.append([name, f"{extrapolating(models)} of {len(models)}", ", ".join(rates)])
    return markdown_table(["variant", "extrapolates to 200 steps", "by peak rate"], rows)


def by_rate(models: list[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    rates = sorted({model["rate"] for model in models})
    return {rate: [model for model in models if model["rate"] == rate] for rate in rates}


def extrapolating(models: list[dict[str, Any]]) -> int:
    cells = ({int(h): share for h, share in model["cells"].items()} for model in models)
    return sum(bool(goes_on(shares, TRAINED)) for shares in cells)


def stream_table(folder: Path) -> str:
    """Size of the stream and distance from the trained states, by round."""
    stream = json.loads((folder / "stream.json").read_text())
    rows = [
        [name, NAMES[what], *(format(records[r - 1][what], form) for r in ROUNDS)]
        for name, records in stream.items()
        for what, form in (("size", ".2f"), ("far", ".1e"))
    ]
    return markdown_table(["block", "", *(f"round {r}" for r in ROUNDS)], rows)


def task_tables(folder: Path) -> str:
    """For every task, each rule at the rate and noise of its search, on seeds that the search did not use."""
    settings = {name: cell.settings for name, cell in read_sweep(folder).cells.items()}
    runs = runs_of(folder)
    tables = []
    for task, steps in STEPS.items():
        own = [run for run in runs if run.axes["task"] == task]
        rows = []
        for rule in dict.fromkeys(run.axes["rule"] for run in own):
            of_rule = [run for run in own if run.axes["rule"] == rule]
            tried = settings[of_rule[0].folder.name]
            trial = f"{tried['optim.peak_lr']:g}, {tried['rounds.noise']:g}"
            rows.append([task, rule, trial, reached(of_rule), *means(of_rule, steps)])
        rows.append([task, "copying", "", "", *copied(own[0], steps)])
        header = ["task", "rule", "rate, noise", "extrapolates", *(f"{h} steps" for h in steps)]
        tables.append(markdown_table(header, rows))
    return "\n\n".join(tables)


def recall_table(folder: Path) -> str:
    """Iterated tasks with and without an injection: learned four steps, extrapolates, and mean shares."""
    rows = []
    for part in ("grid", "longer", "noise"):
        groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in runs_of(folder / part):
            if run.state == "finished":
                groups[run.axes["task"], run.axes["rule"]].append(run)
        for (task, rule), runs in groups.items():
            fields = runs[0].fields
            trial = f"{fields['optim.peak_lr']:g}, {fields['rounds.noise']:g}, {fields['optim.steps']:,}"
            learned = sum(shares_by_steps(run)[TRAINED] >= RIGHT for run in runs)
            counts = [f"{learned} of {len(runs)}", reached(runs)]
            rows.append([task, rule, trial, *counts, *means(runs, RECALL_STEPS)])
    shown = [f"{h} steps" for h in RECALL_STEPS]
    header = ["task", "rule, injection", "rate, noise, training", "learns 4 steps", "extrapolates", *shown]
    return markdown_table(header, rows)


def seed_table(folder: Path, axis: str, label: str) -> str:
    """The runs of a sweep over seeds, by one of its axes: how many extrapolate, and shares of right cells.

    Seeds of the search and held-out seeds have rows of their own.
    """
    groups: dict[tuple[str, bool], list[Run]] = defaultdict(list)
    for run in runs_of(folder):
        groups[str(run.axes[axis]), run.axes["seed"] >= HELD_OUT].append(run)
    rows = []
    for (name, _), runs in sorted(groups.items()):
        seeds = sorted(run.axes["seed"] for run in runs)
        worst = min(min(shares_by_steps(run)[h] for h in (127, 200)) for run in runs)
        rows.append([name, spans(seeds), reached(runs), f"{worst:.3f}", *means(runs, SEED_STEPS)])
    header = [label, "seeds", "extrapolates to 200 steps", "worst", *(f"{h} steps" for h in SEED_STEPS)]
    return markdown_table(header, rows)


def spans(numbers: list[int]) -> str:
    """Sorted numbers as ranges: [0, 1, 2, 21, 22] is "0–2, 21–22"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))


def reached(runs: list[Run]) -> str:
    return f"{sum(bool(goes_on(shares_by_steps(run), TRAINED)) for run in runs)} of {len(runs)}"


def means(runs: list[Run], steps: tuple[int, ...]) -> list[str]:
    """The mean share of right cells and, where seeds differ, half its 95% interval by Student's t."""
    texts = []
    for h in steps:
        shares = [shares_by_steps(run)[h] for run in runs]
        half = half_width(shares) if len(shares) > 1 else 0.0
        texts.append(f"{fmean(shares):.3f}" + (f" ± {half:.3f}" if half >= 5e-4 else ""))
    return texts


def copied(run: Run, steps: tuple[int, ...]) -> list[str]:
    task = make_task(run.fields["data.task"], run.fields["data.length"], run.fields["data.rule"])
    found = copying(task, held_out(task, COPIED), steps, run.fields["data.train_steps"])
    return [f"{found[h]:.3f}" if h in found else MISSING for h in steps]


def shares_by_steps(run: Run) -> dict[int, float]:
    last = run.validation
    return dict(zip(last["steps"], last["cells_by_steps"], strict=True))


def _study(results: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads((results / "depth" / "study.json").read_text())
    return found


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "depth": {
        "depth": lambda results: f"{variants_table(_study(results))}\n\n{stream_table(results / 'depth')}",
        "study": lambda results: study_table(_study(results)),
    },
    "demo-seeds": {"demo-seeds": lambda results: seed_table(results / "demo-seeds", "rule", "model")},
    "recall": {"recall": lambda results: recall_table(results / "recall")},
    "iterate": {"iterate": lambda results: task_tables(results / "iterate")},
    "demo-every": {"demo-every": lambda results: seed_table(results / "demo-every", "trial", "flat loop")},
    "two-blocks": {"two-blocks": lambda results: seed_table(results / "two-blocks", "blocks", "K")},
}
