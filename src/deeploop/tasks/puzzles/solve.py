"""Show one puzzle's board after each segment, on the terminal and as an interactive page."""

import html
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deeploop.files import write_text
from deeploop.report.page import Html, Section, note, page
from deeploop.runs.folder import require_checkpoint
from deeploop.tasks.puzzles import gallery
from deeploop.tasks.puzzles.data.board_text import BoardText
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku import solve as solve_sudoku
from deeploop.tasks.puzzles.data.sudoku_symmetry import BLANK
from deeploop.tasks.puzzles.evaluate import matching_puzzles, open_solver
from deeploop.tasks.puzzles.options import ReasonerOptions, SolveArgs
from deeploop.tasks.puzzles.scoring import Step, trace
from deeploop.terminal import GREEN, RED, RESET, printable

STYLE = """
.steps input { position: absolute; opacity: 0; }
.steps label { display: inline-block; padding: .1rem .6rem; border: 1px solid var(--line); cursor: pointer; }
.steps .grid { display: none; margin-top: 1rem; }
.steps input:focus-visible + label { outline: 2px solid var(--ink); }
.steps input:checked + label { background: var(--ink); color: var(--paper); }
.given { fill: color-mix(in srgb, var(--ink) 14%, transparent); }
.changed { fill: color-mix(in srgb, var(--right) 40%, transparent); }
.off-cell { fill: color-mix(in srgb, var(--wrong) 45%, transparent); }
text { fill: var(--ink); font: .6px system-ui, sans-serif; text-anchor: middle; dominant-baseline: central; }
"""


@dataclass(frozen=True)
class Board:
    """The answer after a segment, as grids of the same size."""

    number: int
    symbols: np.ndarray
    changed: np.ndarray  # in this segment
    wrong: np.ndarray
    given: np.ndarray  # part of the puzzle; of pairs, equal to the puzzle's cell
    known: bool  # True if the right answer is
    step: Step

    def title(self, count: int) -> str:
        """Describe the segment in one line."""
        wrong = f", {self.wrong.sum()} wrong" if self.known else ""
        halts = ", would halt" if self.step.halts else ""
        what = f"{self.changed.sum()} cells changed{wrong}, confidence {self.step.confidence:.2f}{halts}"
        return f"segment {self.number} of {count}: {what}"


def run(args: SolveArgs) -> str:
    """Solve the puzzle, write the page, and return the text to print."""
    checkpoint = require_checkpoint(args.run)
    puzzles = matching_puzzles(args.run, args.data, checkpoint)
    text = BoardText.of(puzzles)
    inputs = text.encode(args.puzzle)
    answer = right_answer(puzzles, inputs) if args.answer is None else text.encode(args.answer, "answer")
    with open_solver(args.run, ReasonerOptions(), args.device, checkpoint) as solver:
        steps = trace(solver, inputs, args.segments or solver.config.segments)
    boards = compare(text, inputs, answer, steps)
    path = write(args.out or args.run / "solve.html", args.run.name, text, inputs, boards)
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    parts = [f"{board.title(len(boards))}\n{printed(board, colours)}" for board in boards]
    return "\n\n".join([*parts, *verdict(boards, colours), f"written: {path}"])


def right_answer(puzzles: PuzzleSet, inputs: np.ndarray) -> np.ndarray | None:
    """The unique answer of a Sudoku; None for other puzzles."""
    if puzzles.kind != "sudoku":
        return None
    solutions, _ = solve_sudoku(inputs - np.uint8(BLANK))
    if len(solutions) != 1:
        raise ValueError(f"puzzle: has {'more than one' if solutions else 'no'} answer")
    return solutions[0] + np.uint8(BLANK)


def compare(text: BoardText, inputs: np.ndarray, answer: np.ndarray | None, steps: list[Step]) -> list[Board]:
    """Compare the board of each step with the one before and with the right answer."""
    before, boards = text.text(text.grid(inputs)), []
    puzzle, given = before, clues(text, before)
    expected = before if answer is None else text.text(text.grid(answer))
    for number, step in enumerate(steps, start=1):
        now = text.text(text.grid(step.tokens))
        wrong = (now != expected) & (answer is not None)
        grey = given if text.full else (now == puzzle) & (now != "")
        boards.append(Board(number, now, now != before, wrong, grey, answer is not None, step))
        before = now
    return boards


def clues(text: BoardText, puzzle: np.ndarray) -> np.ndarray:
    """The cells that an answer may not change; of pairs none, whose symbols have no known meaning."""
    return (puzzle != "") & (puzzle != ".") & text.full


def printed(board: Board, colours: bool) -> str:
    """Format the board for a terminal: in colours, or with marks after changed (*) and wrong (!) cells."""
    width = max(1, *map(len, board.symbols.reshape(-1)))

    def cell(place: tuple[int, int]) -> str:
        text = printable(str(board.symbols[place])).rjust(width)
        changed, wrong = board.changed[place], board.wrong[place]
        if colours:
            return f"{RED if wrong else GREEN}{text}{RESET}" if changed or wrong else text
        return f"{text}{'!' if wrong else ' '}{'*' if changed else ' '}"

    rows, columns = board.symbols.shape
    return "\n".join("  " + " ".join(cell((r, c)) for c in range(columns)).rstrip() for r in range(rows))


def verdict(boards: list[Board], colours: bool) -> list[str]:
    """Explain the marks, and say whether the last board is right."""
    marks = "red: wrong, green: changed" if colours else "*: changed in this segment"
    if not boards[-1].known:
        return [marks]
    ending = "solved" if not boards[-1].wrong.any() else f"not solved: {boards[-1].wrong.sum()} cells wrong"
    return [marks if colours else f"{marks}, !: wrong", ending]


# ── The page ────────────────────────────────────────────────────────────────────────────────────────────
def write(path: Path, name: str, text: BoardText, inputs: np.ndarray, boards: list[Board]) -> Path:
    """Write the page: the puzzle, and a button for each segment."""
    puzzle = text.text(text.grid(inputs, whole=True))
    drawn = gallery.draw_symbols(puzzle, "puzzle", {"given": clues(text, puzzle)})
    last = len(boards)
    choose = "".join(
        f'<input type="radio" name="step" id="step{board.number}"{" checked" * (board.number == last)}>'
        f'<label for="step{board.number}">{board.number}</label> '
        for board in boards
    )
    pictures = "".join(picture(board, last) for board in boards)
    shown = "\n".join(
        f"#step{board.number}:checked ~ .at{board.number} {{ display: block; }}" for board in boards
    )
    grey = "given" if text.full else "as in the puzzle"
    parts = [
        note(f"Grey: {grey}. Green: changed in this segment. Red: wrong. Arrow keys step through segments."),
        Html(f'<div class="grid"><b>puzzle</b>{drawn}</div>'),
        Html(f'<div class="steps">{choose}{pictures}</div>'),
    ]
    style = gallery.STYLE + STYLE + shown
    write_text(path, page(f"{name} solves a puzzle", [Section("", parts)], style=style))
    return path


def picture(board: Board, count: int) -> str:
    """One board with its title."""
    marks = {"given": board.given, "changed": board.changed & ~board.wrong, "off-cell": board.wrong}
    title = board.title(count)
    drawn = gallery.draw_symbols(board.symbols, title, marks)
    return f'<div class="grid at{board.number}"><b>{html.escape(title)}</b>{drawn}</div>'
