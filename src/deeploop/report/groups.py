"""Runs of one set-up, sorted into the cells of a table: a row for each method, a column for each R. No torch.

Two runs share a set-up when they agree in the model's shape, the data and the number of tokens; they share a
cell when they also agree in method and rounds. Learning rates may differ between methods; where they differ
within one method at one R, the method has a row for each.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

from deeploop.paper.published import ROUNDS, SETUP
from deeploop.report.listing import setting
from deeploop.report.runs import CONFIG_KINDS, History, Run, read_history
from deeploop.rules import DEEPLOOP, PRENORM

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
PLAIN_LOOP = {"model.prelude": 0, "model.coda": 0}  # as runs are of before there were these


class Histories:
    """Metrics of runs, each file read once and only when asked for."""

    def __init__(self) -> None:
        self._read: dict[Path, History] = {}

    def __getitem__(self, run: Run) -> History:
        if run.folder not in self._read:
            self._read[run.folder] = read_history(run.folder)
        return self._read[run.folder]

    def loss(self, run: Run) -> float | None:
        """The validation loss a run is judged by: at its sweep's step of comparison, else its last."""
        if run.compare_at is not None:
            for line in self[run].validations:
                if line["step"] == run.compare_at:
                    return float(line["loss"])
        return run.validation.get("loss")


@dataclass(frozen=True)
class TableCell:
    """The runs of one method at one R."""

    runs: tuple[Run, ...]

    @property
    def trained(self) -> list[Run]:
        """Those that came to their end and do not stand at the floor there."""
        return [run for run in self.runs if run.ended and run.validation.get("verdict") != "collapsed"]

    @property
    def collapsed(self) -> list[Run]:
        return [run for run in self.runs if run.ended and run.validation.get("verdict") == "collapsed"]

    def losses(self, histories: Histories) -> list[float]:
        found = [histories.loss(run) for run in self.trained]
        return [loss for loss in found if loss is not None]

    def mean(self, histories: Histories) -> float | None:
        losses = self.losses(histories)
        return fmean(losses) if losses else None

    def text(self, histories: Histories) -> str:
        """Mean and spread of the runs that trained; words where there is no number."""
        losses, fallen = self.losses(histories), len(self.collapsed)
        if not losses:
            return "collapsed" if fallen else "unfinished"
        spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
        collapsed = f"{fallen} of {len(losses) + fallen} collapsed" if fallen else ""
        notes = ", ".join(filter(None, [collapsed, repeats([*self.trained, *self.collapsed])]))
        return f"{fmean(losses):.4f}{spread}" + (f" ({notes})" if notes else "")


def repeats(runs: Sequence[Run]) -> str:
    """`3 runs of 2 seeds` where some seed was run more than once, so that a spread is not one of seeds."""
    seeds = len({run.seed for run in runs})
    return f"{len(runs)} runs of {seeds} seed{'s' * (seeds > 1)}" if seeds < len(runs) else ""


@dataclass(frozen=True)
class Setup:
    """Runs that may stand in one table."""

    letter: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        own = self.runs[0].fields
        shape = f"{own['model.blocks']} blocks of width {own['model.width']}"
        amount = f"{own['optim.steps']:,} steps of {own['optim.batch']} × {own['model.context']} tokens"
        steps = "step" if own["optim.steps"] == 1 else "steps"
        corpora = " ".join(Path(folder).name for folder in self.runs[0].corpora)
        around = [own.get(name, 0) for name in PLAIN_LOOP]
        shape += f", prelude {around[0]}, coda {around[1]}" if any(around) else ""
        return f"{shape}, {amount.replace('steps', steps)}, {corpora}"

    @property
    def unit(self) -> str:
        """What its losses, in nats, are per: one vocabulary has one unit."""
        return self.runs[0].unit

    @property
    def is_beside_paper(self) -> bool:
        """Whether its losses are per GPT-2 token, as the paper's."""
        return self.unit == "GPT-2 token"

    @property
    def title(self) -> str:
        return f"set-up {self.letter}, {self.label}"

    @property
    def methods(self) -> set[str]:
        return {method(run) for run in self.runs}

    @property
    def size(self) -> str:
        """The paper's size it stands beside: its sweep's label, else by width and blocks."""
        for run in self.runs:
            if run.axes.get("size") in SETUP:
                return str(run.axes["size"])
        own = self.runs[0].fields
        medium = (own["model.blocks"], own["model.width"]) == (24, 1024)
        return "medium" if medium else "small"

    @property
    def rounds(self) -> list[int]:
        return sorted({run.fields["model.rounds"] for run in self.runs})

    @property
    def exponents(self) -> list[float]:
        return sorted({run.rule.p for run in self.runs if run.rule.is_paper})

    @property
    def is_p_sweep(self) -> bool:
        return len(self.exponents) >= 3

    @cached_property
    def rows(self) -> dict[str, dict[int, TableCell]]:
        """Row label → rounds → cell."""
        rows: dict[str, dict[int, list[Run]]] = {}
        for name in sorted(self.methods, key=method_order):
            own = [run for run in self.runs if method(run) == name]
            variants = find_variants(own)
            split = _is_split(own, variants)
            for run, variant in zip(own, variants, strict=True):
                label = f"{name}, {variant}" if split else name
                rows.setdefault(label, {}).setdefault(run.fields["model.rounds"], []).append(run)
        return {
            label: {R: TableCell(tuple(runs)) for R, runs in sorted(cells.items())}
            for label, cells in rows.items()
        }


def setups(runs: Sequence[Run]) -> list[Setup]:
    """The set-ups among language runs; the largest first."""
    found: dict[str, list[Run]] = {}
    for run in filter(is_language, runs):
        shape = {
            name: value
            for name, value in run.fields.items()
            if name.startswith(OF_A_SETUP)
            and name not in NOT_OF_A_SETUP
            and (name, value) not in PLAIN_LOOP.items()
        }
        found.setdefault(json.dumps(shape, sort_keys=True), []).append(run)
    largest = sorted(found.values(), key=len, reverse=True)
    return [Setup(letter(index), tuple(own)) for index, own in enumerate(largest)]


def letter(index: int) -> str:
    """A, B, …, Z, A2, B2, …"""
    return chr(ord("A") + index % 26) + (str(index // 26 + 1) if index >= 26 else "")


def is_language(run: Run) -> bool:
    return run.stamp.get("task", "language") == "language" and run.fields.keys() >= CONFIG_KINDS.keys()


def method(run: Run) -> str:
    """What the paper would call the block, and what was added to it."""
    return run.rule.title + cure(run) + recurrence(run)


def cure(run: Run) -> str:
    """What was done against the unigram collapse, and an optimizer other than the paper's AdamW."""
    kind = run.fields.get("optim.kind", "adamw")
    rate, steps = run.fields.get("optim.branch_lr", 1), run.fields.get("optim.branch_release_steps", 0)
    release = f" to ×1 in {steps:,} steps" if steps else ""
    taken = {
        "unigram bias": run.fields.get("model.unigram_bias"),
        f"branch rate ×{rate:g}{release}": rate != 1,
        "wait": run.fields.get("optim.wait_for_escape"),
        OPTIMIZER_NAMES.get(kind, str(kind)): kind != "adamw",
    }
    return "".join(f" + {name}" for name, used in taken.items() if used)


def recurrence(run: Run) -> str:
    """How its rounds are entered, drawn and trained; nothing in a plain loop at a fixed R."""
    if not is_language(run):
        return ""
    own = {name.partition(".")[2]: value for name, value in run.fields.items() if name.startswith("model.")}
    rounds = {name.partition(".")[2]: value for name, value in run.fields.items() if name[:7] == "rounds."}
    sample, kept = rounds.get("sample", "fixed"), rounds.get("backprop", 0)
    injection, first = own.get("injection", "none"), own.get("first_state", "embedding")
    taken = {
        str(injection): injection != "none",
        f"from {first}": first != "embedding",
        f"rounds {sample}": sample != "fixed",
        f"ramp {rounds.get('ramp')}": rounds.get("ramp", "off") != "off",
        f"gradient through {kept}": kept,
        "exit gate": own.get("exit_gate"),
        "gate-only": run.fields.get("gate.stage") == "gate-only",
    }
    return "".join(f" + {name}" for name, used in taken.items() if used)


OPTIMIZER_NAMES = {"muon": "Muon"}


def method_order(name: str) -> tuple[bool, bool, str]:
    return (not name.startswith(PRENORM.label), name.startswith(DEEPLOOP.label), name)


def find_variants(runs: Sequence[Run]) -> list[str]:
    """Of each run of a method, the optimizer's settings in which it differs from the others."""
    # The kind is in the method's name.
    names = {name for run in runs for name in run.fields if name.startswith("optim.")} - {"optim.kind"}
    told = {name for name in names if len({json.dumps(run.fields.get(name)) for run in runs}) > 1}
    return [
        ", ".join(
            f"{name.partition('.')[2]} {setting(run.fields[name])}" for name in run.fields if name in told
        )
        or "as the others"
        for run in runs
    ]


def _is_split(runs: Sequence[Run], variants: Sequence[str]) -> bool:
    """Whether some R has runs with different settings, so that one row could not hold them."""
    rounds = [run.fields["model.rounds"] for run in runs]
    return len({*zip(rounds, variants, strict=True)}) > len({*rounds})


def columns(setup: Setup) -> list[int]:
    """Our R, and the paper's where that stands beside them."""
    return sorted({*(ROUNDS if setup.is_beside_paper else ()), *setup.rounds})
