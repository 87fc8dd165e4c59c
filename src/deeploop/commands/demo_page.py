"""The tables, sentences, charts and page of `deeploop demo`, all from what was measured. No torch."""

import html
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.files import parse_json, write_json, write_text
from deeploop.report import plots
from deeploop.report.page import Html, Section, command, note, page
from deeploop.report.plots import INK, RULE_COLOURS, Chart, Line, Panel
from deeploop.report.tables import Table, number, text_table

TABLE = (1, 2, 3, 4, 9, 13, 24, 77, 127, 200)
"""Steps of the table. Beyond four none is a power of two, where most cells are back at where they started."""
COUNTED = (
    "Over ten seeds named beforehand, flat extrapolates to 200 steps in 9, DeepLoop in 5; these cannot be "
    "told apart (docs/results/demo-rule)."
)
"""How often each of the two rules extrapolates."""

Record = dict[str, Any]


def introduction(trained: int, longest: int) -> str:
    """Return the first lines in the terminal."""
    return (
        f"Four small models learn 1 to {trained} steps of a cellular automaton and are then asked for "
        f"{longest}.\nA loop takes one round per step; a stack is told the number of steps."
    )


def write(out: Path, record: Record) -> str:
    """Write demo.json, picture and page into `out`; return the text to print."""
    write_json(out / "demo.json", record)
    record = parse_json(json.dumps(record))  # as it is read back: keys are text
    plots.save_png(tapes(record), out / "demo.png")
    write_text(out / "index.html", make_page(record))
    return (
        f"\n{text_table(HEADER, table_rows(record))}\n\n{textwrap.fill(verdict(record), 100)}\n\n"
        f"page     {out / 'index.html'}\npicture  {out / 'demo.png'}\nnumbers  {out / 'demo.json'}"
    )


HEADER = ("share of cells right after", *(f"{h} step" if h == 1 else str(h) for h in TABLE))


def table_rows(record: Record) -> list[tuple[str, ...]]:
    rows = [(name, *(f"{own['cells'][str(h)]:.3f}" for h in TABLE)) for name, own in record["models"].items()]
    copied = (record["copying"].get(str(h)) for h in TABLE)
    return [*rows, ("copying", *(number(share, ".3f") for share in copied))]


# ── Sentences ───────────────────────────────────────────────────────────────────────────────────────────
def verdict(record: Record) -> str:
    """Describe the outcome in two sentences; claim nothing if the models were hardly trained."""
    if record["quick"]:
        return "A quick look: few steps on short rows teach the models little, and nothing follows from it."
    far = str(max(TABLE))
    found = ", ".join(f"{name} {percent(own['cells'][far])}" for name, own in record["models"].items())
    return (
        f"Trained on 1 to {record['trained_steps']} steps; cells right at {far} steps: {found}; "
        f"copying one of the first rows {percent(record['copying'][far])}. {COUNTED}"
    )


def percent(share: float) -> str:
    """Format a share in percent; only 1 is 100%."""
    return "100%" if share == 1 else f"{min(99.9, 100 * share):.1f}%"


# ── Charts ──────────────────────────────────────────────────────────────────────────────────────────────
MODEL_COLOURS = {**RULE_COLOURS, "stack": "#A98467"}
RED, PALE = "#e0244e", "#e0244e80"  # no rule's colour
CLOSE = 16  # steps of the enlarged beginning


def tapes(record: Record) -> Chart:
    """Draw a strip for each model: cells from top to bottom, steps from left to right, wrong cells in red.

    The left panels enlarge the beginning, with the trained steps shaded; the right ones show all steps.
    """
    truth, trained = read_cells(record["truth"]), record["trained_steps"]
    strips = {"truth": truth}
    for name, own in record["models"].items():
        strips[name] = np.concatenate([truth[:1], read_cells(own["states"])])  # the start is given
    panels = []
    for name, cells in strips.items():
        note = f"rule {record['rule']}" if name == "truth" else first_wrong(cells, truth)
        close, far = slice(0, CLOSE + 1), slice(None)
        for title, part, ticks in (
            (f"{name}, the first steps", close, (0, trained, 9, CLOSE)),
            (f"{name}: {note}", far, (0, trained, 24, 50, 77, 100, 127, 150, len(truth) - 1)),
        ):
            panels.append(
                Panel(
                    title=title,
                    x="steps" if name == [*strips][-1] else "",
                    x_ticks={step: str(step) for step in ticks},
                    y_ticks={},
                    shaded=(0.5, trained + 0.5),
                    image=strip(cells[part], truth[part]),
                )
            )
    names = [(INK, "1 (0 is empty)"), (RED, "wrong: says 1"), (PALE, "wrong: does not say 1")]
    return Chart("demo", tapes_caption(record), panels, 2, 1.5, shared_y=False, ratios=(2, 9), names=names)


def read_cells(states: Sequence[str]) -> np.ndarray:
    """Parse cells as (steps, cells) of 0 and 1, with 2 for any other token."""
    return np.array([["01".find(cell) % 3 for cell in row] for row in states])


def strip(cells: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Draw ones in ink, zeros empty, and wrong cells in red, paler if a 1 is missing."""
    colours = np.zeros((*cells.shape, 4))
    for colour, where in ((INK, cells == 1), (PALE, cells != truth), (RED, (cells != truth) & (cells == 1))):
        colours[where] = rgba(colour)
    return colours.swapaxes(0, 1)


def rgba(colour: str) -> list[float]:
    return [int(colour[i : i + 2] or "ff", 16) / 255 for i in (1, 3, 5, 7)]


def first_wrong(cells: np.ndarray, truth: np.ndarray) -> str:
    """Format a model's first error on the drawn row, and the number of errors."""
    wrong = cells != truth
    if not wrong.any():
        return f"no cell is wrong in {len(truth) - 1} steps"
    return f"first wrong cell at step {int(wrong.any(1).argmax())}; {wrong.mean():.0%} are wrong"


def accuracy(record: Record) -> Chart:
    """Plot the share of correct cells against steps; copying is the baseline."""
    steps = record["steps"]
    lines = []
    for name, own in record["models"].items():
        # DeepLoop and flat often have the same accuracy: the lower line is thick, so that both are seen.
        width, size = (4.5, 8.0) if name == "DeepLoop" else (1.6, 4.0)
        shares = [own["cells"][str(h)] for h in steps]
        lines.append(Line(steps, shares, name, MODEL_COLOURS[name], width=width, size=size))
    beyond = [h for h in steps if str(h) in record["copying"]]
    copied = [record["copying"][str(h)] for h in beyond]
    lines.append(Line(beyond, copied, "copying one of the first rows", style="--", width=1.2))
    low = min(0.4, *(min(own["cells"].values()) for own in record["models"].values()))
    panel = Panel(
        lines,
        x="steps = rounds (shaded: trained)",
        y="share of cells right",
        log_x=10,
        x_ticks={h: str(h) for h in (1, 2, 4, 9, 13, 24, 47, 77, 127, 200)},
        x_range=(0.9, max(steps) * 1.1),
        y_range=(low - 0.02, 1.03),
        shaded=(0.9, record["trained_steps"] * 1.1),
    )
    return Chart("accuracy", accuracy_caption(record), [panel], height=4)


# ── The page ────────────────────────────────────────────────────────────────────────────────────────────
STYLE = ".lead { font-size: 1.15rem; }"


def make_page(record: Record) -> str:
    trained, longest = record["trained_steps"], max(record["steps"])
    sections = [
        Section("", [Html(f'<p class="lead">{html.escape(verdict(record))}</p>'), tapes(record)]),
        Section(
            "How far each of them gets",
            [accuracy(record), Table("accuracy", "", HEADER, table_rows(record))],
        ),
        Section(
            "What was trained",
            [
                what_was_trained(record),
                models_table(record),
                "How often a loop extrapolates, over seeds and rates, and what decides it: docs/depth.md.",
            ],
        ),
        Section(
            "Again, with another seed",
            [command(f"deeploop demo --seed {record['seed'] + 1}"), note(made_by(record))],
        ),
    ]
    return page(f"Trained on {trained} steps, asked for {longest}", sections, style=STYLE)


def tapes_caption(record: Record) -> str:
    return (
        f"One held-out row of {record['length']} cells, top to bottom, over {max(record['steps'])} steps, "
        "left to right: the truth, and below it what each model says. Wrong cells are red, fainter where a 1 "
        f"is missing. Training saw the shaded steps, 1 to {record['trained_steps']}, enlarged on the left."
    )


def accuracy_caption(record: Record) -> str:
    return (
        f"Share of cells right over {record['rows']} held-out rows against the number of steps; the trained "
        "ones are shaded. DeepLoop's line is thick, so that it is seen below another one. The dashed "
        "line copies the start or one of the first states, whichever is best: a model that repeats a state "
        "scores no more."
    )


def what_was_trained(record: Record) -> str:
    return (
        f"Rule {record['rule']} of the elementary cellular automata, looking left: a cell's next state "
        "depends on itself and the two cells before it, so that a causal transformer can compute it. Every "
        f"batch asks for 1 to {record['trained_steps']} steps. A loop takes one round per step, in training "
        "and in testing; the stack reads the number of steps as digits. Noise is what training adds to the "
        "stream after every round, as a share of its size; testing adds none. No row that is scored was "
        "trained on."
    )


def models_table(record: Record) -> Table:
    columns = {
        "model": lambda item: item[0],
        "what it is": lambda item: item[1]["title"],
        "parameters": lambda item: f"{item[1]['parameters']:,}",
        "peak rate": lambda item: f"{item[1]['peak_lr']:g}",
        "noise": lambda item: f"{item[1]['noise']:g}",
        "training steps": lambda item: f"{item[1]['optim_steps']:,}",
        "rows per step": lambda item: str(item[1]["batch"]),
    }
    return Table.of("models", "", record["models"].items(), columns)


def made_by(record: Record) -> str:
    return (
        f"deeploop {record['deeploop']}, torch {record['torch']}, seed {record['seed']}; "
        f"{record['seconds']:.0f} s for what this call trained and evaluated."
    )
