"""The tables of a report that are about the runs themselves: cost, κ_R, what differs, commands. No torch."""

import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from deeploop.paper import published
from deeploop.report.endings import outcome
from deeploop.report.evaluations import read_diagnosis, read_evaluations, read_validations
from deeploop.report.groups import Histories, Setup, TableCell, method
from deeploop.report.listing import loss_columns, number, setting, started, steps_done
from deeploop.report.page import MISSING
from deeploop.report.runs import Run, natural
from deeploop.report.tables import PAPER_ROWS, Table


# ── Compute ─────────────────────────────────────────────────────────────────────────────────────────────
def compute_table(groups: Sequence[Setup], runs: Sequence[Run]) -> Table:
    """Speed and cost per cell; time per token relative to R = 1, ours and the paper's."""
    rows = []
    for setup in groups:
        for label, cells in setup.rows.items():
            first = speed(cells.get(1))
            for R, cell in cells.items():
                rows.append([setup.letter, label, str(R), *compute_cells(setup, R, cell, first)])
    total = [
        sum(own or 0 for own in hours) for hours in zip(*((r.gpu_hours, r.hours) for r in runs), strict=True)
    ]
    rows.append(
        ["all runs given", "", "", "", "", *(number(hours or None, ".3f") for hours in total), "", ""]
    )
    header = [
        "set-up",
        "method",
        "R",
        "tokens/s",
        "× R=1",
        "GPU-hours",
        "device-hours",
        "paper: GPU-hours",
        "paper: × R=1",
    ]
    return Table(
        "compute",
        "Compute per cell and in total",
        header,
        rows,
        "tokens/s: median of the last hundred lines of each run, all its devices together; mean over the "
        "cell's runs that had these to themselves, as far as their sweep's --jobs tells. "
        "× R=1: time per token over that of the same row at R = 1. Hours: training steps only, "
        "summed over the cell's runs, also unfinished ones; runs that share a GPU each count all their time. "
        "GPU-hours are missing for runs on CPUs. The paper's hours (Appendix D) are for one of its own "
        "cells, on H200s.",
    )  # fmt: skip


def speed(cell: TableCell | None) -> float | None:
    """Mean over the runs that shared their device with no other cell."""
    alone = [run for run in cell.runs if not run.shared] if cell else []
    rates = [run.tokens_per_s for run in alone if run.tokens_per_s]
    return fmean(rates) if rates else None


def compute_cells(setup: Setup, R: int, cell: TableCell, first: float | None) -> list[str]:
    own = speed(cell)
    hours = [run.hours for run in cell.runs if run.hours is not None]
    gpu = [run.gpu_hours for run in cell.runs if run.gpu_hours is not None]
    block = PAPER_ROWS.get(method(cell.runs[0]), "")
    paper, paper_first = (published.gpu_hours(setup.size, block, rounds) for rounds in (R, 1))
    return [
        number(own, ",.0f"),
        number(first / own if own and first else None, ".2f"),
        number(sum(gpu) if gpu else None, ".3f"),
        number(sum(hours) if hours else None, ".3f"),
        number(paper, ".0f"),
        number(paper / paper_first if paper and paper_first else None, ".2f"),
    ]


# ── κ_R ─────────────────────────────────────────────────────────────────────────────────────────────────
def kappas(run: Run, histories: Histories) -> list[dict[str, Any]]:
    """Diagnoses in the metrics, and the one of diagnose.json."""
    found = [record for record in histories[run].kappas if record.get("kappa") is not None]
    own = read_diagnosis(run.files)
    if own.get("kappa") is not None and "rounds" in own:
        found = [*(record for record in found if record["step"] != own.get("step")), own]
    return sorted(found, key=lambda record: record.get("step") or 0)


def kappa_table(runs: Sequence[Run], histories: Histories) -> Table | None:
    rows = []
    for run in runs:
        found = kappas(run, histories)
        for record in found[:1] + found[1:][-1:]:
            rows.append(
                [
                    run.name, method(run), str(record["rounds"]), str(record.get("step", MISSING)),
                    str(record.get("updates", MISSING)), number(record["kappa"], ".3f"),
                    number(record.get("kappa_raw"), ".3f"), number(record.get("similarity"), ".3f"),
                ]
            )  # fmt: skip
    if not rows:
        return None
    header = ["run", "method", "R", "step", "updates", "κ_R", "κ_R raw", "token similarity"]
    return Table(
        "kappa", "Visit alignment κ_R, first and last diagnosis of each run", header, rows, KAPPA_NOTE
    )


KAPPA_NOTE = "κ_R is at most R: visits that pull together give R, orthogonal ones at most 1."


# ── What differs, and the runs themselves ───────────────────────────────────────────────────────────────
def setups_table(groups: Sequence[Setup]) -> Table:
    """What the letters of set-ups mean."""
    rows = []
    for setup in groups:
        beside = f"GPT-2 {setup.size}"
        rows.append(
            [setup.letter, setup.label, str(len(setup.runs)), " ".join(setup.runs[0].corpora), beside]
        )
    header = ["set-up", "what", "runs", "data", "stands beside the paper's"]
    return Table("set-ups", "Set-ups: runs of one shape, one corpus and one number of tokens", header, rows)


def differences_table(groups: Sequence[Setup]) -> Table:
    """Every setting of the paper's in which some run differs from it, a column for each set-up."""
    sizes = [size for size in published.SIZES if any(setup.size == size for setup in groups)]
    rows = []
    for name in published.SETUP["small"]:
        theirs = {size: setting(published.SETUP[size][name]) for size in sizes}
        ours = [values(setup, name) for setup in groups]
        if any(own != theirs[setup.size] for own, setup in zip(ours, groups, strict=True)):
            rows.append([name, *theirs.values(), *ours])
    paper_tokens = [f"{tokens(published.SETUP[size]):,}" for size in sizes]
    rows.append(["tokens", *paper_tokens, *(f"{tokens(setup.runs[0].fields):,}" for setup in groups)])
    rows.append(
        ["devices", *(f"{published.GPUS[size]} × H200 141 GB" for size in sizes), *map(devices, groups)]
    )
    return Table(
        "differences",
        "Where these runs differ from the paper's set-up",
        ["setting", *(f"paper, {size}" for size in sizes), *(setup.letter for setup in groups)],
        rows,
        "The paper states no learning rate, warm-up or optimizer settings: those are of its lineage's public "
        "configs. block, p, rounds and seed are what is compared.",
    )


def values(setup: Setup, name: str) -> str:
    """A field's values among the runs of a set-up."""
    found = {setting(run.fields.get(name, MISSING)) for run in setup.runs}
    return ", ".join(sorted(found, key=natural))


def tokens(fields: Mapping[str, Any]) -> int:
    return int(fields["optim.steps"] * fields["optim.batch"] * fields["model.context"])


def devices(setup: Setup) -> str:
    found = {
        f"{run.stamp['ranks']} × {run.stamp['device']}"
        if {"ranks", "device"} <= run.stamp.keys()
        else "not recorded"
        for run in setup.runs
    }
    return ", ".join(sorted(found))


def runs_table(runs: Sequence[Run], histories: Histories) -> Table:
    losses = loss_columns(runs, lambda run: histories.loss(run) if run.ended else None)
    floor = {"floor": lambda run: number(run.validation.get("floor"), ".4f")} if "loss" in losses else {}
    numbers = {**losses, **floor}
    rows = [
        [
            run.name, run.state, steps_done(run),
            method(run) if "model.rule" in run.fields else MISSING,
            number(run.fields.get("model.rounds"), "d"), number(run.seed, "d"),
            *(cell(run) for cell in numbers.values()), outcome(run.validation) or MISSING,
            str(run.stamp.get("git") or MISSING)[:10], started(run),
        ]
        for run in runs
    ]  # fmt: skip
    header = ["run", "state", "step", "method", "R", "seed", *numbers, "verdict", "git", "started"]
    note = "A loss is shown for runs that came to their end. absent: a cell of a sweep without a run folder."
    if "bits/byte" in numbers:
        note += " Losses per byte and per token do not compare: bits/byte does, where a run recorded it."
    return Table("runs", "Settings, progress and last validation of each run", header, rows, note)


def commands_table(runs: Sequence[Run], histories: Histories) -> Table:
    """The command behind every number: training, what it was resumed with, validation, scoring, diagnosis."""
    rows = []
    for run in runs:
        found = [("train", words_of(run.stamp))]
        found += [("train", resumed(*resume)) for resume in histories[run].resumes]
        found += [("validate", words_of(record)) for record in read_validations(run.files)]
        found += [("eval", words_of(record)) for record in read_evaluations(run.files)]
        found.append(("diagnose", words_of(read_diagnosis(run.files))))
        rows += [[run.name, what, text] for what, text in found if text]
    return Table("commands", "The command behind every number", ["run", "for", "command"], rows)


def words_of(record: Mapping[str, Any]) -> str:
    """The command line that a record keeps; nothing where it is none."""
    words = record.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def resumed(step: int, changes: Mapping[str, Any]) -> str:
    told = ", ".join(f"{name}={setting(new)} (was {setting(old)})" for name, (old, new) in changes.items())
    return f"then --resume at step {step:,} with {told}"
