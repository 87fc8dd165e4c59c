"""Group runs: seeds of one cell, and the cells of a set-up by method and R. No torch.

Runs are seeds of one cell if they agree in every setting but the seed. Runs share a set-up, and so a table
like the paper's, if they agree in the model's shape, the data and the number of tokens.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from deeploop.report.runs import (
    CONFIG_KINDS,
    DEFINING,
    REASONERS,
    History,
    Run,
    applies,
    differing,
    read_history,
)
from deeploop.report.tables import MISSING
from deeploop.rules import DEEPLOOP, PRENORM, parse

TABLE_AXES = (
    "model.rule",
    "model.unigram_bias",
    "model.rounds",
    "model.injection",
    "model.first_state",
    "model.exit_gate",
)
OF_A_SETUP = ("model.", "data.", "optim.steps", "optim.batch", "device.low_precision")
NOT_OF_A_SETUP = ("data.validate_every", "data.validation_rounds", *TABLE_AXES)
# Settings that a method's name mentions: setting → the default, and the text for another value.
ADDED: dict[str, tuple[Any, str]] = {
    "model.unigram_bias": (False, "unigram bias"),
    "optim.kind": ("adamw", "{}"),
    "model.injection": ("none", "{}"),
    "model.first_state": ("embedding", "from {}"),
    "rounds.sample": ("fixed", "rounds {}"),
    "rounds.ramp": ("off", "ramp {}"),
    "rounds.backprop": (0, "gradient through {}"),
    "model.exit_gate": (False, "exit gate"),
    "gate.stage": ("joint", "{}"),
}
OF_A_METHOD = ("model.rule", "model.high_rule", "model.depth_from", *ADDED)
OPTIMIZERS = {"muon": "Muon"}
FEW = 8
"""Labels that a legend has room for; beyond that it names only the methods."""


class Histories:
    """Metrics of runs; each file is read once, when it is first needed."""

    def __init__(self) -> None:
        self._read: dict[Path, History] = {}

    def __getitem__(self, run: Run) -> History:
        if run.folder not in self._read:
            self._read[run.folder] = read_history(run.folder)
        return self._read[run.folder]

    def loss(self, run: Run) -> float | None:
        """Return the validation loss to compare: at the sweep's `compare_at`, else the last."""
        if run.compare_at is not None:
            for line in self[run].validations:
                if line["step"] == run.compare_at:
                    return float(line["loss"])
        return run.validation.get("loss")


# ── Methods ─────────────────────────────────────────────────────────────────────────────────────────────
def method(run: Run) -> str:
    """Name the rule and what was added to it."""
    if run.stamp.get("task") in REASONERS:
        return reasoner_method(run)
    return run.rule.title + additions(run) if "model.rule" in run.fields else MISSING


def additions(run: Run) -> str:
    """Name the differences from a plain loop trained with AdamW: ` + unigram bias + Muon`.

    Plain is a fixed R, or one round per step on an iterated task.
    """
    found = ""
    for name, (usual, words) in ADDED.items():
        if name == "rounds.sample" and run.stamp.get("task") == "iterate":
            usual = "steps"
        value = run.fields.get(name, usual)
        if value != usual and applies(run, name):
            found += f" + {words.format(OPTIMIZERS.get(value, value) if name == 'optim.kind' else value)}"
    return found


def reasoner_method(run: Run) -> str:
    """Name HRM or TRM, and the rule of its blocks."""
    own, model = run.fields, str(run.stamp.get("task")).upper()
    rule, high = parse(own.get("model.rule", "postnorm")), own.get("model.high_rule")
    if not (rule.has_alpha or high):
        return f"Vanilla {model}"
    of_high = f", H {parse(high).title}" if high else ""
    return f"{model} {rule.title}{of_high}" + (
        ", N by the graph" if own.get("model.depth_from") == "graph" else ""
    )


def method_order(name: str) -> tuple[bool, bool, str]:
    return (not name.startswith(PRENORM.label), name.startswith(DEEPLOOP.label), name)


# ── Cells: runs that differ in their seed alone ─────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Cell:
    """Runs of one method, or that agree in all settings but the seed."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def rounds(self) -> int:
        return int(self.first.fields["model.rounds"])

    @property
    def trained(self) -> list[Run]:
        """Return the runs that ended without collapsing."""
        return [run for run in self.runs if run.ended and run.validation.get("verdict") != "collapsed"]

    @property
    def collapsed(self) -> list[Run]:
        return [run for run in self.runs if run.ended and run.validation.get("verdict") == "collapsed"]

    def of_trained(self, value: Callable[[Run], float | None]) -> list[float]:
        return [own for run in self.trained if (own := value(run)) is not None]

    def losses(self, histories: Histories) -> list[float]:
        return self.of_trained(histories.loss)

    def text(self, value: Callable[[Run], float | None], form: str = ".4f") -> str:
        """Format mean and spread of the runs that trained; say why there is no number otherwise."""
        found, fallen = self.of_trained(value), len(self.collapsed)
        if not found:
            ended = any(run.ended for run in self.runs)
            return "collapsed" if fallen else MISSING if ended else "unfinished"
        collapsed = f"{fallen} of {len(found) + fallen} collapsed" if fallen else ""
        notes = ", ".join(filter(None, [collapsed, repeats([*self.trained, *self.collapsed])]))
        return spread(found, form) + (f" ({notes})" if notes else "")


def spread(values: Sequence[float], form: str = ".4f") -> str:
    """Format mean and standard deviation: `2.0500 ± 0.0707`."""
    return format(fmean(values), form) + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def repeats(runs: Sequence[Run]) -> str:
    """Format `3 runs of 2 seeds` if a seed was run more than once: the spread then mixes runs and seeds."""
    seeds = len({run.seed for run in runs})
    return f"{len(runs)} runs of {seeds} seed{'s' * (seeds > 1)}" if seeds < len(runs) else ""


def cells(runs: Iterable[Run]) -> list[Cell]:
    """Group the runs that agree in all settings but the seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        own = {
            name: value
            for name, value in run.fields.items()
            if name.startswith(DEFINING) and applies(run, name)
        }
        found.setdefault(json.dumps([run.stamp.get("task"), own], sort_keys=True), []).append(run)
    return [Cell(tuple(own)) for own in found.values()]


def methods(runs: Sequence[Run]) -> list[str]:
    """Return the method of each run, without the additions that all of them have."""
    parts = [method(run).split(" + ") for run in runs]
    common = set.intersection(*(set(own[1:]) for own in parts)) if len(parts) > 1 else set()
    return [" + ".join([own[0], *(part for part in own[1:] if part not in common)]) for own in parts]


def labels(cells: Sequence[Cell], *, but: Sequence[str] = ()) -> list[str]:
    """Name each cell by its method and the settings in which the cells differ, except those in `but`.

    Cells that vary in the exponent of the paper's block are named by it.
    """
    runs = [cell.first for cell in cells]
    names = [name for name in differing(runs) if name not in (*but, *OF_A_METHOD)]
    found = methods(runs)
    of_the_paper = all("model.rule" in run.fields and run.rule.is_paper for run in runs)
    if of_the_paper and len({run.rule.p for run in runs}) > 2:
        found = [f"p = {run.rule.p:g}{additions(run)}" for run in runs]
    return [" · ".join([base, *_told(run, names)]) for base, run in zip(found, runs, strict=True)]


def _told(run: Run, names: Sequence[str]) -> list[str]:
    having = [name for name in names if name in run.fields and applies(run, name)]
    return [f"{short(name, names)} {setting(run.fields[name])}" for name in having]


def along(cells: Sequence[Cell], field: str, *, but: Sequence[str] = ()) -> dict[str, list[Cell]]:
    """Group the cells that agree in all but a field and the seed, if the field has two values or more."""
    found: dict[str, list[Cell]] = {}
    but = (field, *but)
    having = [cell for cell in cells if field in cell.first.fields]
    for cell, name in zip(having, labels(having, but=but), strict=True):
        found.setdefault(name, []).append(cell)
    kept = [own for own in found.values() if len({cell.first.fields[field] for cell in own}) > 1]
    shorter = labels([own[0] for own in kept], but=but)  # what differs among these alone
    names = shorter if len({*shorter}) == len(kept) else [name for name in found if found[name] in kept]
    return dict(zip(names, kept, strict=True))


def in_legend(labels: Iterable[str]) -> dict[str, str]:
    """Map labels to names in a legend: if there are too many, they are named by their method alone."""
    labels = list(dict.fromkeys(labels))
    return {one: one if len(labels) <= FEW else one.partition(" · ")[0] for one in labels}


# ── Set-ups: runs that can be compared in one table ─────────────────────────────────────────────────────
@dataclass(frozen=True)
class Setup:
    """Runs that can be compared in one table."""

    letter: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        own = self.runs[0].fields
        shape = f"{own['model.blocks']} blocks of width {own['model.width']}"
        amount = f"{own['optim.steps']:,} steps of {own['optim.batch']} × {own['model.context']} tokens"
        steps = "step" if own["optim.steps"] == 1 else "steps"
        corpora = " ".join(Path(folder).name for folder in self.runs[0].corpora)
        around = own["model.prelude"], own["model.coda"]
        shape += f", prelude {around[0]}, coda {around[1]}" if any(around) else ""
        return f"{shape}, {amount.replace('steps', steps)}, {corpora}"

    @property
    def unit(self) -> str:
        """Return the unit that losses are per, which depends on the vocabulary."""
        return self.runs[0].unit

    @property
    def title(self) -> str:
        return f"set-up {self.letter}, {self.label}"

    @property
    def rounds(self) -> list[int]:
        return sorted({run.fields["model.rounds"] for run in self.runs})

    @cached_property
    def rows(self) -> dict[str, dict[int, Cell]]:
        """Map row label and rounds to a cell; a method has several rows if settings differ at one R."""
        rows: dict[str, dict[int, Cell]] = {}
        for name in sorted({method(run) for run in self.runs}, key=method_order):
            own = cells(run for run in self.runs if method(run) == name)
            split = len(own) > len({cell.rounds for cell in own})
            told = [name for name in differing([cell.first for cell in own]) if name != "model.rounds"]
            for cell in sorted(own, key=lambda cell: cell.rounds):
                row = " · ".join([name, *_told(cell.first, told)]) if split else name
                rows.setdefault(row, {})[cell.rounds] = cell
        return rows


def setups(runs: Sequence[Run]) -> list[Setup]:
    """Return the set-ups of the language runs, the largest first."""
    found: dict[str, list[Run]] = {}
    for run in filter(is_language, runs):
        shape = {
            name: value
            for name, value in run.fields.items()
            if name.startswith(OF_A_SETUP) and name not in NOT_OF_A_SETUP
        }
        found.setdefault(json.dumps(shape, sort_keys=True), []).append(run)
    largest = sorted(found.values(), key=len, reverse=True)
    return [Setup(letter(index), tuple(own)) for index, own in enumerate(largest)]


def letter(index: int) -> str:
    """A, B, …, Z, A2, B2, …"""
    return chr(ord("A") + index % 26) + (str(index // 26 + 1) if index >= 26 else "")


def is_language(run: Run) -> bool:
    return run.stamp.get("task", "language") == "language" and run.fields.keys() >= CONFIG_KINDS.keys()


# ── Settings as text ────────────────────────────────────────────────────────────────────────────────────
def short(name: str, among: Sequence[str]) -> str:
    """Shorten `model.p` to `p`, unless another field ends alike."""
    word = name.rpartition(".")[2]
    return word if [other.rpartition(".")[2] for other in among].count(word) == 1 else name


def setting(value: Any) -> str:
    """Format a value as on the command line, and a list as its items."""
    if isinstance(value, list | tuple):
        return " ".join(map(setting, value)) or MISSING
    return f"{value:g}" if isinstance(value, float) else str(value)
