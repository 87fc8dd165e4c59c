"""Tables and charts of `deeploop eval` for reasoners."""

from itertools import groupby
from pathlib import Path
from typing import Any

from deeploop.report.plots import Chart, Line, Panel, graded
from deeploop.report.tables import text_table
from deeploop.tasks.puzzles import gallery

Record = dict[str, Any]


def report(folder: Path, record: Record, young: str) -> str:
    """Format the result for a terminal."""
    weights = ", averaged weights" if record["averaged"] else ""
    examples = f"{record['examples']:,} examples of {record['data']}"
    units = "tasks" if record["kind"] == "arc" else "puzzles"
    what = f"{record['tasks']:,} {units}, {examples}" if "tasks" in record else examples
    parts = [
        f"{folder} at {record['checkpoint']}{weights}: {what}{young}",
        accuracy(record),
    ]
    if record["kind"] == "arc":
        parts.append(gallery.ladder(record).text())
    if "passes" in record:
        parts.append(passes_table(record))
    seconds = max(record["seconds"], 1e-3)
    parts.append(
        f"{seconds:,.1f} s on {record['device']} ({record['precision']}): "
        f"{record['examples'] / seconds:,.1f} examples/s"
    )
    if record["deviations"]:
        lines = [f"  {text}" for text in record["deviations"]]
        parts.append("\n".join(["deviates from the paper's evaluation:", *lines]))
    return "\n\n".join(parts)


def young_average(ema: float, step: int) -> str:
    """A warning if the averaged weights still include the start of the run."""
    if not ema or 1 / (1 - ema) <= step:
        return ""
    return (
        "\nthe averaged weights are still near the start: they average over about "
        f"{1 / (1 - ema):,.0f} steps (optim.ema={ema:g}), and the run has {step:,}"
    )


def accuracy(record: Record) -> str:
    """A table of single answers and the segments that they took, or would have taken."""
    taken = "segments" if record["halt"] else "segments wanted"
    heading = ("", "exact, %", "cells, %", "loss", taken)
    label = record["kind"]
    if "tasks" in record:
        label = "each answer by itself" if record["test_time"] else "each view by itself"
    parts = [(label, record), *record.get("sources", {}).items()]
    rows = [
        (
            name,
            f"{100 * part['exact']:.2f}",
            f"{100 * part['cells']:.2f}",
            f"{part['loss']:.4f}",
            f"{part['segments']:.2f} of {record['most_segments']}",
        )
        for name, part in parts
    ]
    return text_table(heading, rows)


def passes_table(record: Record) -> str:
    """A table of accuracy against forward passes, for each source file if there are several."""
    sources = record.get("sources", {})
    parts = {"all": record, **sources} if sources else {"": record}
    rows = [
        (
            *([name] if sources else []),
            *(str(row["segments"]), str(row["answers"]), f"{row['passes']:,.1f}"),
            *(f"{100 * row[name]:.2f}" for name in ("exact", "cells", "any")),
        )
        for name, part in parts.items()
        for row in part["passes"]
    ]
    header = ("segments", "answers", "passes", "exact, %", "cells, %", "any right, %")
    how = (record["test_time"] or {}).get("choose", "vote")
    chosen = "the answer given most often" if how == "vote" else "the answer with the highest q_halt"
    return f"exact, cells: {chosen}; any right: at least one; passes: of one puzzle\n\n" + text_table(
        (*(["file"] if sources else []), *header), rows
    )


def passes_chart(record: Record) -> Chart:
    """Puzzles solved against forward passes, a panel for each file that they come from.

    A line for each number of segments, along its answers; a dashed one joins single answers.
    """
    panels = []
    for name, part in (record.get("sources") or {record["kind"]: record}).items():
        curves = {
            segments: list(points)
            for segments, points in groupby(part["passes"], lambda row: row["segments"])
        }
        firsts = [points[0] for points in curves.values()]
        lines = [Line(*_points(firsts), "one answer" if len(firsts) > 1 else "", style="--", width=1)]
        for (segments, points), colour in zip(curves.items(), graded(len(curves)), strict=True):
            lines.append(Line(*_points(points), f"{segments} segments", colour))
        counts = dict.fromkeys(str(row["answers"]) for row in part["passes"])
        answers = f" ({', '.join(counts)} answers)" if len(counts) > 1 else ""
        panels.append(Panel(lines, name, f"forward passes per puzzle{answers}", "solved (%)", log_x=2))
    return Chart("passes", "Puzzles solved against forward passes.", panels, height=4)


def _points(rows: list[Record]) -> tuple[list[float], list[float]]:
    return [row["passes"] for row in rows], [100 * row["exact"] for row in rows]
