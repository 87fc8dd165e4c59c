"""The sections of `deeploop report`: the runs, then the paper's tables for runs of its kind. No torch."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import deeploop
from deeploop.report import alignment, beside_paper, beyond, losses, means
from deeploop.report.groups import Histories, setting
from deeploop.report.page import Part, Section
from deeploop.report.results import read_diagnosis, read_evaluations, read_validations
from deeploop.report.runs import Run
from deeploop.report.tables import MISSING, Table


def make_sections(runs: Sequence[Run], histories: Histories, *, paper: bool = False) -> list[Section]:
    """Make the sections of a report on these runs; `paper` asks for the paper's tables for any of them."""
    trained = [run for run in runs if run.state != "untrained"]
    depths = losses.depths_table(trained)
    final: list[Part] = [c for field in losses.AXES for c in losses.against(trained, histories, field)]
    found = [
        Section("Runs", [*summary(runs), *damage(runs, histories), *means.runs_tables(runs)]),
        Section("Loss curves", losses.curves(trained, histories)),
        Section("Comparison", [*means.seeds_tables(trained, histories), *final]),
        Section("Loss at other depths", [depths] if depths else []),
        Section("Deeper than trained", beyond.beyond_parts(trained, histories)),
        Section("Visit alignment κ_R", alignment.kappa_parts(trained, histories)),
        *beside_paper.sections(trained, histories, asked=paper),
        Section("Commands", [commands_table(runs, histories)]),
    ]
    return [section for section in found if section.parts]


def count_of(runs: Sequence[Run]) -> str:
    return f"{len(runs)} run{'s' * (len(runs) != 1)}"


def count_states(runs: Iterable[Run]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in runs:
        counts[one.state] = counts.get(one.state, 0) + 1
    return counts


def summary(runs: Sequence[Run]) -> list[str]:
    states = ", ".join(f"{count} {state}" for state, count in sorted(count_states(runs).items()))
    hours = sum(one.gpu_hours or 0 for one in runs)
    most = "at most " * any(one.shared for one in runs)  # each of them counts all its time
    cost = f"{most}{hours:.2f} GPU-hours of training" if hours else "no GPU-hours recorded"
    shared = sum(one.shared and one.tokens_per_s is not None for one in runs)
    totals = (
        f"{count_of(runs)}: {states}; {cost}. Made from their files by deeploop {deeploop.__version__}. "
        f"The last section has the command behind every number. {MISSING} is a cell without a number. "
        "Losses are those of the last validation; means and figures of final losses omit unfinished runs."
    )
    note = (
        f"{shared} of {count_of(runs)} shared their device (sweep --jobs); means of tokens/s leave them out."
    )
    return [totals, *([note] if shared else [])]


def damage(runs: Sequence[Run], histories: Histories) -> list[str]:
    """Name the runs with damaged metrics; an unreadable run has no numbers anyway."""
    counts = {one.name: histories[one].damaged for one in runs if one.state != "unreadable"}
    found = ", ".join(f"{name} ({count})" for name, count in counts.items() if count)
    return [f"Lines of metrics.jsonl that can't be read, and are left out: {found}."] if found else []


def commands_table(runs: Sequence[Run], histories: Histories) -> Table:
    """Make a table of the command behind every number: training, resumes, validation, scoring, diagnosis."""
    rows = []
    for run in runs:
        found = [("train", words_of(run.stamp))]
        found += [("train", resumed(*resume)) for resume in histories[run].resumes]
        found += [("validate", words_of(record)) for record in read_validations(run.files)]
        found += [("eval", words_of(record)) for record in read_evaluations(run.files)]
        found.append(("diagnose", words_of(read_diagnosis(run.files))))
        code = str(run.stamp.get("git") or MISSING)[:10]
        rows += [[run.name, what, text, code] for what, text in found if text]
    return Table("commands", "The command behind every number", ["run", "for", "command", "code"], rows)


def words_of(record: Mapping[str, Any]) -> str:
    """Return the command line that a record keeps; empty if it keeps none."""
    words = record.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def resumed(step: int, changes: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={setting(new)} (was {setting(old)})" for name, (old, new) in changes.items())
    return f"then --resume at step {step:,} with {text}"
