"""The tables of a report: the paper's numbers and ours in the same shape. No torch.

Every number of ours comes from a run's files; where there is no run, the cell says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from deeploop.paper import published
from deeploop.paper.published import ARC_TASKS, ARC_VIEWS, TASKS, VOTES
from deeploop.report.escapes import Count, Outcome, read_outcome, tally
from deeploop.report.evaluations import read_evaluations
from deeploop.report.groups import Histories, Setup, TableCell, columns, cure, repeats
from deeploop.report.listing import number
from deeploop.report.page import HERE, MISSING
from deeploop.report.runs import Run
from deeploop.rules import DEEPLOOP, PRENORM, parse

PAPER = "paper"
PAPER_ROWS = {PRENORM.title: PRENORM.name, DEEPLOOP.title: DEEPLOOP.name}
"""Our names of the paper's two methods, which have a row even where nobody ran them."""


@dataclass(frozen=True)
class Table:
    """A table of strings: the page, the Markdown and the CSV show the same."""

    name: str
    """File name of its CSV, and its id on the page."""
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


# ── Table 1: validation loss against R ──────────────────────────────────────────────────────────────────
def loss_table(setup: Setup, histories: Histories, name: str) -> Table:
    """Our rows, Δ against pre-norm, then the paper's rows of one size, if they are per token too."""
    rounds = columns(setup)
    rows = [
        [HERE, label, *(cells[R].text(histories) if R in cells else MISSING for R in rounds)]
        for label, cells in setup.rows.items()
    ]
    rows += [[HERE, f"Δ {label} − pre-norm", *texts] for label, texts in our_deltas(setup, histories, rounds)]
    title = f"Validation loss, nats per {setup.unit}: {setup.title}"
    note = (
        "Mean ± standard deviation over the runs that trained, one seed each unless a cell says otherwise; "
        "runs that end at the unigram floor are counted apart. – : no run."
    )
    if setup.is_beside_paper:
        rows += paper_loss_rows(setup.size, rounds)
        title += f"; and the paper's GPT-2 {setup.size} (Table 1)"
        note += (
            " Losses on other data, or after other numbers of tokens, compare only within themselves: "
            "read the Δ rows."
        )
    return Table(name, title, ["", "method", *(f"R={R}" for R in rounds)], rows, note)


def paper_loss_rows(size: str, rounds: Sequence[int]) -> list[list[str]]:
    rows = {
        name: [published.LOSS.get((size, block, R)) for R in rounds]
        for block, name in published.METHODS.items()
    }
    rows["Δ DeepLoop − baseline"] = [published.LOSS_DELTA.get((size, R)) for R in rounds]
    return [
        [PAPER, name, *(value.printed if value else MISSING for value in values)]
        for name, values in rows.items()
    ]


def our_deltas(setup: Setup, histories: Histories, rounds: Sequence[int]) -> list[tuple[str, list[str]]]:
    """Method − pre-norm where both have a mean; nothing where pre-norm has several rows to choose from."""
    bases = [label for label in setup.rows if label.partition(",")[0] == "pre-norm"]
    if len(bases) != 1:
        return []
    base = setup.rows[bases[0]]
    return [
        (label, [delta(cells.get(R), base.get(R), histories) for R in rounds])
        for label, cells in setup.rows.items()
        if label not in bases
    ]


def delta(cell: TableCell | None, base: TableCell | None, histories: Histories) -> str:
    means = [None if one is None else one.mean(histories) for one in (cell, base)]
    return MISSING if means[0] is None or means[1] is None else f"{means[0] - means[1]:+.4f}"


def seeds_table(setup: Setup, histories: Histories, name: str) -> Table:
    """Every cell of ours: its seeds, their spread, and the runs behind it."""
    rows = []
    for label, cells in setup.rows.items():
        for R, cell in cells.items():
            losses = cell.losses(histories)
            numbers = [
                number(fmean(losses) if losses else None, ".4f"),
                number(stdev(losses) if len(losses) > 1 else None, ".4f"),
                number(min(losses, default=None), ".4f"),
                number(max(losses, default=None), ".4f"),
            ]
            unfinished = sum(not run.ended for run in cell.runs)
            counts = [repeats(cell.runs) or len(cell.runs), len(losses), len(cell.collapsed), unfinished]
            names = " ".join(run.name for run in cell.runs)
            rows.append([label, str(R), *map(str, counts), *numbers, names])
    header = [
        "method",
        "R",
        "runs",
        "trained",
        "collapsed",
        "unfinished",
        "mean",
        "s.d.",
        "least",
        "most",
        "runs' names",
    ]
    return Table(name, f"Seeds and spread: {setup.title}", header, rows)


# ── Tables 2 and 4: downstream ──────────────────────────────────────────────────────────────────────────
def scores(run: Run) -> dict[tuple[int, str], float]:
    """(shots, task) → accuracy in %, at the rounds it was trained with; the newest evaluation wins."""
    found: dict[tuple[int, str], float] = {}
    for record in read_evaluations(run.files):
        for row in record["results"]:
            if row.get("rounds") == record.get("trained_rounds") and "acc" in row:
                found[row["shots"], row["task"]] = 100 * row["acc"]
    return found


def accuracy_table(setup: Setup, name: str) -> Table | None:
    """Our rows, and under each that of the paper's Table 2 or 4; None where no run was scored."""
    rows: list[list[str]] = []
    any_scored = False
    for shots in (0, 1):
        for label, cells in setup.rows.items():
            for R in sorted({*published.ROUNDS, *setup.rounds}):
                block = PAPER_ROWS.get(label.split(",")[0], "")
                ours = [scores(run) for run in cells[R].runs] if R in cells else []
                paper = [
                    published.ACCURACY.get((setup.size, shots, block, R, task))
                    for task in (*TASKS, "average")
                ]
                if any(paper) or any(ours):
                    rows.append([HERE, f"{shots}-shot", label, str(R), *accuracy_cells(ours, shots)])
                if any(paper):
                    rows.append(
                        [PAPER, f"{shots}-shot", label, str(R), *(v.printed if v else MISSING for v in paper)]
                    )
                any_scored |= any(ours)
    if not any_scored:
        return None
    return Table(
        name,
        f"Accuracy, %: {setup.title}; and the paper's GPT-2 {setup.size} (Tables 2, 4)",
        ["", "shots", "method", "R", *TASKS.values(), "Avg"],
        rows,
        "Mean over runs. Avg is the plain mean of the eight tasks, and missing where one of them is.",
    )


def accuracy_cells(ours: Sequence[dict[tuple[int, str], float]], shots: int) -> list[str]:
    return [number(accuracy(ours, shots, task), ".2f") for task in (*TASKS, "average")]


def accuracy(ours: Sequence[dict[tuple[int, str], float]], shots: int, task: str) -> float | None:
    """Mean over the runs that have the task; `average` is the mean of these, where none is missing."""
    if task == "average":
        means = [accuracy(ours, shots, name) for name in TASKS]
        known = [mean for mean in means if mean is not None]
        return fmean(known) if len(known) == len(TASKS) else None
    found = [own[shots, task] for own in ours if (shots, task) in own]
    return fmean(found) if found else None


def evaluation_notes(runs: Sequence[Run]) -> list[str]:
    """Where evaluations differ from the paper's, as they say themselves."""
    found: dict[str, int] = {}
    for run in runs:
        for record in read_evaluations(run.files):
            for text in record["deviations"]:
                found[text] = found.get(text, 0) + 1
    return [f"{text} ({count} evaluations)" for text, count in found.items()]


# ── Appendix C: the p-sweep ─────────────────────────────────────────────────────────────────────────────
def p_sweeps(setup: Setup) -> dict[str, list[Run]]:
    """R, ramp and cure → runs of the paper's block over two exponents or more; none unless some have three.

    The paper's recipe first and cures after it; fewer rounds before more, gentle ramps before steep ones.
    """
    found: dict[tuple[str, int, float], list[Run]] = {}
    for run in (run for run in setup.runs if run.rule.is_paper):
        rise = run.fields["optim.peak_lr"] / max(1, run.fields["optim.warmup_steps"])
        found.setdefault((cure(run), run.fields["model.rounds"], float(f"{rise:.1e}")), []).append(run)
    exponents = {key: len({run.rule.p for run in runs}) for key, runs in found.items()}
    if max(exponents.values(), default=0) < 3:
        return {}
    return {
        f"R={R}, {rise:.1e} per step{cured}": found[cured, R, rise]
        for cured, R, rise in sorted(found)
        if exponents[cured, R, rise] > 1
    }


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """What became of each run that was trained at all."""
    found = []
    for run in runs:
        axes = {"p": run.rule.p, "seed": run.seed}
        outcome = read_outcome(run.folder, axes, run.compare_at)
        if outcome is not None:
            found.append(outcome)
    return found


def p_sweep_table(sweeps: dict[str, list[Run]], label: str, name: str) -> Table:
    rows = []
    for ramp, runs in sweeps.items():
        counts = {count.axes["p"]: count for count in tally(outcomes(runs))}
        is_theirs = not cure(runs[0])
        for p in sorted({*counts, *(published.ESCAPES if is_theirs else ())}):
            paper, loss = published.ESCAPES.get(p), published.SWEEP_LOSS.get(p)
            theirs = [
                f"{paper.printed}/{published.SWEEP_SEEDS}" if paper and is_theirs else MISSING,
                loss.printed if loss and is_theirs else MISSING,
            ]
            rows.append([ramp, f"{p:g}", *count_cells(counts.get(p)), *theirs])
    header = [
        "sweep",
        "p",
        "below floor",
        "95%",
        "escaped",
        "95%",
        "mean loss",
        "cut off",
        "paper: escaped",
        "paper: loss",
    ]
    return Table(
        name,
        f"Escapes from the unigram floor: {label}; and the paper's p-sweep (Appendix C)",
        header,
        rows,
        "below floor: the paper's rule, any validation below the floor. escaped: a validation more than 0.1 "
        "nats below it with token similarity under 0.95. 95%: Wilson intervals. mean loss: of the seeds that "
        "escaped; * has training losses in it, for want of a validation. cut off: before that. A "
        "seed that was run twice is one, and escapes if one of its runs does.",
    )  # fmt: skip


def count_cells(count: Count | None) -> list[str]:
    if count is None:
        return [MISSING] * 6
    below, escaped = (
        "{:.2f} to {:.2f}".format(*b) for b in (count.below_floor_interval, count.escaped_interval)
    )
    loss = number(count.mean_loss, ".4f") + "*" * bool(count.surrogates)
    return [
        f"{count.below_floor}/{count.seeds}", below, f"{count.escaped}/{count.seeds}", escaped, loss,
        str(count.cut_off or MISSING),
    ]  # fmt: skip


# ── Table 3 ─────────────────────────────────────────────────────────────────────────────────────────────
ARC_ROWS = {("hrm", "postnorm"): "Vanilla HRM", ("hrm", "deeploop"): "HRM, DeepLoop p=1/2"}
"""Model and rule → the paper's two rows."""
Ladder = dict[int, float]  # K → tasks solved, %


def arc_table(runs: Sequence[Run]) -> Table | None:
    """The voting ladders of runs that were evaluated on ARC, and the paper's; None where no run was."""
    rows = []
    for label, ladders in arc_ladders(runs).items():
        means = [fmean(ladder[K] for ladder in ladders) for K in VOTES]
        rows.append([HERE, label, *(f"{mean:.2f}" for mean in means)])
    if not rows:
        return None
    names = dict(zip(("hrm", "hrm-deeploop", "delta"), (*ARC_ROWS.values(), "Δ"), strict=True))
    rows += [[PAPER, name, *(published.ARC[key, K].printed for K in VOTES)] for key, name in names.items()]
    return Table(
        "arc",
        "Voted accuracy on ARC-AGI-1, %; and the paper's (Table 3)",
        ["", "model", *(f"K={K}" for K in VOTES)],
        rows,
        "Tasks whose test inputs all have the right answer among the best K. Mean over the runs of a row, of "
        f"each its newest evaluation. {ARC_TASKS} tasks and about {ARC_VIEWS:,} views of each, unless a row "
        "says otherwise.",
    )


def arc_ladders(runs: Sequence[Run]) -> dict[str, list[Ladder]]:
    """Row label → the ladder of each run."""
    found: dict[str, dict[str, Ladder]] = {}
    for run in runs:
        for record in read_evaluations(run.files):
            if record.get("kind") == "arc" and not record.get("test_time"):  # the paper has none
                ladder = {K: 100 * record["ladder"][str(K)] for K in VOTES}
                found.setdefault(arc_label(run, record), {})[run.name] = ladder
    return {label: list(found[label].values()) for label in sorted(found)}


def reasoner_method(model: str, run: Run) -> str:
    """HRM or TRM, and the rule of its blocks."""
    rule, high = run.fields.get("model.rule", "postnorm"), run.fields.get("model.high_rule")
    if not (parse(rule).has_alpha or high):
        return f"Vanilla {model.upper()}"
    of_high = f", H {parse(high).title}" if high else ""
    graph = ", N by the graph" if run.fields.get("model.depth_from") == "graph" else ""
    name = ARC_ROWS.get((model, rule)) if not high else None
    return (name or f"{model.upper()} {parse(rule).title}{of_high}") + graph


def arc_label(run: Run, record: dict[str, Any]) -> str:
    """Model and rule, and where the evaluation is not the paper's."""
    parts = [reasoner_method(record["model"], run)]
    if record["tasks"] != ARC_TASKS:
        parts.append(f"{record['tasks']} tasks")
    if (views := record["most_views"]) < ARC_VIEWS:
        parts.append(f"{views} view{'s' * (views > 1)}")
    if record["halt"]:
        parts.append("halting")
    return ", ".join(parts)
