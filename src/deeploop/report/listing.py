"""Tables of runs with the settings in which they differ, for `deeploop runs` and reports. No torch."""

import shlex
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from deeploop.report.groups import setting, short
from deeploop.report.runs import Run, applies, differing
from deeploop.report.tables import MISSING, Table, number
from deeploop.runs.endings import outcome
from deeploop.terminal import printable

# On a narrow terminal, settings that all runs share are printed once, below the table.
SHARED = ("seed", "step", "state", "floor", "verdict")
# Columns that are dropped first, in this order. Then long names are cut, then settings go, from the last, and
# the verdict, state and step.
EXPENDABLE = ("started", "floor", "tokens/s", "GPU-h", "seed")
# The settings that a person looks for first, in this order; others follow in that of the config.
FOREMOST = (
    *("model.rule", "model.rounds", "model.blocks", "model.width", "optim.peak_lr"),
    *("optim.warmup_steps", "optim.steps", "data.path"),
)
NARROW_NAME = 24
UNKNOWN = "not started, or unreadable"
MOST_NAMED = 8  # of the columns that were left out
MOST_RESUMED = 3
KINDS = {
    "language": "language models",
    "chat": "chat models",
    "iterate": "iterated tasks",
    "hrm": "reasoners",
    "trm": "reasoners",
    "custom": "tasks of your own",
}
Columns = dict[str, Callable[[Run], str]]


def as_json(run: Run, settings: Sequence[str]) -> dict[str, Any]:
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "seed": run.seed,
        "settings": {name: run.fields.get(name) for name in settings},
        "axes": dict(run.axes),
        "loss": run.validation.get("loss"),
        "floor": run.validation.get("floor"),
        "verdict": run.validation.get("verdict"),
        "exact": run.validation.get("exact"),
        "tokens_per_s": run.tokens_per_s,
        "gpu_hours": run.gpu_hours,
        "written": run.stamp.get("written"),
        "command": run.stamp.get("command"),
    }


def text(runs: Sequence[Run], width: int | None) -> str:
    """Format a table for each kind of run, without a heading if there is only one, then how to resume stopped
    runs.
    """
    groups = by_kind(runs)
    if len(groups.keys() - {UNKNOWN}) < 2:
        found = [fitted(runs, width)]
    else:
        found = [f"{name}\n{fitted(own, width)}" for name, own in groups.items()]
    return "\n\n".join([*found, *resume_hints(runs)])


def by_kind(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(kind(run), []).append(run)
    return groups


def kind(run: Run) -> str:
    """Name the kind of model and task; unknown for a run that was not started, or can't be read."""
    task = run.stamp.get("task", "language")
    return KINDS.get(task, printable(f"task {task:.40}")) if run.stamp else UNKNOWN


def resume_hints(runs: Sequence[Run]) -> list[str]:
    """The commands that resume interrupted runs; a sweep resumes its own cells."""
    stopped = [run for run in runs if run.state in ("stopped", "started") and not run.axes]
    able = [run for run in stopped if any(run.files.glob("checkpoints/step-*"))]
    lines = [f"  deeploop train --resume {shlex.quote(str(run.folder))}" for run in able[:MOST_RESUMED]]
    if rest := len(able) - len(lines):
        lines.append(f"  and {rest} more")
    return ["\n".join(["to continue:", *map(printable, lines)])] if lines else []


# ── The table ───────────────────────────────────────────────────────────────────────────────────────────
def runs_table(runs: Sequence[Run], name: str = "runs", title: str = "") -> Table:
    """Make a table of every column, except optional ones that no run has, such as GPU-hours on CPUs."""
    table = Table.of(name, title, runs, columns(runs))
    empty = {h for h in EXPENDABLE if h in table.header and {*table.column(h)} == {MISSING}}
    return table.without(empty)


def columns(runs: Sequence[Run]) -> Columns:
    """Heading → the cell of a run."""
    losses = loss_columns(runs, lambda run: run.validation.get("loss"))
    # It is in nats per byte or per token too.
    floor: Columns = {"floor": lambda run: number(run.validation.get("floor"), ".3f")}
    return {
        "run": lambda run: printable(run.name),
        **setting_columns(runs),
        "seed": lambda run: number(run.seed, "d"),
        "step": steps_done,
        "state": lambda run: run.state,
        **losses,
        **(floor if "loss" in losses else {}),
        "verdict": lambda run: outcome(run.validation) or MISSING,
        "tokens/s": lambda run: number(run.tokens_per_s, ",.0f"),
        "GPU-h": lambda run: number(run.gpu_hours, ".3f"),
        "started": started,
    }


def setting_columns(runs: Sequence[Run], but: Sequence[str] = ()) -> Columns:
    """Return the settings in which these runs differ, or the main ones of a single run, the most
    interesting first.
    """
    known = differing(runs)
    if len(runs) == 1:  # its steps are a column of their own
        known = [name for name in FOREMOST if name in runs[0].fields and name != "optim.steps"]
    names = sorted(known, key=lambda name: (*FOREMOST, name).index(name))

    def column(name: str) -> Callable[[Run], str]:
        return lambda run: (
            printable(setting(run.fields.get(name, MISSING))) if applies(run, name) else MISSING
        )

    return {short(name, names): column(name) for name in names if name not in but}


def loss_columns(runs: Sequence[Run], loss: Callable[[Run], float | None]) -> Columns:
    """Map headings to cells of `loss`: losses per byte and per token have a column each, and bits per byte
    one.
    """
    units = sorted({run.unit for run in runs if loss(run) is not None})
    if len(units) < 2:
        return {"loss": lambda run: number(loss(run), ".4f")}

    def of(unit: str) -> Callable[[Run], str]:
        return lambda run: number(loss(run) if run.unit == unit else None, ".4f")

    def bits(run: Run) -> str:
        nats, factor = loss(run), run.bits_per_nat
        return number(None if nats is None or factor is None else nats * factor, ".3f")

    return {**{f"nats/{unit}": of(unit) for unit in units}, "bits/byte": bits}


def fitted(runs: Sequence[Run], width: int | None) -> str:
    """Keep all columns that fit; settings that all runs share, and columns left out, are named below."""
    table = runs_table(runs)
    units = sorted({run.unit for run in runs if run.validation.get("loss") is not None})
    notes = [f"loss: nats per {units[0]}"] if len(units) == 1 else []
    if width is None or table.width <= width:
        return "\n".join([table.text(), *notes])
    alike = [
        name for name in SHARED if name in table.header and len(runs) > 1 and len({*table.column(name)}) == 1
    ]
    same = [f"{name} {table.column(name)[0]}" for name in alike]
    notes += [f"the same in all: {', '.join(same)}"] if same else []
    table, dropped = table.without(alike), list[str]()
    for heading in (*EXPENDABLE, "run", *reversed([*setting_columns(runs)]), "verdict", "state", "step"):
        if table.width <= width:
            break
        if heading == "run":
            table = Table(
                "", "", table.header, [[clip(name, NARROW_NAME), *row] for name, *row in table.rows]
            )
        elif heading in table.header:
            table = table.without([heading])
            dropped.append(heading)
    if dropped:
        rest = len(dropped) - MOST_NAMED
        more = f" and {rest} more" if rest > 0 else ""
        notes.append(f"not shown: {', '.join(dropped[:MOST_NAMED])}{more} (a wider terminal, or --json)")
    return "\n".join([table.text(), *(textwrap.fill(note, width) for note in notes)])


def steps_done(run: Run) -> str:
    """Format `250/1,000`; a retrofit that was not trained yet has no steps."""
    if not run.fields or run.state == "untrained":
        return MISSING
    return f"{run.step:,}/{number(run.steps, ',d')}"


def started(run: Run) -> str:
    """Format when run.json was written, in UTC: `2026-11-16 09:49`."""
    return str(run.stamp.get("written", MISSING))[:16].replace("T", " ")


def clip(text: str, length: int) -> str:
    return text if len(text) <= length else f"…{text[1 - length :]}"
