"""Tables and charts of iterated tasks, with the matrix of rounds and steps. Imports no torch."""

from typing import Any

import numpy as np

from deeploop.report.plots import COLOURS, Chart, Line, Panel
from deeploop.report.tables import number, text_table

Record = dict[str, Any]


def report(folder: str, record: Record) -> str:
    """Format the result for a terminal: the trained rounds first, then every number of rounds."""
    rule = f" of rule {record['rule']}" if record["task"] == "automaton" else ""
    parts = [
        f"{folder} at {record['checkpoint']}: {record['task']}{rule}, length {record['length']}, "
        f"{record['examples']:,} held-out instances; trained on 1 to {record['trained_steps']} steps, "
        f"rounds: {record['sample']}",
        by_steps(record),
        f"share of cells that are right, rounds × steps:\n\n{matrix(record)}",
        f"{record['seconds']:,.1f} s on {record['device']} ({record['precision']})",
    ]
    return "\n\n".join(parts)


def by_steps(record: Record) -> str:
    """Table by number of steps, each at the rounds that training used for it; copying is the baseline."""
    rows = []
    for column, steps in enumerate(record["steps"]):
        copied = record["copying"].get(str(steps))
        if (R := asked_rounds(record, steps)) in record["rounds"]:
            row = record["rounds"].index(R)
            shares = [record[name][row][column] for name in ("cells", "exact", "loss")]
            rows.append((str(steps), str(R), *(number(share, ".3f") for share in (*shares, copied))))
    return text_table(("steps", "rounds", "cells", "exact", "loss", "copying"), rows)


def asked_rounds(record: Record, steps: int) -> int:
    """The rounds for a number of steps, as in training."""
    rounds: int = steps if record["sample"] == "steps" else record["trained_rounds"]
    return rounds


def matrix(record: Record) -> str:
    first, *rest = map(str, record["steps"])
    copied = [record["copying"].get(str(steps)) for steps in record["steps"]]
    lines = {**dict(zip(map(str, record["rounds"]), record["cells"], strict=True)), "copying": copied}
    rows = [(name, *(number(share, ".3f") for share in shares)) for name, shares in lines.items()]
    return text_table(("rounds", f"{first} steps", *rest), rows)


def matrix_chart(record: Record) -> Chart:
    """A heat map of the share of correct cells by rounds and steps, with the trained ones framed."""
    rounds, steps = record["rounds"], record["steps"]
    shares = np.array(record["cells"], dtype=float)
    framed = [
        (column, rounds.index(R))
        for column, h in enumerate(steps)
        if h <= record["trained_steps"] and (R := asked_rounds(record, h)) in rounds
    ]
    panel = Panel(
        [
            Line([x - 0.5, x + 0.5, x + 0.5, x - 0.5, x - 0.5], [y - 0.5, y - 0.5, y + 0.5, y + 0.5, y - 0.5],
                 colour=COLOURS[1], style="-", width=2)
            for x, y in framed
        ],
        f"{record['task']}: share of cells right (framed: trained)",
        "steps asked for",
        "rounds",
        x_ticks=dict(enumerate(map(str, steps))),
        y_ticks=dict(enumerate(map(str, rounds))),
        image=shares,
        image_style={"cmap": "viridis", "vmin": 0, "vmax": 1, "origin": "lower"},
        texts=[
            (x, y, f"{share:.2f}", "black" if share > 0.6 else "white")
            for (y, x), share in np.ndenumerate(shares)
        ],
    )  # fmt: skip
    return Chart(
        "steps", "Share of cells right by rounds and steps.", [panel], height=1.2 + 0.42 * len(rounds)
    )


def space_time(truth: np.ndarray, model: np.ndarray, trained: int) -> Chart:
    """The states of one row step by step: the truth, the model's, and where they differ.

    Both are (steps, cells); a line marks the largest number of steps in training.
    """
    steps, width = truth.shape
    wrong = truth != model
    line = Line([0.5, width + 0.5], [trained + 0.5] * 2, colour=COLOURS[1], style="-", width=1)
    panels = [
        Panel(
            [line],
            title,
            "cell",
            f"steps (trained: 1 to {trained}, above the line)",
            y_range=(steps + 0.5, 0.5),
            image=picture,
            image_style={
                "cmap": colours,
                "vmin": 0,
                "vmax": 1,
                "extent": (0.5, width + 0.5, steps + 0.5, 0.5),
            },
        )
        for title, picture, colours in (
            ("truth", truth, "binary"),
            ("the model, a round for each step", model, "binary"),
            (f"different: {wrong.mean():.1%} of cells", wrong.astype(int), "Oranges"),
        )
    ]
    return Chart(
        "spacetime", "States step by step.", panels, height=min(12.0, max(3.0, 8 * steps / max(steps, 60)))
    )
