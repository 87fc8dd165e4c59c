"""Render votes on ARC tasks as one self-contained page: input, expected answer and the best votes."""

import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.files import write_text
from deeploop.paper.published import ARC, VOTES
from deeploop.report.page import Html, Part, Section, note, page
from deeploop.report.tables import HERE, Table
from deeploop.tasks.puzzles.test_time import Question, TaskVotes
from deeploop.tasks.puzzles.voting import Vote
from deeploop.terminal import printable

VOTES_SHOWN = 3
# ARC's colours 0 … 9, as on its website.
COLOURS = (
    "#000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00", "#aaa", "#f012be", "#ff851b", "#7fdbff", "#870c25"
)  # fmt: skip
SIZE, LARGEST_CELL = 176, 18  # pixels of a grid's longer side, and of a cell
STYLE = (
    """
:root { --right: #1a7f37; --wrong: #b42318; --card: #f7f7f8; --rule: #8886; }
@media (prefers-color-scheme: dark) { :root { --right: #4cc06a; --wrong: #ff8070; --card: #1f1f23; } }
article { background: var(--card); border-radius: .6rem; padding: .7rem 1rem 1rem; margin: 1rem 0; }
article h3 { margin: .1rem 0 .5rem; display: flex; flex-wrap: wrap; gap: .1rem .8rem; align-items: baseline; }
article h3 span { font-weight: 400; font-size: .9rem; color: var(--mute); }
.question { display: flex; flex-wrap: wrap; gap: .9rem 1.2rem; align-items: flex-start; margin: .6rem 0; }
.question + .question { border-top: 1px solid var(--line); padding-top: .9rem; }
.grid { font-size: .8rem; line-height: 1.35; color: var(--mute); max-width: 100%; }
.grid b { font-weight: 600; color: var(--ink); display: block; }
.grid svg { display: block; margin: .3rem 0; outline: 2px solid var(--line); max-width: 100%; height: auto; }
.right svg { outline-color: var(--right); } .right b { color: var(--right); }
.wrong svg { outline-color: var(--wrong); } .wrong b { color: var(--wrong); }
.asked { border-right: 1px solid var(--line); padding-right: 1.2rem; }
@media (max-width: 40rem) {
  .asked { border: 0; padding: 0; }
  .grid { max-width: calc(50% - .6rem); } /* input and expected answer side by side */
}
.empty { width: 4rem; height: 4rem; margin: .3rem 0; border: 2px dashed var(--wrong); }
path { stroke-width: 0; } .lines { fill: none; stroke: #777; stroke-width: .05; stroke-opacity: .7; }
.off { fill: #fff; stroke: #000; stroke-width: .09; }
"""
    + " ".join(f".c{index} {{ fill: {colour}; }}" for index, colour in enumerate(COLOURS))
    + "\n"
)

NEVER, LATER, FIRST = "Right answer not among the votes", "Right answer behind others", "Right answer first"


def write(folder: Path, record: dict[str, Any], tasks: Sequence[TaskVotes], count: int) -> Path:
    """Write gallery.html with `count` tasks, some of each outcome, failures first."""
    sections = choose(by_outcome(tasks), count)
    head: list[Part] = [summary(record), ladder(record)]
    if record["deviations"]:
        head.append(note(f"Deviates from the paper's evaluation: {'; '.join(record['deviations'])}."))
    totals = {title: len(own) for title, own in by_outcome(tasks).items()}
    votes = [
        Section(title, [note(f"{len(own)} of {totals[title]} tasks. {ORDERED[title]}"), *map(task_card, own)])
        for title, own in sections.items()
    ]
    text = page(f"Votes of {folder.name} on ARC", [Section("", head), *votes], style=STYLE, contents=True)
    write_text(folder / "gallery.html", text)
    return folder / "gallery.html"


def ladder(record: dict[str, Any]) -> Table:
    """Tasks solved by the best K answers, above the paper's Table 3 (ARC-AGI-1)."""
    names = {"hrm": "paper, ARC-AGI-1: HRM", "hrm-deeploop": "paper, ARC-AGI-1: DeepLoop"}
    rows = [[HERE, *(f"{100 * record['ladder'][str(K)]:.2f}" for K in VOTES)]]
    rows += [[name, *(ARC[key, K].printed for K in VOTES)] for key, name in names.items()]
    return Table("ladder", "", ["tasks solved, %", *(f"K={K}" for K in VOTES)], rows)


def summary(record: dict[str, Any]) -> str:
    more = record.get("test_time") or {}
    order = "most votes first, then the higher mean σ(q_halt)"
    if more.get("choose") == "q":
        order = "by the highest σ(q_halt)"
    starts = f" from {count:,} first states" if (count := more.get("starts", 1)) > 1 else ""
    return (
        f"{record['model'].upper()} at {record['checkpoint']}: {record['tasks']} tasks with "
        f"{record['inputs']} test inputs, up to {record['most_views']:,} views of each{starts}, "
        f"{record['examples']:,} answers in all, of which {record['exact']:.1%} are right by themselves. A "
        "task is solved at K when the right answer to each of its test inputs is among the best K: "
        f"{order}, here called confidence. A small square marks a cell that differs from the "
        "expected answer."
    )


# ── Which tasks ─────────────────────────────────────────────────────────────────────────────────────────
ORDERED = {
    NEVER: "Those most agreed upon come first.",
    LATER: "Those nearest to the first place come first.",
    FIRST: "Those least agreed upon come first.",
}


def by_outcome(tasks: Iterable[TaskVotes]) -> dict[str, list[TaskVotes]]:
    """Group the tasks by the rank of the right answer, each group in an order worth reading."""
    groups: dict[str, list[TaskVotes]] = {NEVER: [], LATER: [], FIRST: []}
    for task in tasks:
        groups[NEVER if task.needed is None else FIRST if task.needed == 1 else LATER].append(task)
    groups[NEVER].sort(key=lambda task: -agreement(task))
    groups[LATER].sort(key=lambda task: task.needed or 0)
    groups[FIRST].sort(key=agreement)
    return groups


def agreement(task: TaskVotes) -> float:
    """Share of the votes for the first answer; with several inputs, the smallest."""
    return min(question.best[0].count for question in task.questions) / task.votes


def choose(groups: dict[str, list[TaskVotes]], count: int) -> dict[str, list[TaskVotes]]:
    """Take `count` tasks from the groups in turns."""
    turns = chain(*zip_longest(*([(title, task) for task in own] for title, own in groups.items())))
    taken = [turn for turn in turns if turn is not None][:count]
    chosen = {title: [task for name, task in taken if name == title] for title in groups}
    return {title: own for title, own in chosen.items() if own}


# ── One task ────────────────────────────────────────────────────────────────────────────────────────────
def task_card(task: TaskVotes) -> Html:
    outcome = "not solved at any K" if task.needed is None else f"solved from K = {task.needed:,}"
    inputs = f"{len(task.questions)} test inputs, " if len(task.questions) > 1 else ""
    rows = "\n".join(question_row(question, task.votes) for question in task.questions)
    heading = f"<h3>{html.escape(task.name)} <span>{outcome}; {inputs}{task.votes:,} votes</span></h3>"
    return Html(f"<article>{heading}\n{rows}</article>")


def question_row(question: Question, count: int) -> str:
    cell = cell_size(question.expected)  # used for the votes too, unless they are larger
    given = question.answers
    place = f"place {question.place:,} of {given:,}" if question.place else f"not among the {given:,} given"
    asked = [
        figure(question.input, "input", [size(question.input)], LARGEST_CELL),
        figure(question.expected, "expected", [size(question.expected), place], cell, kind="asked"),
    ]
    votes = [
        vote_figure(number, vote, question.expected, count, cell)
        for number, vote in enumerate(question.best, 1)
    ]
    return f'<div class="question">{"".join([*asked, *votes])}</div>'


def vote_figure(number: int, vote: Vote, expected: np.ndarray, count: int, cell: float) -> str:
    lines = [f"{vote.count:,} of {count:,} votes", f"confidence {vote.confidence:.3f}"]
    if np.array_equal(vote.grid, expected):
        return figure(vote.grid, f"{number} ✓ right", lines, cell, kind="right")
    differs = None
    if vote.grid.shape == expected.shape:
        differs = vote.grid != expected
        lines.append(f"{differs.sum()} of {differs.size} cells differ")
    else:
        lines.append(f"{size(vote.grid)}, not {size(expected)}" if vote.grid.size else "no grid")
    return figure(vote.grid, f"{number} ✗ wrong", lines, cell, kind="wrong", marked=differs)


def size(grid: np.ndarray) -> str:
    return f"{grid.shape[0]} × {grid.shape[1]}"


def cell_size(grid: np.ndarray, most: float = LARGEST_CELL) -> float:
    """Pixels per cell such that the grid fits."""
    return min(most, SIZE / max(grid.shape))


def figure(
    grid: np.ndarray,
    title: str,
    lines: Sequence[str],
    cell: float,
    *,
    kind: str = "",
    marked: np.ndarray | None = None,
) -> str:
    drawn = draw(grid, title, cell_size(grid, cell), marked) if grid.size else '<div class="empty"></div>'
    text = "<br>".join(map(html.escape, lines))
    return f'<div class="grid {kind}"><b>{html.escape(title)}</b>{drawn}{text}</div>'


def draw(grid: np.ndarray, title: str, cell: float, marked: np.ndarray | None = None) -> str:
    """Draw a grid of colours as SVG: one path per colour, made of runs along the rows."""
    height, width = grid.shape
    paths = [f'<path class="c{colour}" d="{runs(grid == colour)}"/>' for colour in np.unique(grid)]
    paths.append(lines_between(height, width))
    if marked is not None:
        dots = "".join(f"M{x}.35 {y}.35h.3v.3h-.3z" for y, x in np.argwhere(marked))
        paths.append(f'<path class="off" d="{dots}"/>')
    return svg(paths, title, grid.shape, cell)


def draw_symbols(symbols: np.ndarray, title: str, marks: Mapping[str, np.ndarray]) -> str:
    """Draw a grid of strings as SVG, with the cells of each mask in the colour of its class."""
    paths = [f'<path class="{name}" d="{runs(mask)}"/>' for name, mask in marks.items() if mask.any()]
    paths.append(lines_between(*symbols.shape))
    paths += [
        f'<text x="{x}.5" y="{y}.5">{html.escape(printable(str(text)))}</text>'
        for (y, x), text in np.ndenumerate(symbols)
        if text
    ]
    return svg(paths, title, symbols.shape, cell=32)


def lines_between(height: int, width: int) -> str:
    """Draw the lines between cells."""
    lines = "".join(
        [f"M0 {y}h{width}" for y in range(1, height)] + [f"M{x} 0v{height}" for x in range(1, width)]
    )
    return f'<path class="lines" d="{lines}"/>'


def svg(paths: Sequence[str], title: str, shape: tuple[int, ...], cell: float) -> str:
    """Wrap trusted markup in a labelled SVG; `cell` is in pixels."""
    height, width = shape
    label = html.escape(f"{title}, {height} × {width}")
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" '
        f'width="{width * cell:.0f}" height="{height * cell:.0f}" shape-rendering="crispEdges">'
        f"{''.join(paths)}</svg>"
    )


def runs(mask: np.ndarray) -> str:
    """The SVG path of the cells in a mask, one rectangle per run along a row."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    return "".join(f"M{x} {y}h{end - x}v1h-{end - x}z" for (y, x), (_, end) in zip(starts, ends, strict=True))
