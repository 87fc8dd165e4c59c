"""The visit alignment κ_R of runs, over training and against R. No torch."""

from collections.abc import Sequence
from typing import Any

from deeploop.report.groups import (
    Histories,
    is_language,
    method,
)
from deeploop.report.page import Part
from deeploop.report.plots import Chart, Line, Panel, looks
from deeploop.report.results import read_diagnosis
from deeploop.report.runs import Run
from deeploop.report.tables import MISSING, Table, number


def kappas(run: Run, histories: Histories) -> list[dict[str, Any]]:
    """Return the diagnoses in the metrics, and the one of diagnose.json."""
    found = [record for record in histories[run].kappas if record.get("kappa") is not None]
    own = read_diagnosis(run.files)
    if own.get("kappa") is not None and "rounds" in own:
        found = [*(record for record in found if record["step"] != own.get("step")), own]
    return sorted(found, key=lambda record: record.get("step") or 0)


def kappa_parts(runs: Sequence[Run], histories: Histories) -> list[Part]:
    """Show κ_R of each run at its first and last diagnosis, over training and against R."""
    found = {run.name: (run, kappas(run, histories)) for run in runs if is_language(run)}
    found = {name: (run, own) for name, (run, own) in found.items() if own}
    if not found:
        return []
    rows = [(run, record) for run, own in found.values() for record in own[:1] + own[1:][-1:]]
    columns = {
        "run": lambda row: row[0].name,
        "method": lambda row: method(row[0]),
        "R": lambda row: str(row[1]["rounds"]),
        "step": lambda row: str(row[1].get("step", MISSING)),
        "updates": lambda row: str(row[1].get("updates", MISSING)),
        "κ_R": lambda row: number(row[1]["kappa"], ".3f"),
        "κ_R raw": lambda row: number(row[1].get("kappa_raw"), ".3f"),
        "token similarity": lambda row: number(row[1].get("similarity"), ".3f"),
    }
    title = "Visit alignment κ_R, first and last diagnosis of each run"
    note = "κ_R is at most R: visits that pull together give R, orthogonal ones at most 1."
    return [Table.of("kappa", title, rows, columns, note), kappa_chart([*found.values()])]


def kappa_chart(found: Sequence[tuple[Run, list[dict[str, Any]]]]) -> Chart:
    """Plot κ_R over training on the left, and against R at the last diagnosis on the right."""
    look = looks(sorted({method(run) for run, _ in found}))
    over_steps, over_rounds, most = [], [], max(own[0]["rounds"] for _, own in found)
    for run, own in found:
        colour, dashes = look[method(run)]
        steps, values = [one["step"] for one in own], [one["kappa"] for one in own]
        over_steps.append(Line(steps, values, method(run), colour, f"o{dashes}", 1.2, 3, strength=0.8))
        over_rounds.append(Line([own[0]["rounds"]], values[-1:], "", colour, "o", size=5, strength=0.8))
    if most > 1:
        over_rounds.append(Line([1, most], [1, most], "R, the most it can be", style="--", width=1))
    panels = [
        Panel(over_steps, "over training", "training step", "κ_R", whole_x=True),
        Panel(over_rounds, "at the last diagnosis", "rounds R", "κ_R", whole_x=True),
    ]
    return Chart("kappa", "κ_R, one line and one dot for each run.", panels, columns=2)
