"""`deeploop runs`: run folders one below the other, with the settings that tell them apart. No torch."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from deeploop.report.endings import outcome
from deeploop.report.page import MISSING, text_table
from deeploop.report.runs import Run, applies, differing
from deeploop.terminal import printable

# On a narrow terminal, what is the same in all runs is said once, below the table.
SHARED = ("seed", "step", "state", "floor", "verdict")
# What it does without, the first first. Then long names are cut, then settings go, from the last, and the
# verdict, state and step.
EXPENDABLE = ("started", "floor", "tokens/s", "GPU-h", "seed")
# The settings that a person looks for first, in this order; others follow in that of the config.
FOREMOST = (
    *("model.rule", "model.rounds", "model.blocks", "model.width", "optim.peak_lr"),
    *("optim.warmup_steps", "optim.steps", "data.path"),
)
NARROW_NAME = 24
UNKNOWN = "not started, or unreadable"
MOST_NAMED = 8  # of the columns that were left out
KINDS = {
    "language": "language models",
    "chat": "chat models",
    "iterate": "iterated tasks",
    "hrm": "reasoners",
    "trm": "reasoners",
    "custom": "tasks of your own",
}


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


def tables(runs: Sequence[Run], width: int | None) -> str:
    """A table for each kind of run, with the settings that differ within it; one alone has no heading."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(kind(run), []).append(run)
    if len(groups.keys() - {UNKNOWN}) < 2:
        return table(runs, differing(runs), width)
    return "\n\n".join(f"{name}\n{table(own, differing(own), width)}" for name, own in groups.items())


def kind(run: Run) -> str:
    """The kind of model and task; of a run that was not started, or can't be read, it is not known."""
    task = run.stamp.get("task", "language")
    return KINDS.get(task, printable(f"task {task:.40}")) if run.stamp else UNKNOWN


def table(runs: Sequence[Run], settings: Sequence[str], width: int | None) -> str:
    """All columns that fit; what is the same in all runs, or was left out, is named below."""
    settings = sorted(settings, key=lambda name: (*FOREMOST, name).index(name))
    columns = all_columns(runs, settings)
    if width is None or total_width(columns) <= width:
        return as_text(columns)
    alike = [name for name in SHARED if name in columns and len(runs) > 1 and len({*columns[name]}) == 1]
    said = [f"{name} {columns.pop(name)[0]}" for name in alike]
    notes = [f"the same in all: {', '.join(said)}"] if said else []
    dropped: list[str] = []
    told_apart = [short(name, settings) for name in reversed(settings)]
    for heading in (*EXPENDABLE, "run", *told_apart, "verdict", "state", "step"):
        if total_width(columns) <= width:
            break
        if heading == "run":
            columns["run"] = [clip(name, NARROW_NAME) for name in columns["run"]]
        elif columns.pop(heading, None) is not None:
            dropped.append(heading)
    if dropped:
        rest = len(dropped) - MOST_NAMED
        more = f" and {rest} more" if rest > 0 else ""
        notes.append(f"not shown: {', '.join(dropped[:MOST_NAMED])}{more} (a wider terminal, or --json)")
    return "\n".join([as_text(columns), *(textwrap.fill(note, width) for note in notes)])


def as_text(columns: dict[str, list[str]]) -> str:
    return text_table([*columns], list(zip(*columns.values(), strict=True)))


def all_columns(runs: Sequence[Run], settings: Sequence[str]) -> dict[str, list[str]]:
    """Heading → a cell for each run; what no run has, such as GPU-hours on CPUs, is no column."""
    cells: dict[str, Callable[[Run], str]] = {"run": lambda run: printable(run.name)}
    for name in settings:
        cells[short(name, settings)] = lambda run, name=name: (  # type: ignore[misc]
            setting(run.fields.get(name, MISSING)) if applies(run, name) else MISSING
        )
    cells |= {
        "seed": lambda run: number(run.seed, "d"),
        "step": lambda run: steps_done(run),
        "state": lambda run: run.state,
        **loss_columns(runs, lambda run: run.validation.get("loss")),
        "floor": lambda run: number(run.validation.get("floor"), ".3f"),
        "verdict": lambda run: outcome(run.validation) or MISSING,
        "tokens/s": lambda run: number(run.tokens_per_s, ",.0f"),
        "GPU-h": lambda run: number(run.gpu_hours, ".3f"),
        "started": started,
    }
    if "loss" not in cells:
        del cells["floor"]  # it is in nats per byte or per token too
    columns = {heading: [printable(cell(run)) for run in runs] for heading, cell in cells.items()}
    empty = {heading for heading in EXPENDABLE if set(columns.get(heading, ())) == {MISSING}}
    return {heading: column for heading, column in columns.items() if heading not in empty}


def steps_done(run: Run) -> str:
    """`250/1,000`; a retrofit's start has no steps of its own."""
    if not run.fields or run.state == "untrained":
        return MISSING
    return f"{run.step:,}/{number(run.steps, ',d')}"


def loss_columns(runs: Sequence[Run], loss: Callable[[Run], float | None]) -> dict[str, Callable[[Run], str]]:
    """Heading → cells of `loss`; losses per byte and per token have a column each, and bits per byte one."""
    units = sorted({run.unit for run in runs if loss(run) is not None})
    if len(units) < 2:
        return {"loss": lambda run: number(loss(run), ".4f")}

    def of(unit: str) -> Callable[[Run], str]:
        return lambda run: number(loss(run) if run.unit == unit else None, ".4f")

    def bits(run: Run) -> str:
        nats, factor = loss(run), run.bits_per_nat
        return number(None if nats is None or factor is None else nats * factor, ".3f")

    return {**{f"nats/{unit}": of(unit) for unit in units}, "bits/byte": bits}


def short(name: str, among: Sequence[str]) -> str:
    """`model.p` → `p`, unless another field ends alike."""
    word = name.rpartition(".")[2]
    return word if [other.rpartition(".")[2] for other in among].count(word) == 1 else name


def setting(value: Any) -> str:
    """A value as in the command: of a list the words."""
    if isinstance(value, list | tuple):
        return " ".join(map(setting, value)) or MISSING
    return f"{value:g}" if isinstance(value, float) else str(value)


def started(run: Run) -> str:
    """`2026-11-16 09:49`, UTC: when run.json was written."""
    return str(run.stamp.get("written", MISSING))[:16].replace("T", " ")


def number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def clip(text: str, length: int) -> str:
    return text if len(text) <= length else f"…{text[1 - length :]}"


def total_width(columns: dict[str, list[str]]) -> int:
    return sum(max(map(len, [heading, *cells])) + 2 for heading, cells in columns.items()) - 2
