"""Compare runs with the paper: losses, accuracy, the exponent p, votes on ARC, cost, settings. No torch.

By default only runs of the paper's kind are compared: its sweeps at any scale, its two shapes on GPT-2
tokens, votes on ARC. `deeploop report --paper` compares any run.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

from deeploop.paper import published
from deeploop.paper.published import ARC_TASKS, ARC_VIEWS, ROUNDS, TASKS, VOTES
from deeploop.report.groups import Cell, Histories, Setup, additions, reasoner_method, setting, setups
from deeploop.report.means import speed
from deeploop.report.page import Part, Section
from deeploop.report.results import read_evaluations
from deeploop.report.runs import Run, natural
from deeploop.report.tables import HERE, MISSING, Table, number
from deeploop.rules import DEEPLOOP, PRENORM

PAPER = "paper"
SWEEPS = ("table1", "downstream", "p-sweep", "hrm-arc")
OURS = (PRENORM, DEEPLOOP)
"""The paper's two methods."""


def sections(runs: Sequence[Run], histories: Histories, *, asked: bool) -> list[Section]:
    """Make the sections that compare with the paper; with `asked`, for every set-up."""
    groups = [setup for setup in setups(runs) if asked or is_of_the_paper(setup)]
    found = [
        Section(
            "Beside the paper: validation loss",
            [
                loss_table(setup, histories)
                for setup in groups
                if not (p_sweeps(setup) and len(setup.rounds) == 1)
            ],
        ),
        Section(
            "Beside the paper: the exponent p",
            [p_sweep_table(own, histories) for own in groups if p_sweeps(own)],
        ),
        Section("Beside the paper: accuracy", [table for own in groups if (table := accuracy_table(own))]),
        Section("Beside the paper: ARC-AGI-1", [table] if (table := arc_table(runs)) else []),
        Section("Beside the paper: cost", [table] if (table := cost_table(groups)) else []),
        Section("Beside the paper: settings", settings(groups, runs)),
    ]
    return [section for section in found if section.parts]


def is_of_the_paper(setup: Setup) -> bool:
    """Return True for the paper's sweeps, its two shapes on its tokens, and a sweep over p."""
    own = setup.runs[0].fields
    shapes = [(one["model.blocks"], one["model.width"]) for one in published.SETUP.values()]
    of_its_shape = (own["model.blocks"], own["model.width"]) in shapes and setup.unit == "GPT-2 token"
    return of_its_shape or any(run.sweep in SWEEPS for run in setup.runs) or bool(p_sweeps(setup))


def size(setup: Setup) -> str:
    """Return the paper's size to compare with: from the sweep's label, else by width and blocks."""
    for run in setup.runs:
        if run.axes.get("size") in published.SETUP:
            return str(run.axes["size"])
    own = setup.runs[0].fields
    return "medium" if (own["model.blocks"], own["model.width"]) == (24, 1024) else "small"


def per_token(setup: Setup) -> bool:
    """Return True if the losses are per GPT-2 token, as in the paper."""
    return setup.unit == "GPT-2 token"


# ── Table 1: validation loss against R ──────────────────────────────────────────────────────────────────
def loss_table(setup: Setup, histories: Histories) -> Table:
    """Make a table of our losses, Δ against pre-norm and, if they are per token, the paper's rows of one
    size.
    """
    rounds = sorted({*(ROUNDS if per_token(setup) else ()), *setup.rounds})
    rows = [
        [HERE, label, *(cells[R].text(histories.loss) if R in cells else MISSING for R in rounds)]
        for label, cells in setup.rows.items()
    ]
    rows += [[HERE, f"Δ {label} − pre-norm", *texts] for label, texts in our_deltas(setup, histories, rounds)]
    title = f"Validation loss, nats per {setup.unit}: {setup.title}"
    note = (
        "Mean ± standard deviation over the runs that trained, one seed each unless a cell says otherwise; "
        "runs that end at the unigram floor are counted apart. – : no run."
    )
    if per_token(setup):
        rows += paper_loss_rows(size(setup), rounds)
        title += f"; and the paper's GPT-2 {size(setup)} (Table 1)"
        note += (
            " Losses on other data, or after other numbers of tokens, compare only within themselves: "
            "read the Δ rows."
        )
    return Table(
        f"loss-{setup.letter.lower()}", title, ["", "method", *(f"R={R}" for R in rounds)], rows, note
    )


def paper_loss_rows(size: str, rounds: Sequence[int]) -> list[list[str]]:
    rows = {
        name: [published.LOSS.get((size, block, R)) for R in rounds]
        for block, name in published.METHODS.items()
    }
    rows["Δ DeepLoop − baseline"] = [published.LOSS_DELTA.get((size, R)) for R in rounds]
    return [[PAPER, name, *map(printed, values)] for name, values in rows.items()]


def printed(value: published.Value | None) -> str:
    return value.printed if value else MISSING


def our_deltas(setup: Setup, histories: Histories, rounds: Sequence[int]) -> list[tuple[str, list[str]]]:
    """Return method − pre-norm where both have a mean and the same additions, such as the unigram bias.

    Return nothing if pre-norm has several rows to choose from.
    """
    firsts = {label: first(cells) for label, cells in setup.rows.items()}
    plain = [label for label, run in firsts.items() if run.rule == PRENORM]

    def delta(one: Cell | None, other: Cell | None) -> str:
        found = [cell.losses(histories) if cell else [] for cell in (one, other)]
        return f"{fmean(found[0]) - fmean(found[1]):+.4f}" if all(found) else MISSING

    found = []
    for label, cells in setup.rows.items():
        bases = [setup.rows[base] for base in plain if additions(firsts[base]) == additions(firsts[label])]
        if len(bases) == 1 and label not in plain:
            found.append((label, [delta(cells.get(R), bases[0].get(R)) for R in rounds]))
    return found


def first(cells: Mapping[int, Cell]) -> Run:
    return next(iter(cells.values())).first


def papers_name(run: Run) -> str:
    """Return the paper's name of a run's method; empty if it has none, as with a unigram bias or Muon."""
    return run.rule.name if run.rule in OURS and not additions(run) else ""


# ── Tables 2 and 4: downstream ──────────────────────────────────────────────────────────────────────────
Scores = dict[tuple[int, str], float]  # (shots, task) → accuracy in %


def scores(run: Run) -> Scores:
    """Return a run's scores at the rounds it was trained with; the newest evaluation wins."""
    found: Scores = {}
    for record in read_evaluations(run.files):
        for row in record["results"]:
            if row.get("rounds") == record.get("trained_rounds") and "acc" in row:
                found[row["shots"], row["task"]] = 100 * row["acc"]
    return found


def accuracy_table(setup: Setup) -> Table | None:
    """Make a table of our accuracies, each followed by the paper's row in Table 2 or 4; None if no run was
    scored.
    """
    rows: list[list[str]] = []
    for label, cells in setup.rows.items():
        for R, cell in cells.items():
            ours = [found for run in cell.runs if (found := scores(run))]
            for shots in (0, 1) if ours else ():
                head = [label, str(R), str(shots)]
                rows.append([HERE, *head, *accuracy_cells(ours, shots)])
                if any(paper := paper_scores(setup, shots, papers_name(cell.first), R)):
                    rows.append([PAPER, *head, *map(printed, paper)])
    if not rows:
        return None
    return Table(
        f"accuracy-{setup.letter.lower()}",
        f"Accuracy, %: {setup.title}; and the paper's GPT-2 {size(setup)} (Tables 2, 4)",
        ["", "method", "R", "shots", *TASKS.values(), "Avg"],
        rows,
        "Mean over runs. Avg is the plain mean of the eight tasks, and missing where one of them is.",
    )


def paper_scores(setup: Setup, shots: int, name: str, R: int) -> list[published.Value | None]:
    return [published.ACCURACY.get((size(setup), shots, name, R, task)) for task in (*TASKS, "average")]


def accuracy_cells(ours: Sequence[Scores], shots: int) -> list[str]:
    return [number(accuracy(ours, shots, task), ".2f") for task in (*TASKS, "average")]


def accuracy(ours: Sequence[Scores], shots: int, task: str) -> float | None:
    """Return the mean over the runs that have the task; `average` is over all tasks, or None."""
    if task == "average":
        means = [accuracy(ours, shots, name) for name in TASKS]
        known = [mean for mean in means if mean is not None]
        return fmean(known) if len(known) == len(TASKS) else None
    found = [own[shots, task] for own in ours if (shots, task) in own]
    return fmean(found) if found else None


# ── Appendix C: the p-sweep ─────────────────────────────────────────────────────────────────────────────
def p_sweeps(setup: Setup) -> dict[str, list[Run]]:
    """Map R, ramp and additions to runs of the paper's block over two exponents or more; some must have
    three.

    Those without additions come first, then fewer rounds and gentler ramps.
    """
    found: dict[tuple[str, int, float], list[Run]] = {}
    for run in (run for run in setup.runs if run.rule.is_paper):
        rise = run.fields["optim.peak_lr"] / max(1, run.fields["optim.warmup_steps"])
        found.setdefault((additions(run), run.fields["model.rounds"], float(f"{rise:.1e}")), []).append(run)
    counts = {key: len({run.rule.p for run in runs}) for key, runs in found.items()}
    if max(counts.values(), default=0) < 3:
        return {}
    return {
        f"R={R}, {rise:.1e} per step{added}": found[added, R, rise]
        for added, R, rise in sorted(found)
        if counts[added, R, rise] > 1
    }


@dataclass(frozen=True)
class Escapes:
    """The number of seeds that leave the unigram floor."""

    seeds: int
    """Seeds whose outcome is known: their run finished, or had escaped before."""
    below_floor: int
    """By the paper's rule (Appendix C): any validation below the floor."""
    escaped: int
    """By the verdict in the metrics: a nearly collapsed model can be slightly below the floor."""
    loss: float | None
    """Mean over the seeds that escaped, of the last run of each."""
    cut_off: int
    """Seeds that were cut off before they escaped."""

    @property
    def cells(self) -> list[str]:
        low, high = wilson(self.escaped, self.seeds)
        shares = f"{self.below_floor}/{self.seeds}", f"{self.escaped}/{self.seeds}"
        return [*shares, f"{low:.2f} to {high:.2f}", number(self.loss, ".4f"), str(self.cut_off or MISSING)]


def count_escapes(runs: Sequence[Run], histories: Histories) -> Escapes:
    """Count over seeds; a seed that was run twice counts once, and escapes if one of its runs does."""
    seeds: dict[Any, list[tuple[Run, bool, bool]]] = {}
    for run in runs:
        after = [one for one in histories[run].validations if one["step"] > 0 and one.get("floor")]
        below = any(one["loss"] < one["floor"] for one in after)
        escaped = any(one.get("verdict") == "escaped" for one in after)
        seeds.setdefault(run.seed, []).append((run, below, escaped))
    known = [own for own in seeds.values() if any(run.ended or escaped for run, _, escaped in own)]
    last = [histories.loss(run) for *_, (run, _, escaped) in known if escaped]
    losses = [loss for loss in last if loss is not None]
    return Escapes(
        len(known),
        sum(any(below for _, below, _ in own) for own in known),
        sum(any(escaped for *_, escaped in own) for own in known),
        fmean(losses) if losses else None,
        len(seeds) - len(known),
    )


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a share at 95%, within [0, 1]."""
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    share, weight = successes / trials, z * z / trials
    centre = share + weight / 2
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(0.0, (centre - half) / (1 + weight)), min(1.0, (centre + half) / (1 + weight))


def p_sweep_table(setup: Setup, histories: Histories) -> Table:
    rows = []
    for ramp, runs in p_sweeps(setup).items():
        is_theirs = not additions(runs[0])
        for p in sorted({run.rule.p for run in runs} | ({*published.ESCAPES} if is_theirs else set())):
            own = [run for run in runs if run.rule.p == p]
            cells = count_escapes(own, histories).cells if own else [MISSING] * 5
            paper = published.ESCAPES.get(p) if is_theirs else None
            escaped = f"{paper.printed}/{published.SWEEP_SEEDS}" if paper else MISSING
            loss = printed(published.SWEEP_LOSS.get(p) if is_theirs else None)
            rows.append([ramp, f"{p:g}", *cells, escaped, loss])
    header = ["sweep", "p", "below floor", "escaped", "escaped, 95%", "mean loss", "cut off",
              "paper: escaped", "paper: loss"]  # fmt: skip
    return Table(
        f"p-sweep-{setup.letter.lower()}",
        f"Escapes from the unigram floor: {setup.title}; and the paper's p-sweep (Appendix C)",
        header,
        rows,
        "below floor: the paper's rule, any validation below the floor. escaped: a validation more than 0.1 "
        "nats below it with token similarity under 0.95. 95%: Wilson intervals. mean loss: of the seeds that "
        "escaped. cut off: before that. A seed that was run twice is one, and escapes if one of its runs "
        "does.",
    )


# ── Table 3 ─────────────────────────────────────────────────────────────────────────────────────────────
def arc_table(runs: Sequence[Run]) -> Table | None:
    """Make a table of our votes on ARC and the paper's; None if no run was evaluated on ARC."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for record in read_evaluations(run.files):
            if record.get("kind") == "arc" and not record.get("test_time"):  # the paper has none
                ladder = [100 * record["ladder"][str(K)] for K in VOTES]
                found.setdefault(arc_label(run, record), {})[run.name] = ladder
    if not found:
        return None
    rows = [
        [HERE, label, *(f"{fmean(own):.2f}" for own in zip(*found[label].values(), strict=True))]
        for label in sorted(found)
    ]
    names = {"hrm": "Vanilla HRM", "hrm-deeploop": "HRM DeepLoop p=0.5", "delta": "Δ"}
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


def arc_label(run: Run, record: dict[str, Any]) -> str:
    """Name model and rule, and what differs from the paper's evaluation."""
    parts = [reasoner_method(run)]
    if record["tasks"] != ARC_TASKS:
        parts.append(f"{record['tasks']} tasks")
    if (views := record["most_views"]) < ARC_VIEWS:
        parts.append(f"{views} view{'s' * (views > 1)}")
    return ", ".join([*parts, *(["halting"] if record["halt"] else [])])


# ── Appendix D: cost ────────────────────────────────────────────────────────────────────────────────────
def cost_table(groups: Sequence[Setup]) -> Table | None:
    """Make a table of time per token relative to R = 1, and hours, for the paper's two rules: ours and the
    paper's.
    """
    rows = []
    for setup in groups:
        for label, cells in setup.rows.items():
            name = papers_name(first(cells))
            for R, cell in cells.items() if first(cells).rule in OURS else ():
                own, one = speed(cell), speed(cells[1]) if 1 in cells else None
                hours = [run.gpu_hours for run in cell.runs if run.gpu_hours is not None]
                paper, at_one = (published.gpu_hours(size(setup), name, rounds) for rounds in (R, 1))
                ours = [_ratio(one, own), number(sum(hours) if hours else None, ".3f")]
                rows.append([setup.letter, label, str(R), *ours, _ratio(paper, at_one), number(paper, ".0f")])
    header = ["set-up", "method", "R", "× R=1", "GPU-hours", "paper: × R=1", "paper: GPU-hours"]
    note = (
        "× R=1: time per token over that of the same row at R = 1, of runs that had their devices to "
        "themselves. Hours: training steps only, summed over the cell's runs, also unfinished ones; runs "
        "that share a GPU each count all their time. The paper's hours (Appendix D) are for one of its own "
        "cells, on H200s."
    )
    return Table("cost", "Cost of each cell", header, rows, note) if rows else None


def _ratio(one: float | None, other: float | None) -> str:
    return number(one / other if one and other else None, ".2f")


# ── Settings ────────────────────────────────────────────────────────────────────────────────────────────
def settings(groups: Sequence[Setup], runs: Sequence[Run]) -> list[Part]:
    """List how set-ups and evaluations differ from the paper's; evaluations record it themselves."""
    found = Counter(text for run in runs for own in read_evaluations(run.files) for text in own["deviations"])
    notes = "; ".join(f"{text} ({count} evaluations)" for text, count in found.items())
    text = [f"Evaluations deviate from the paper's: {notes}."] if notes else []
    return [*([differences_table(groups)] if groups else []), *text]


def differences_table(groups: Sequence[Setup]) -> Table:
    """Make a table of every setting of the paper in which some run differs, with a column for each set-up."""
    sizes = [one for one in published.SIZES if any(size(setup) == one for setup in groups)]
    paper = [published.SETUP[one] for one in sizes]
    ours = [setup.runs[0].fields for setup in groups]
    rows = [
        ["set-up", *(f"GPT-2 {one}" for one in sizes), *(setup.label for setup in groups)],
        ["tokens", *(f"{tokens(fields):,}" for fields in (*paper, *ours))],
        ["devices", *(f"{published.GPUS[one]} × H200 141 GB" for one in sizes), *map(devices, groups)],
    ]
    for name in published.SETUP["small"]:
        own = [values(setup, name) for setup in groups]
        if any(one != setting(published.SETUP[size(s)][name]) for one, s in zip(own, groups, strict=True)):
            rows.append([name, *(setting(fields[name]) for fields in paper), *own])
    return Table(
        "differences",
        "Where these runs differ from the paper's set-up",
        ["setting", *(f"paper, {one}" for one in sizes), *(setup.letter for setup in groups)],
        rows,
        "The paper states no learning rate, warm-up or optimizer settings: those are of the public code of "
        "similar models. The rule, rounds and seed are what is compared.",
    )


def values(setup: Setup, name: str) -> str:
    """Return a field's values among the runs of a set-up."""
    return ", ".join(sorted({setting(run.fields.get(name, MISSING)) for run in setup.runs}, key=natural))


def tokens(fields: Mapping[str, Any]) -> int:
    return int(fields["optim.steps"] * fields["optim.batch"] * fields["model.context"])


def devices(setup: Setup) -> str:
    stamps = [run.stamp for run in setup.runs]
    known = {f"{own['ranks']} × {own['device']}" for own in stamps if {"ranks", "device"} <= own.keys()}
    return ", ".join(sorted(known)) or "not recorded"
