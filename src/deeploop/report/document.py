"""`deeploop report`: runs beside the paper's numbers, as one HTML page, Markdown and CSV. No torch.

OUT/report.html     everything in one file: works without a network, light and dark, wide and narrow
OUT/report.md       the same, with figures/*.png
OUT/tables/*.csv    every table, cell for cell
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

import deeploop
from deeploop.files import own_folder, write_text
from deeploop.report import beyond, figures, ledger, page, plots, tables
from deeploop.report.boards import boards_table
from deeploop.report.depths import depths_table
from deeploop.report.groups import Histories, Setup, letter, setups
from deeploop.report.runs import Run
from deeploop.report.tables import Table

OWN = {"report.html", "report.md", "tables", "figures"}
# What begins a formula, also in full width; a signed number is none.
FORMULA = re.compile(r"[=@\t\r\n＝＠＋－]|[+-](?![\d.,]+(e[+-]?\d+)?[%*]?$)")


@dataclass(frozen=True)
class Picture:
    """A figure with its name and what it shows."""

    name: str
    figure: Figure
    caption: str


Part = str | Table | Picture


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    parts: Sequence[Part]


def count_of(runs: Sequence[Run]) -> str:
    return f"{len(runs)} run{'s' * (len(runs) != 1)}"


def count_states(runs: Iterable[Run]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in runs:
        counts[one.state] = counts.get(one.state, 0) + 1
    return counts


# ── What is in it ───────────────────────────────────────────────────────────────────────────────────────
def make_sections(runs: Sequence[Run], histories: Histories) -> list[Section]:
    trained = [run for run in runs if run.state != "untrained"]
    groups = setups(trained)
    head = [summary(runs, groups), *damage(runs, histories)]
    sections = [
        Section("Runs", [*head, ledger.runs_table(runs, histories)]),
        Section("Loss curves", curve_pictures(groups, histories)),
        loss_section(groups, histories),
        table_section("Loss at other depths", depths_table(trained)),
        p_sweep_section(groups),
        accuracy_section(groups),
        beyond_section(trained, histories),
        table_section("Reasoners on ARC-AGI-1", tables.arc_table(trained)),
        table_section("Reasoners on Sudoku and mazes", boards_table(trained)),
        compute_section(groups, trained),
        kappa_section([one for setup in groups for one in setup.runs], histories),
        Section("Set-ups", of_setups(ledger.setups_table, groups)),
        Section(
            "What differs from the paper",
            [*of_setups(ledger.differences_table, groups), *evaluation_notes(runs)],
        ),
        Section("Commands", [ledger.commands_table(runs, histories)]),
    ]
    return [section for section in sections if section.parts]


def of_setups(make: Callable[[Sequence[Setup]], Table], groups: Sequence[Setup]) -> list[Table]:
    """A table over the set-ups, which reasoners have none of."""
    return [make(groups)] if groups else []


def summary(runs: Sequence[Run], groups: Sequence[Setup]) -> str:
    states = ", ".join(f"{count} {state}" for state, count in sorted(count_states(runs).items()))
    hours = sum(one.gpu_hours or 0 for one in runs)
    among = f" in {len(groups)} set-up{'s' * (len(groups) > 1)}" if groups else ""
    most = "at most " * any(one.shared for one in runs)  # each of them counts all its time
    cost = f"{most}{hours:.2f} GPU-hours of training" if hours else "no GPU-hours recorded"
    return (
        f"{count_of(runs)}{among}: {states}; {cost}. Made from their files by deeploop "
        f"{deeploop.__version__}. Every number of ours has a run behind it; the last section has its "
        f"command. {page.MISSING} means that there is none."
    )


def damage(runs: Sequence[Run], histories: Histories) -> list[str]:
    """Which runs have metrics that are lost to every number here; an unreadable run gives none anyway."""
    counts = {one.name: histories[one].damaged for one in runs if one.state != "unreadable"}
    found = ", ".join(f"{name} ({count})" for name, count in counts.items() if count)
    return [f"Lines of metrics.jsonl that can't be read, and are left out: {found}."] if found else []


def evaluation_notes(runs: Sequence[Run]) -> list[str]:
    notes = tables.evaluation_notes(runs)
    return ["Evaluations deviate from the paper's: " + "; ".join(notes) + "."] if notes else []


def named(name: str, groups: Sequence[Setup]) -> list[tuple[str, Setup]]:
    """A name for each set-up's table, with its letter."""
    return [(f"{name}-{setup.letter.lower()}", setup) for setup in groups]


def loss_section(groups: Sequence[Setup], histories: Histories) -> Section:
    parts: list[Part] = []
    chosen = [setup for setup in groups if not (setup.is_p_sweep and len(setup.rounds) == 1)]
    for name, setup in named("loss", chosen):
        parts.append(tables.loss_table(setup, histories, name))
        if figure := figures.loss_against_rounds(setup, histories):
            parts.append(
                Picture(f"{name}-against-rounds", figure, f"Validation loss against R: {setup.title}.")
            )
        if any(len(cell.runs) > 1 for cells in setup.rows.values() for cell in cells.values()):
            parts.append(tables.seeds_table(setup, histories, name.replace("loss", "seeds")))
    return Section("Validation loss", parts)


def p_sweep_section(groups: Sequence[Setup]) -> Section:
    parts: list[Part] = []
    chosen = [setup for setup in groups if tables.p_sweeps(setup)]
    for name, setup in named("p-sweep", chosen):
        sweeps = tables.p_sweeps(setup)
        parts.append(tables.p_sweep_table(sweeps, setup.title, name))
        caption = f"Exponent p against loss and escapes: {setup.title}."
        parts.append(Picture(name, figures.p_sweep_figure(sweeps), caption))
    return Section("The exponent p", parts)


def accuracy_section(groups: Sequence[Setup]) -> Section:
    parts: list[Part] = []
    for name, setup in named("accuracy", groups):
        if (table := tables.accuracy_table(setup, name)) is None:
            continue
        parts.append(table)
        for shots in (0, 1):
            if figure := figures.accuracy_figure(setup, shots):
                caption = (
                    f"{shots}-shot accuracy against R; dashed: the paper's GPT-2 {setup.size}. {setup.title}."
                )
                parts.append(Picture(f"{name}-{shots}-shot", figure, caption))
    return Section("Downstream accuracy", parts)


def beyond_section(runs: Sequence[Run], histories: Histories) -> Section:
    parts: list[Part] = []
    for index, (task, own) in enumerate(beyond.contenders(runs).items()):
        name = f"beyond-{letter(index).lower()}"
        parts.append(beyond.beyond_table(task, own, histories, name))
        caption = f"A loop that learned one step stays at 1 as the steps grow: {task}."
        parts.append(Picture(name, beyond.beyond_figure(own), caption))
    return Section("Deeper than trained", parts)


def table_section(title: str, table: Table | None) -> Section:
    return Section(title, [] if table is None else [table])


def compute_section(groups: Sequence[Setup], runs: Sequence[Run]) -> Section:
    shared = sum(one.shared and one.tokens_per_s is not None for one in runs)
    told = f"{shared} of {count_of(runs)} shared their device (sweep --jobs): their tokens/s are left out."
    parts: list[Part] = [*([told] if shared else []), ledger.compute_table(groups, runs)]
    if figure := figures.cost_against_rounds(groups):
        parts.append(Picture("cost-against-rounds", figure, "Time per token against R, by the rates above."))
    return Section("Compute", parts)


def curve_pictures(groups: Sequence[Setup], histories: Histories) -> list[Part]:
    parts: list[Part] = []
    for name, setup in named("curves", groups):
        if not any(len(histories[one].curve) > 1 for one in setup.runs):
            continue
        sweeps = tables.p_sweeps(setup)
        is_all = sum(map(len, sweeps.values())) == len(setup.runs)
        draw = partial(figures.exponent_curves, sweeps) if is_all else partial(figures.loss_curves, setup)
        parts.append(
            Picture(
                name,
                draw(histories),
                f"Training loss (lines, means of 5) and validation loss (points): {setup.title}.",
            )
        )
    return parts


def kappa_section(runs: Sequence[Run], histories: Histories) -> Section:
    table, figure = ledger.kappa_table(runs, histories), figures.kappa_figure(runs, histories)
    parts: list[Part] = []
    if table is not None and figure is not None:
        parts = [table, Picture("kappa", figure, "κ_R, one line and one dot per run.")]
    return Section("Visit alignment κ_R", parts)


# ── How it is written ───────────────────────────────────────────────────────────────────────────────────
def check_out(out: Path) -> None:
    """Raises for a folder that holds something, and no report."""
    held = {one.name for one in out.iterdir()} if out.is_dir() else set()
    if not held <= OWN and "report.html" not in held:
        raise ValueError(f"out={out}: holds other things than a report; name a new folder")


def write(out: Path, title: str, sections: Sequence[Section]) -> None:
    old = [*out.glob("tables/*.csv"), *out.glob("figures/*.png")] if (out / "report.html").exists() else []
    for path in old:  # a table of an earlier report must not pass for one of this
        path.unlink()
    for name in ("tables", "figures"):
        own_folder(out / name)
    for part in (part for section in sections for part in section.parts):
        if isinstance(part, Table):
            rows = io.StringIO(newline="")
            csv.writer(rows).writerows([inert(cell) for cell in row] for row in (part.header, *part.rows))
            write_text(out / "tables" / f"{part.name}.csv", rows.getvalue())
        elif isinstance(part, Picture):
            plots.save_png(part.figure, out / "figures" / f"{part.name}.png")
    write_text(out / "report.md", as_markdown(title, sections))
    write_text(out / "report.html", as_html(title, sections))


def inert(cell: str) -> str:
    """The cell, with an apostrophe where a spreadsheet would run it: a run's name may be a stranger's."""
    return f"'{cell}" if FORMULA.match(cell) else cell


def as_html(title: str, sections: Sequence[Section]) -> str:
    parts = [page.contents(section.title for section in sections)]
    for section in sections:
        parts.append(page.heading(section.title))
        parts += [html_part(part) for part in section.parts]
    return page.page(title, parts)


def html_part(part: Part) -> str:
    if isinstance(part, str):
        return page.paragraph(part)
    if isinstance(part, Picture):
        return page.figure(plots.inline_svg(part.figure), part.caption)
    text = page.subheading(part.title) + page.table(part.header, part.rows, name=part.name)
    return text + (page.note(part.note) if part.note else "")


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {page.markdown_text(title)}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [markdown_part(part) for part in section.parts]
    return "\n\n".join(parts) + "\n"


def markdown_part(part: Part) -> str:
    if isinstance(part, str):
        return page.markdown_text(part)
    if isinstance(part, Picture):
        return f"![{page.markdown_text(part.caption)}](figures/{part.name}.png)"
    pieces = [f"**{page.markdown_text(part.title)}** ([CSV](tables/{part.name}.csv))"]
    pieces.append(page.markdown_table(part.header, part.rows))
    return "\n\n".join([*pieces, page.markdown_text(part.note)] if part.note else pieces)
