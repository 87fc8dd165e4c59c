"""Tables and charts of `deeploop eval` and `deeploop validate` for language models. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deeploop.eval.tasks import PAPER_TASKS
from deeploop.report.plots import COLOURS, Chart, Line, Panel
from deeploop.report.tables import number, text_table

Record = dict[str, Any]
# A result replaces an earlier one in eval.json that agrees in all of these.
IDENTITY = ("tasks", "shots", "limit", "data", "checkpoint", "rounds", "recompute_alpha", "precision")


def averages(rows: Sequence[Record]) -> list[Record]:
    """The unweighted mean of the tasks' accuracies, for each number of shots and rounds."""
    if not all("acc" in row for row in rows):
        return []
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        cells.setdefault((row["shots"], row["rounds"]), []).append(row["acc"])
    return [{"shots": shots, "rounds": R, "acc": sum(accs) / len(accs)} for (shots, R), accs in cells.items()]


def deviations(settings: Record, stamp: Record) -> list[str]:
    """Differences of the model or the settings from the paper's evaluation."""
    checks = [
        (settings["limit"], f"only the first {settings['limit']} documents of each task"),
        (stamp["tokenizer"] != "gpt2", f"{stamp['tokenizer']} tokens, not GPT-2's"),
        (stamp["context"] != 1024, f"context {stamp['context']}, not 1024"),
        (stamp["precision"] != "bf16", f"{stamp['precision']} arithmetic, not bf16"),
        (stamp["cut_requests"], f"{stamp['cut_requests']:,} requests truncated on the left to fit"),
    ]
    return [text for holds, text in checks if holds]


def left_out(rows: Sequence[Record]) -> list[str]:
    """Describe the tasks with items that were not scored; the same items are left out at every R."""
    counts = {
        (row["task"], row["shots"]): (row["left_out"], row["items"] + row["left_out"])
        for row in rows
        if "left_out" in row
    }
    return [
        f"{task}, {shots}-shot: {count:,} of {items:,} items left out, with an answer longer than the context"
        for (task, shots), (count, items) in counts.items()
    ]


def report(folder: Path, record: Record) -> str:
    """Format the result for a terminal."""
    limit = f", the first {record['limit']} documents of each" if record["limit"] else ""
    parts = [
        f"{folder} at {record['checkpoint']}: {len(record['tasks'])} tasks{limit}",
        table(record),
        speed(record, sum(row["items"] for row in record["results"]) // len(record["rounds"])),
    ]
    if record["deviations"]:
        lines = [f"  {text}" for text in record["deviations"]]
        parts.append("\n".join(["deviates from the paper's evaluation:", *lines]))
    return "\n\n".join(parts)


def table(record: Record) -> str:
    """Format accuracies in percent like the paper's Table 2; with other tasks, one row per metric."""
    if not all(row["task"] in PAPER_TASKS and "acc" in row for row in record["results"]):
        return long_table(record["results"])
    cells = {(row["shots"], row["rounds"], row["task"]): row["acc"] for row in record["results"]}
    names = [name for name in PAPER_TASKS if any(row["task"] == name for row in record["results"])]
    header = ("acc, %", *(PAPER_TASKS[name].heading for name in names), "Avg")
    rows = []
    for average in record["average"]:
        shots, R = average["shots"], average["rounds"]
        accs = [*(cells[shots, R, name] for name in names), average["acc"]]
        rows.append((f"{shots}-shot R={R}", *(f"{100 * acc:.2f}" for acc in accs)))
    return text_table(header, rows)


def long_table(rows: Sequence[Record]) -> str:
    """Format each metric of each result as a row."""
    lines = []
    for row in rows:
        values = {"acc": row["acc"], "acc_stderr": row["stderr"]} if "acc" in row else row["metrics"]
        for name, value in values.items():
            if "_stderr" not in name:
                where = (row["task"], str(row["shots"]), str(row["rounds"]), str(row["items"]))
                lines.append((*where, name, f"{value:.4f}"))
    return text_table(("task", "shots", "R", "items", "metric", "value"), lines)


def speed(record: Record, items: int) -> str:
    """Format the speed. `items` counts those of one R; each is a document with all its answers."""
    seconds = max(record["seconds"], 1e-3)
    items *= len(record["rounds"])
    return (
        f"{record['requests']:,} requests, {items:,} items in {seconds:,.1f} s on {record['device']} "
        f"({record['precision']}): {items / seconds:,.1f} items/s"
    )


# ── `deeploop validate` ─────────────────────────────────────────────────────────────────────────────────
LOSSES = ("loss", "bits/byte", "token sim.")


def validation_report(run: Path, record: Record) -> str:
    """Format a validation for a terminal."""
    most, plural = record["rounds"][-1]["rounds"], "s" * (record["sequences"] != 1)
    parts = [
        f"{run} at {record['checkpoint']}: {record['sequences']:,} sequence{plural}, {record['tokens']:,} "
        f"tokens, {record['bytes']:,} bytes of {record['data']}",
        depth_table(record["rounds"], record["trained_rounds"]),
    ]
    if record["adaptive"]:
        note = "line: linear interpolation between fixed depths"
        parts += [f"adaptive depth, at most {most} rounds; {note}", adaptive_table(record["adaptive"])]
    if "cache" in record:
        parts += [f"decoded token by token, R = {most}:", cache_table(record["cache"])]
    if "by_corpus" in record:
        parts.append(corpus_table(record["by_corpus"]))
    return "\n\n".join(parts)


def depth_table(rows: Sequence[Record], trained: int) -> str:
    names = [f"{row['rounds']}{' (trained)' * (row['rounds'] == trained)}" for row in rows]
    lines = [(name, *_losses(row)) for name, row in zip(names, rows, strict=True)]
    return text_table(("R", *LOSSES), lines)


def adaptive_table(rows: Sequence[Record]) -> str:
    lines = []
    for row in rows:
        depth = f"{row['mean_rounds']:.2f}", number(row["line"], ".4f")
        lines.append((f"{row['criterion']} {row['threshold']:g}", *depth, *_losses(row)))
    return text_table(("stops by", "mean rounds", "line", *LOSSES), lines)


def cache_table(rows: Sequence[Record]) -> str:
    lines = []
    for row in rows:
        budget = "all" if row["cache_rounds"] is None else str(row["cache_rounds"])
        lines.append((budget, str(row["slots"]), f"{row['bytes_per_token']:,.0f}", *_losses(row)))
    return text_table(("cache rounds", "slots", "bytes/token", *LOSSES), lines)


def corpus_table(corpora: Sequence[Record]) -> str:
    lines = [
        (one["corpus"], f"{one['sequences']:,}", str(row["rounds"]), *_losses(row))
        for one in corpora
        for row in one["rounds"]
    ]
    return text_table(("corpus", "sequences", "R", *LOSSES), lines)


def _losses(row: Record) -> tuple[str, str, str]:
    return f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}", f"{row['similarity']:.2f}"


# ── Charts ──────────────────────────────────────────────────────────────────────────────────────────────
def depth_chart(records: Sequence[Record]) -> Chart:
    """Validation loss against rounds from depth.json, with adaptive depth at its mean rounds."""
    return Chart("depth", "Validation loss against rounds.", [loss_panel(records)], height=4)


def accuracy_chart(record: Record, losses: Sequence[Record] = ()) -> Chart:
    """Mean accuracy of an evaluation against rounds, with the loss beside it if there is a depth.json."""
    lines = []
    for shots, colour in zip(record["shots"], COLOURS * len(record["shots"]), strict=False):
        rows = [row for row in record["average"] if row["shots"] == shots]
        accuracies = [100 * row["acc"] for row in rows]
        lines.append(Line([row["rounds"] for row in rows], accuracies, f"{shots}-shot", colour))
    tasks = len({row["task"] for row in record["results"]})
    label = f"accuracy (%), mean of {tasks} tasks" if tasks > 1 else "accuracy (%)"
    panel = Panel(lines, x="rounds R", y=label, whole_x=True, at=(record["trained_rounds"], "trained"))
    panels = [*([loss_panel(losses)] if losses else []), panel]
    return Chart("accuracy", "Accuracy against rounds.", panels, columns=2, height=4, shared_y=False)


def loss_panel(records: Sequence[Record]) -> Panel:
    """Plot validation loss against rounds, fixed and adaptive."""
    curves: dict[str, dict[float, float]] = {}  # records that differ only in their rounds make one curve
    for record in records:
        alpha = ", α recomputed" if record["recompute_alpha"] else ""
        for row in record["rounds"]:
            curves.setdefault(f"fixed rounds{alpha}", {})[row["rounds"]] = row["loss"]
        for row in record["adaptive"]:
            label = f"adaptive by {row['criterion']}, at most {record['rounds'][-1]['rounds']}{alpha}"
            curves.setdefault(label, {})[row["mean_rounds"]] = row["loss"]
    lines = []
    for index, (label, curve) in enumerate(curves.items()):
        style = "s:" if label.startswith("adaptive") else "o-"
        rounds = sorted(curve)
        lines.append(Line(rounds, [curve[R] for R in rounds], label, COLOURS[index % len(COLOURS)], style))
    # Nats per token and bits per byte are proportional, so both axes fit one curve.
    first = records[-1]["rounds"][0]
    return Panel(
        lines,
        x="rounds R",
        y="validation loss (nats per token)",
        whole_x=True,
        at=(records[-1]["trained_rounds"], "trained"),
        right=("bits per byte", first["bits_per_byte"] / first["loss"]),
    )
