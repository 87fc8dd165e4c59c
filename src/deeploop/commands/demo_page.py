"""The tables, sentences, charts and page of `deeploop demo`, all from what was measured. No torch."""

import html
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import deeploop
from deeploop.files import parse_json, read_object, write_json, write_text
from deeploop.report import plots
from deeploop.report.page import Html, Part, Section, command, note, page
from deeploop.report.plots import INK, RULE_COLOURS, Chart, Line, Panel
from deeploop.report.tables import Table, number, text_table
from deeploop.report.views import RIGHT, goes_on

TABLE = (1, 2, 3, 4, 9, 13, 24, 77, 127, 200)
"""Steps of the table. Beyond four none is a power of two, where most cells are back at where they started."""
FAR = TABLE[-2:]
NAMES = {
    "DeepLoop": "The DeepLoop loop",
    "pre-norm": "The pre-norm loop",
    "stack": "The stack without a loop",
}
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


def write(out: Path, record: Record, collapsed: Record) -> str:
    """Write demo.json, picture and page into `out`; return the text to print."""
    write_json(out / "demo.json", record)
    record = parse_json(json.dumps(record))  # as it is read back: keys are text
    plots.save_png(tapes(record), out / "demo.png")
    write_text(out / "index.html", make_page(record, collapsed))
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
    """Describe the outcome in a few sentences; claim nothing if the models were hardly trained."""
    if record["quick"]:
        return "A quick look: few steps on short rows teach the models little, and nothing follows from it."
    others = (name for name in record["models"] if name != "flat")
    copied = percent(record["copying"][str(FAR[-1])])
    return " ".join(
        [
            of_flat(record),
            *(of_other(name, record) for name in others),
            f"Copying one of the first rows would have {copied} right at {FAR[-1]}.",
            COUNTED,
        ]
    )


def of_flat(record: Record) -> str:
    flat, trained = record["models"]["flat"], record["trained_steps"]
    near, far = (percent(flat["cells"][str(h)]) for h in FAR)
    shares = f"{near} of the cells right at {FAR[0]} steps and {far} at {FAR[1]}"
    if claim_holds(record):
        return f"Trained on 1 to {trained} steps, the flat loop has {shares}."
    if (most := reach(flat)) > trained:
        return f"With this seed the flat loop is right up to {most} steps, not to {FAR[-1]}: {shares}."
    return f"With this seed the flat loop is not right beyond its {trained} trained steps: {shares}."


def claim_holds(record: Record) -> bool:
    """Trained on at most 4 steps, the flat loop has at least 99% of the cells right at 127 and at 200."""
    cells = record["models"]["flat"]["cells"]
    return bool(goes_on({h: cells[str(h)] for h in FAR}, trained=record["trained_steps"]))


def of_other(name: str, record: Record) -> str:
    own, flat = record["models"][name], record["models"]["flat"]
    shorter = own["optim_steps"] < flat["optim_steps"]
    begin = NAMES[name] + f", trained for {own['optim_steps']:,} steps of {flat['optim_steps']:,}," * shorter
    end = f"has {percent(own['cells'][str(FAR[-1])])} at {FAR[-1]}{_neither(own)}."
    if not (most := reach(own)):
        return f"{begin} does not learn even one step, and {end}"
    return f"{begin} is right up to {most} step{'s' * (most > 1)} and {end}"


def _neither(own: Record) -> str:
    """A model may answer with a token that is no cell; where it often does, that explains a low share."""
    share = own["neither"][str(FAR[-1])]
    return f", where {share:.0%} of its answers are neither 0 nor 1" if share > 1 - RIGHT else ""


def reach(own: Record) -> int:
    """The most steps up to which every number of them that was tried has at least 99% of the cells right."""
    found = 0
    for steps, share in sorted((int(h), share) for h, share in own["cells"].items()):
        if share < RIGHT:
            break
        found = steps
    return found


def percent(share: float) -> str:
    """100% is said of nothing less."""
    return "100%" if share == 1 else f"{min(99.9, 100 * share):.1f}%"


# ── Charts ──────────────────────────────────────────────────────────────────────────────────────────────
MODEL_COLOURS = {**RULE_COLOURS, "stack": "#A98467"}
RED = "#e0244e"  # no rule's colour
WRONG = {1: (1.0, "wrong: says 1"), 0: (0.5, "wrong: says 0"), 2: (0.25, "wrong: says neither 0 nor 1")}
"""What a model says in place of the truth → how strong the red is, and its name in the legend."""
CLOSE = 16  # steps of the enlarged beginning


def tapes(record: Record) -> Chart:
    """A strip for each model: cells from top to bottom, steps from left to right, wrong cells in red.

    To the left the beginning enlarged, with the trained steps shaded; to the right all steps.
    """
    truth, trained = read_cells(record["truth"]), record["trained_steps"]
    strips = {"truth": truth}
    for name, own in record["models"].items():
        strips[name] = np.concatenate([truth[:1], read_cells(own["states"])])  # the start is given
    panels = []
    for name, cells in strips.items():
        said = f"rule {record['rule']}" if name == "truth" else first_wrong(cells, truth)
        close, far = slice(0, CLOSE + 1), slice(None)
        for title, part, ticks in (
            (f"{name}, the first steps", close, (0, trained, 9, CLOSE)),
            (f"{name}: {said}", far, (0, trained, 24, 50, 77, 100, 127, 150, len(truth) - 1)),
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
    said_wrongly = {int(value) for cells in strips.values() for value in cells[cells != truth]}
    names = [(INK, "1 (0 is empty)")]
    names += [
        (faded(RED, strength), name) for value, (strength, name) in WRONG.items() if value in said_wrongly
    ]
    return Chart("demo", tapes_caption(record), panels, 2, 1.5, shared_y=False, ratios=(2, 9), names=names)


def read_cells(states: Sequence[str]) -> np.ndarray:
    """(steps, cells) of 0 and 1, 2 for what is neither."""
    return np.array([["01".find(cell) % 3 for cell in row] for row in states])


def strip(cells: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Ones in ink, zeros empty; wrong cells in red, paler for a zero and palest for neither."""
    colours = np.zeros((*cells.shape, 4))
    colours[cells == 1] = rgba(INK, 1)
    for value, (strength, _) in WRONG.items():
        colours[(cells != truth) & (cells == value)] = rgba(RED, strength)
    return colours.swapaxes(0, 1)


def rgba(colour: str, strength: float) -> tuple[float, ...]:
    return (*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)), strength)


def faded(colour: str, strength: float) -> str:
    return f"{colour}{round(255 * strength):02x}"


def first_wrong(cells: np.ndarray, truth: np.ndarray) -> str:
    """Format a model's first error on the drawn row, and the number of errors."""
    wrong = cells != truth
    if not wrong.any():
        return f"no cell is wrong in {len(truth) - 1} steps"
    return f"first wrong cell at step {int(wrong.any(1).argmax())}; {wrong.mean():.0%} are wrong"


def accuracy(record: Record) -> Chart:
    """Share of cells right against steps; copying is the baseline."""
    steps = record["steps"]
    lines = [
        Line(steps, [own["cells"][str(h)] for h in steps], name, MODEL_COLOURS[name])
        for name, own in record["models"].items()
    ]
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


# ── The collapse of DeepNorm's exponent ─────────────────────────────────────────────────────────────────
COLLAPSE = Path(deeploop.__file__).parent / "assets" / "collapse.json"
"""The collapse.json that `deeploop demo --collapse` wrote, seed 0."""
OUTCOMES = {"escaped": "trains", "collapsed": "COLLAPSED", "undecided": "undecided"}


def read_collapse() -> Record:
    """The record of the collapse that comes with the package."""
    record = read_object(COLLAPSE)
    return {**record, "source": f"a record that comes with the package, seed {record['seed']}"}


def collapse_table(record: Record) -> Table:
    def last(run: Record) -> Record:
        return dict(run["validations"][-1])

    columns = {
        "block": lambda run: run["method"],
        "R": lambda run: str(run["rounds"]),
        "N": lambda run: str(run["depth"]),
        "alpha": lambda run: number(run.get("alpha"), ".3f"),
        "beta": lambda run: number(run.get("beta"), ".4f"),
        "loss": lambda run: f"{last(run)['loss']:.3f}",
        "floor - loss": lambda run: f"{last(run)['floor'] - last(run)['loss']:+.3f}",
        "token sim.": lambda run: f"{last(run)['similarity']:.2f}",
        "outcome": lambda run: OUTCOMES[last(run)["verdict"]],
    }
    return Table.of("collapse", "", record["runs"], columns)


def collapse_verdict(record: Record) -> str:
    """Describe the outcome at the looped depth: both exponents, and the smaller one with the bias."""
    if record["quick"]:
        return "A quick look of a few steps, from which nothing follows."
    rounds = max(run["rounds"] for run in record["runs"])
    looped = (run for run in record["runs"] if run["rounds"] == rounds)
    ends = {run["method"]: run["validations"][-1]["verdict"] for run in looped}
    return f"At R = {rounds} {_of_exponents(ends)} {_of_bias(ends)}"


def _of_exponents(ends: dict[str, str]) -> str:
    small, large = ends["DeepNorm p=1/4"], ends["DeepLoop p=1/2"]
    match small, large:
        case "collapsed", "escaped":
            return "the exponent decides: p = 1/4 ends with all positions in one state, p = 1/2 trains."
        case "escaped", "escaped":
            return "both exponents train with this seed; the ramp spared p = 1/4 too."
        case "collapsed", "collapsed":
            return "both exponents collapse with this seed; a slower ramp is what to try."
        case "escaped", "collapsed":
            return "p = 1/4 trains and p = 1/2 collapses with this seed: not what the bound predicts."
    return f"with this seed: p = 1/4 {OUTCOMES[small]}; p = 1/2 {OUTCOMES[large]}."


def _of_bias(ends: dict[str, str]) -> str:
    helped = ends["DeepNorm p=1/4, unigram bias"]
    said = {"escaped": "trains", "collapsed": "collapses as well"}.get(helped, "is undecided")
    return f"With an output bias that starts at the unigram frequencies p = 1/4 {said}."


def collapse_chart(record: Record) -> Chart:
    """Training loss above, token similarity below, a column for each R."""
    look = plots.looks(run["method"] for run in record["runs"])
    floor = record["runs"][0]["validations"][-1]["floor"]
    above, below = [], []
    for R in sorted({run["rounds"] for run in record["runs"]}):
        title = f"R = {R}" + (" (no block is revisited)" if R == 1 else " (looped)")
        losses, similarities = [], []
        for run in (run for run in record["runs"] if run["rounds"] == R):
            colour, dashes = look[run["method"]]
            read_at, values = zip(*run["train"], strict=True)
            losses.append(Line(read_at, plots.running_mean(values, 5), run["method"], colour, dashes))
            steps, similarity = plots.series(run["validations"], "similarity")
            similarities.append(Line(steps, similarity, "", colour, f"o{dashes}", size=3))
        label = "training loss (nats per token)"
        above.append(Panel(losses, title, "training step", label, level=(floor, "unigram floor")))
        below.append(Panel(similarities, title, "training step", "token similarity", y_range=(-0.05, 1.05)))
    caption = (
        "Training loss (running mean of 5 readings) and mean cosine between token states. The dashed "
        f"line is the unigram floor, {floor:.3f} nats: a model whose positions all carry one state "
        "(similarity 1) cannot go below it."
    )
    return Chart("collapse", caption, [*above, *below], columns=2, height=3, shared_y="row")


# ── The page ────────────────────────────────────────────────────────────────────────────────────────────
STYLE = ".lead { font-size: 1.15rem; }"


def make_page(record: Record, collapsed: Record) -> str:
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
        Section("Looped depth can also collapse", collapse_parts(collapsed)),
        Section(
            "Again, with another seed",
            [command(f"deeploop demo --seed {record['seed'] + 1}"), note(made_by(record))],
        ),
    ]
    return page(f"Trained on {trained} steps, asked for {longest}", sections, style=STYLE)


def tapes_caption(record: Record) -> str:
    says_neither = any("?" in state for own in record["models"].values() for state in own["states"])
    neither = ", faintest where the answer is neither 0 nor 1" * says_neither
    return (
        f"One held-out row of {record['length']} cells, top to bottom, over {max(record['steps'])} steps, "
        "left to right: the truth, and below it what each model says. Wrong cells are red, fainter where a 1 "
        f"is missing{neither}. Training saw only the shaded steps, 1 to {record['trained_steps']}, enlarged "
        "on the left."
    )


def accuracy_caption(record: Record) -> str:
    return (
        f"Share of cells right over {record['rows']} held-out rows against the number of steps; the trained "
        "ones are shaded. The dashed line copies the start or one of the first states, whichever is best: "
        "a model that repeats a state scores no more."
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


def collapse_parts(record: Record) -> list[Part]:
    looped = max(run["rounds"] for run in record["runs"])
    return [
        f"Another experiment ({record['source']}): two stored blocks on the bytes of Python's standard "
        f"library, applied once and {looped} times, with the same seed, data and "
        "schedule. Only the residual equation changes, and in one run the output bias. "
        f"{collapse_verdict(record)}",
        collapse_chart(record),
        collapse_table(record),
        "A looped block's update is summed over its visits and read back by all of them. DeepLoop "
        "answers with alpha = (2N)^p on the skip and beta = (8N)^-p in the initial branch "
        "matrices: the larger p is, the less of an update reaches the stream. How often token states "
        "merge depends on p, on the depth, on the seed and on how fast the rate rises; "
        "docs/results/demo-collapse counts it over seeds.",
        command("deeploop demo --collapse"),
    ]


def made_by(record: Record) -> str:
    return (
        f"deeploop {record['deeploop']}, torch {record['torch']}, seed {record['seed']}; "
        f"{record['seconds']:.0f} s for what this call trained and evaluated."
    )
