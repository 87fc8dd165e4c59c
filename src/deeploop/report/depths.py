"""Validation loss at other numbers of rounds than the trained one, of runs that were validated at several."""

from collections.abc import Sequence
from statistics import fmean, stdev

from deeploop.report.evaluations import read_depths
from deeploop.report.groups import is_language, method
from deeploop.report.page import MISSING
from deeploop.report.runs import Run
from deeploop.report.tables import Table

NOTE = (
    "Training: the last validation, at each R of data.validation_rounds. validate: what deeploop validate "
    "wrote, by checkpoint and text. A row has the same weights at every R. "
    "Mean ± standard deviation where a cell was run with several seeds."
)


def depths_table(runs: Sequence[Run]) -> Table | None:
    """A row for each cell of a sweep, or each run by itself, and what was read; a column for each R."""
    cells: dict[tuple[str, ...], list[dict[int, float]]] = {}
    for run in runs:
        if not (is_language(run) and run.ended):
            continue
        for read, losses in {"training": _by_rounds(run), **_validated(run)}.items():
            if losses:
                cells.setdefault((_cell(run), method(run), run.unit, read), []).append(losses)
    if not cells:
        return None
    depths = sorted({R for own in cells.values() for losses in own for R in losses})
    rows = [
        [name, label, str(len(own)), unit, read, *(_text([losses.get(R) for losses in own]) for R in depths)]
        for (name, label, unit, read), own in cells.items()
    ]
    header = ["run", "method", "seeds", "nats per", "measured by", *(f"R={R}" for R in depths)]
    return Table("depths", "Validation loss at other rounds", header, rows, NOTE)


def _validated(run: Run) -> dict[str, dict[int, float]]:
    """What `deeploop validate` measured, where that is more than the loss at the trained R."""
    trained = run.fields["model.rounds"]
    return {read: losses for read, losses in read_depths(run.files).items() if {*losses} - {trained}}


def _cell(run: Run) -> str:
    labels = [str(label) for axis, label in run.axes.items() if axis != "seed"]
    return " ".join(labels) or run.name


def _by_rounds(run: Run) -> dict[int, float]:
    """R → loss; nothing where the two lists are not what a validation writes."""
    depths, losses = (run.validation.get(name) for name in ("validation_rounds", "loss_by_rounds"))
    if not (isinstance(depths, list) and isinstance(losses, list) and len(depths) == len(losses)):
        return {}
    pairs = zip(depths, losses, strict=True)
    return {R: loss for R, loss in pairs if type(R) is int and isinstance(loss, int | float)}


def _text(losses: Sequence[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    if not known:
        return MISSING
    return f"{fmean(known):.4f}" + (f" ± {stdev(known):.4f}" if len(known) > 1 else "")
