"""The table, the sentences and the page of `deeploop demo`, all from what was measured. No torch."""

import json
import textwrap
from pathlib import Path
from typing import Any

from deeploop.files import parse_json, write_json, write_text
from deeploop.report import collapse, demo_figures, page, plots
from deeploop.report.beyond import RIGHT, goes_on

TABLE = (1, 2, 3, 4, 9, 13, 24, 77, 127, 200)
"""Steps of the table. Beyond four none is a power of two, where most cells are back at where they started."""
FAR = TABLE[-2:]
NAMES = {"pre-norm": "The pre-norm loop", "stack": "The stack without a loop"}

Record = dict[str, Any]


def introduction(trained: int, longest: int) -> str:
    """What the terminal says first."""
    return (
        f"Three small models learn 1 to {trained} steps of a cellular automaton and are then asked for "
        f"{longest}.\nA loop takes one round per step; a stack is told the number of steps."
    )


def write(out: Path, record: Record, collapsed: Record) -> str:
    """Writes demo.json, picture and page into `out`; returns what to print."""
    write_json(out / "demo.json", record)
    record = parse_json(json.dumps(record))  # as it is read back: keys are text
    figure = demo_figures.tapes(record)
    plots.save_png(figure, out / "demo.png")
    write_text(out / "index.html", make_page(record, figure, collapsed))
    return (
        f"\n{page.text_table(HEADER, table_rows(record))}\n\n{textwrap.fill(verdict(record), 100)}\n\n"
        f"page     {out / 'index.html'}\npicture  {out / 'demo.png'}\nnumbers  {out / 'demo.json'}"
    )


HEADER = ("share of cells right after", *(f"{h} step" if h == 1 else str(h) for h in TABLE))


def table_rows(record: Record) -> list[tuple[str, ...]]:
    rows = [(name, *(f"{own['cells'][str(h)]:.3f}" for h in TABLE)) for name, own in record["models"].items()]
    copied = (record["copying"].get(str(h)) for h in TABLE)
    return [*rows, ("copying", *(page.MISSING if share is None else f"{share:.3f}" for share in copied))]


# ── Sentences ───────────────────────────────────────────────────────────────────────────────────────────
def verdict(record: Record) -> str:
    """What happened, in a few sentences; no claim where the models were hardly trained."""
    if record["quick"]:
        return "A quick look: few steps on short rows teach the models little, and nothing follows from it."
    others = (name for name in record["models"] if name != "flat")
    copied = percent(record["copying"][str(FAR[-1])])
    return " ".join(
        [
            of_flat(record),
            *(of_other(name, record) for name in others),
            f"Copying one of the first rows would have {copied} right at {FAR[-1]}.",
        ]
    )


def of_flat(record: Record) -> str:
    flat, trained = record["models"]["flat"], record["trained_steps"]
    near, far = (percent(flat["cells"][str(h)]) for h in FAR)
    shares = f"{near} of the cells right at {FAR[0]} steps and {far} at {FAR[1]}"
    if claim_holds(record):
        return f"Trained on 1 to {trained} steps, the flat loop has {shares}."
    if (most := reach(flat)) > trained:
        return f"With this seed the flat loop goes on rightly to {most} steps, not to {FAR[-1]}: {shares}."
    return f"With this seed the flat loop does not go on beyond its {trained} trained steps: {shares}."


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


# ── The page ────────────────────────────────────────────────────────────────────────────────────────────
STYLE = ".lead { font-size: 1.15rem; }"


def make_page(record: Record, figure: plots.Figure, collapsed: Record) -> str:
    trained, longest = record["trained_steps"], max(record["steps"])
    return page.page(
        f"Trained on {trained} steps, asked for {longest}",
        [
            f'<div class="lead">{page.paragraph(verdict(record))}</div>',
            page.figure(plots.inline_svg(figure), tapes_caption(record)),
            page.heading("How far each of them gets"),
            page.figure(plots.inline_svg(demo_figures.accuracy(record)), accuracy_caption(record)),
            page.table(HEADER, table_rows(record)),
            page.heading("What was trained"),
            page.paragraph(what_was_trained(record)),
            page.table(MODELS_HEADER, model_rows(record)),
            page.paragraph(
                "How often a block goes on, over seeds and rates, and what decides it: docs/depth.md."
            ),
            *collapse_section(collapsed),
            page.heading("Again, with another seed"),
            page.command(f"deeploop demo --seed {record['seed'] + 1}"),
            page.note(made_by(record)),
        ],
        STYLE,
    )


def tapes_caption(record: Record) -> str:
    says_neither = any("?" in state for own in record["models"].values() for state in own["states"])
    neither = ", palest where the answer is neither 0 nor 1" * says_neither
    return (
        f"One held-out row of {record['length']} cells, top to bottom, over {max(record['steps'])} steps, "
        "left to right: the truth, and below it what each model says. Wrong cells are red, paler where a 1 "
        f"is missing{neither}. Training saw only the shaded steps, 1 to {record['trained_steps']}, enlarged "
        "on the left."
    )


def accuracy_caption(record: Record) -> str:
    return (
        f"Share of cells right over {record['rows']} held-out rows against the number of steps; the trained "
        "ones are shaded. The dashed line copies the start or one of the first states, whichever is best: "
        "a model that stands still scores no more."
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


MODELS_HEADER = ("model", "what it is", "parameters", "peak rate", "noise", "training steps", "rows per step")


def model_rows(record: Record) -> list[tuple[str, ...]]:
    return [
        (
            name,
            own["title"],
            f"{own['parameters']:,}",
            f"{own['peak_lr']:g}",
            f"{own['noise']:g}",
            f"{own['optim_steps']:,}",
            str(own["batch"]),
        )
        for name, own in record["models"].items()
    ]


def collapse_section(record: Record) -> list[str]:
    floor = collapse.floor(record)
    return [
        page.heading("Looped depth can also collapse"),
        page.paragraph(
            f"Another experiment ({record['source']}): two stored blocks on the bytes of Python's standard "
            f"library, applied once and {collapse.looped(record)} times, with the same seed, data and "
            "schedule. Only the residual equation changes, and in one run the output bias. "
            f"{collapse.verdict(record)}"
        ),
        page.figure(
            plots.inline_svg(collapse.draw(record)),
            "Training loss (running mean of 5 readings) and mean cosine between token states. The dashed "
            f"line is the unigram floor, {floor:.3f} nats: a model whose positions all carry one state "
            "(similarity 1) cannot go below it.",
        ),
        page.table(collapse.HEADER, collapse.table_rows(record)),
        page.paragraph(
            "A looped block's update is summed over its visits and read back by all of them. DeepLoop "
            "answers with alpha = (2N)^p on the skip and beta = (8N)^-p in the initial branch "
            "matrices: the larger p is, the less of an update reaches the stream. How often token states "
            "merge depends on p, on the depth, on the seed and on how fast the rate rises; "
            "docs/results/demo-collapse counts it over seeds."
        ),
        page.command("deeploop demo --collapse"),
    ]


def made_by(record: Record) -> str:
    return (
        f"deeploop {record['deeploop']}, torch {record['torch']}, seed {record['seed']}; "
        f"{record['seconds']:.0f} s for what this call trained and evaluated."
    )
