"""The tables of a report: the paper's numbers and ours in the same shape. No torch.

Every number of ours comes from a run's files; where there is no run, the cell says so.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from deeploop.experiments import published
from deeploop.experiments.escapes import Count, Outcome, read_outcome, tally
from deeploop.experiments.groups import Cell, Histories, Setup, columns, is_sandwich, method
from deeploop.experiments.listing import number, setting
from deeploop.experiments.page import HERE, MISSING
from deeploop.experiments.published import TASKS
from deeploop.experiments.runs import Run, natural, read_json

PAPER = "paper"
PAPER_ROWS = {"pre-norm": "prenorm", "DeepLoop p=0.5": "sandwich"}
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
    """The paper's rows of one size above, ours below, Δ against pre-norm under each."""
    rounds = columns(setup)
    rows = [paper_loss_row(setup.size, block, rounds) for block in published.METHODS]
    deltas = [published.LOSS_DELTA.get((setup.size, R)) for R in rounds]
    rows.append([PAPER, "Δ DeepLoop − baseline", *(value.printed if value else MISSING for value in deltas)])
    absent: dict[str, dict[int, Cell]] = {label: {} for label in PAPER_ROWS if label not in setup.methods}
    for label, cells in (absent | setup.rows).items():
        rows.append([HERE, label, *(cells[R].text(histories) if R in cells else MISSING for R in rounds)])
    rows += [[HERE, f"Δ {label} − pre-norm", *texts] for label, texts in our_deltas(setup, histories, rounds)]
    return Table(
        name,
        f"Validation loss, nats a token: the paper's GPT-2 {setup.size}, and here {setup.title}",
        ["", "method", *(f"R={R}" for R in rounds)],
        rows,
        "Mean ± standard deviation over the seeds that trained; runs that end at the unigram floor are "
        "counted apart. – : no run. Losses on other data, or after other numbers of tokens, compare only "
        "within themselves: read the Δ rows.",
    )


def paper_loss_row(size: str, block: str, rounds: Sequence[int]) -> list[str]:
    values = [published.LOSS.get((size, block, R)) for R in rounds]
    return [PAPER, published.METHODS[block], *(value.printed if value else MISSING for value in values)]


def our_deltas(setup: Setup, histories: Histories, rounds: Sequence[int]) -> list[tuple[str, list[str]]]:
    """Method − pre-norm where both have a mean; nothing where pre-norm has several rows to choose from."""
    base = [cells for label, cells in setup.rows.items() if label.startswith("pre-norm")]
    if len(base) != 1:
        return []
    found = []
    for label, cells in setup.rows.items():
        if not label.startswith("pre-norm"):
            texts = [delta(cells.get(R), base[0].get(R), histories) for R in rounds]
            found.append((label, texts))
    return found


def delta(cell: Cell | None, base: Cell | None, histories: Histories) -> str:
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
            counts = [len(cell.runs), len(losses), len(cell.collapsed), unfinished]
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
    for record in read_json(run.folder / "eval.json").get("evaluations", []):
        for row in record.get("results", []):
            if row.get("rounds") == record.get("trained_rounds") and "acc" in row:
                found[row["shots"], row["task"]] = 100 * row["acc"]
    return found


def accuracy_table(setup: Setup, name: str) -> Table | None:
    """Rows of the paper's Table 2 or 4, and under each ours; None where no run was scored."""
    rows: list[list[str]] = []
    any_scored = False
    for shots in (0, 1):
        for label, cells in setup.rows.items():
            for R in columns(setup):
                block = PAPER_ROWS.get(label.split(",")[0], "")
                ours = [scores(run) for run in cells[R].runs] if R in cells else []
                paper = [
                    published.ACCURACY.get((setup.size, shots, block, R, task))
                    for task in (*TASKS, "average")
                ]
                if any(paper):
                    rows.append(
                        [PAPER, f"{shots}-shot", label, str(R), *(v.printed if v else MISSING for v in paper)]
                    )
                if any(paper) or any(ours):
                    rows.append([HERE, f"{shots}-shot", label, str(R), *accuracy_cells(ours, shots)])
                any_scored |= any(ours)
    if not any_scored:
        return None
    return Table(
        name,
        f"Accuracy, %: the paper's GPT-2 {setup.size}, and here {setup.title}",
        ["", "shots", "method", "R", *TASKS.values(), "Avg"],
        rows,
        "Mean over seeds. Avg is the plain mean of the eight tasks, and missing where one of them is.",
    )


def accuracy_cells(ours: Sequence[dict[tuple[int, str], float]], shots: int) -> list[str]:
    means = []
    for task in TASKS:
        found = [own[shots, task] for own in ours if (shots, task) in own]
        means.append(fmean(found) if found else None)
    whole = [mean for mean in means if mean is not None]
    average = fmean(whole) if len(whole) == len(TASKS) else None
    return [number(mean, ".2f") for mean in (*means, average)]


def evaluation_notes(runs: Sequence[Run]) -> list[str]:
    """Where evaluations differ from the paper's, as they say themselves."""
    found: dict[str, int] = {}
    for run in runs:
        for record in read_json(run.folder / "eval.json").get("evaluations", []):
            for text in record.get("deviations", []):
                found[text] = found.get(text, 0) + 1
    return [f"{text} ({count} evaluations)" for text, count in found.items()]


# ── Appendix C: the p-sweep ─────────────────────────────────────────────────────────────────────────────
def p_sweeps(setup: Setup) -> dict[str, list[Run]]:
    """Ramp (and R) → sandwich runs over at least three exponents."""
    own = [run for run in setup.runs if is_sandwich(run)]
    found: dict[str, list[Run]] = {}
    for run in own:
        rise = run.fields["optim.peak_lr"] / max(1, run.fields["optim.warmup_steps"])
        found.setdefault(f"R={run.fields['model.rounds']}, {rise:.1e} a step", []).append(run)
    return {ramp: runs for ramp, runs in found.items() if len({run.fields["model.p"] for run in runs}) >= 3}


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """What became of each run that was trained at all."""
    found = []
    for run in runs:
        axes = {"p": run.fields["model.p"], "seed": run.seed}
        outcome = read_outcome(run.folder, axes, run.compare_at)
        if outcome is not None:
            found.append(outcome)
    return found


def p_sweep_table(sweeps: dict[str, list[Run]], label: str, name: str) -> Table:
    rows = []
    for ramp, runs in sweeps.items():
        counts = {count.axes["p"]: count for count in tally(outcomes(runs))}
        for p in sorted({*counts, *published.ESCAPES}):
            paper, loss = published.ESCAPES.get(p), published.SWEEP_LOSS.get(p)
            theirs = [
                f"{paper.printed}/{published.SWEEP_SEEDS}" if paper else MISSING,
                loss.printed if loss else MISSING,
            ]
            rows.append([ramp, f"{p:g}", *theirs, *count_cells(counts.get(p))])
    header = [
        "sweep",
        "p",
        "paper: escaped",
        "paper: loss",
        "below floor",
        "95%",
        "escaped",
        "95%",
        "mean loss",
        "undecided",
    ]
    return Table(
        name,
        f"Escapes from the unigram floor: the paper's p-sweep, and {label}",
        header,
        rows,
        "below floor: the paper's rule, any validation below the floor. escaped: a validation more than 0.1 "
        "nats below it with token similarity under 0.95. 95%: Wilson intervals. mean loss: of the seeds that "
        "escaped; * has training losses in it, for want of a validation. undecided: cut off before that.",
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
        str(count.undecided or MISSING),
    ]  # fmt: skip


# ── Compute ─────────────────────────────────────────────────────────────────────────────────────────────
def compute_table(groups: Sequence[Setup], runs: Sequence[Run]) -> Table:
    """Speed and cost a cell; time a token relative to R = 1, ours and the paper's."""
    rows = []
    for setup in groups:
        for label, cells in setup.rows.items():
            first = speed(cells.get(1))
            for R, cell in cells.items():
                rows.append([setup.letter, label, str(R), *compute_cells(setup, label, R, cell, first)])
    total = sum(run.gpu_hours or 0 for run in runs), sum(run.hours or 0 for run in runs)
    rows.append(["all runs given", "", "", "", "", *(f"{hours:.3f}" for hours in total), "", ""])
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
        "cell's runs. × R=1: time a token over that of the same row at R = 1. Hours: training steps only, "
        "summed over the cell's runs, also unfinished ones; runs that share a GPU each count all their time. "
        "GPU-hours are missing for runs on CPUs. The paper's hours are for one of its own cells, on H200s.",
    )  # fmt: skip


def speed(cell: Cell | None) -> float | None:
    rates = [run.tokens_per_s for run in cell.runs if run.tokens_per_s] if cell else []
    return fmean(rates) if rates else None


def compute_cells(setup: Setup, label: str, R: int, cell: Cell, first: float | None) -> list[str]:
    own = speed(cell)
    hours = [run.hours for run in cell.runs if run.hours is not None]
    gpu = [run.gpu_hours for run in cell.runs if run.gpu_hours is not None]
    block = str(cell.runs[0].fields["model.block"])
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
    own = read_json(run.folder / "diagnose.json")
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
            [setup.letter, setup.label, str(len(setup.runs)), f"{setup.runs[0].fields['data.path']}", beside]
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
        f"{run.stamp['ranks']} × {run.stamp['device']}" if "ranks" in run.stamp else "not recorded"
        for run in setup.runs
    }
    return ", ".join(sorted(found))


def runs_table(runs: Sequence[Run], histories: Histories) -> Table:
    rows = [
        [
            run.name, run.state, f"{run.step}/{number(run.steps, 'd')}" if run.fields else MISSING,
            method(run) if "model.p" in run.fields and "model.block" in run.fields else MISSING,
            number(run.fields.get("model.rounds"), "d"), number(run.seed, "d"),
            number(histories.loss(run) if run.ended else None, ".4f"),
            number(run.validation.get("floor"), ".4f"), str(run.validation.get("verdict", MISSING)),
            str(run.stamp.get("git") or MISSING)[:10], str(run.stamp.get("written", MISSING)),
        ]
        for run in runs
    ]  # fmt: skip
    header = ["run", "state", "step", "method", "R", "seed", "loss", "floor", "verdict", "git", "written"]
    note = "A loss is shown for runs that came to their end. absent: a cell of a sweep without a run folder."
    return Table("runs", "Runs", header, rows, note)


def commands_table(runs: Sequence[Run]) -> Table:
    """The command behind every number: training, scoring, diagnosis."""
    rows = []
    for run in runs:
        evaluations = read_json(run.folder / "eval.json").get("evaluations", [])
        found = [("train", run.stamp.get("command"))]
        found += [("eval", record.get("command")) for record in evaluations]
        found.append(("diagnose", read_json(run.folder / "diagnose.json").get("command")))
        rows += [[run.name, what, shlex.join(map(str, words))] for what, words in found if words]
    return Table("commands", "The command behind every number", ["run", "for", "command"], rows)
