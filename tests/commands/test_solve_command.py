"""`deeploop solve`: the boards after each segment, what is marked in them, the page, and mistakes."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from deeploop.cli import main
from deeploop.config.loop import HaltingConfig
from deeploop.config.optim import ReasonerOptimConfig
from deeploop.config.run import DeviceConfig
from deeploop.models.halting import solve
from deeploop.models.reasoner_config import TRMConfig
from deeploop.tasks.puzzles.config import PuzzleDataConfig, TRMTrainConfig
from deeploop.tasks.puzzles.data.board_text import BoardText
from deeploop.tasks.puzzles.data.maze import build_maze
from deeploop.tasks.puzzles.data.pairs import PairsFile, build_pairs
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.tasks.puzzles.data.sudoku import solve as solve_sudoku
from deeploop.tasks.puzzles.load import load_reasoner
from deeploop.tasks.puzzles.scoring import Step
from deeploop.tasks.puzzles.solve import RED, compare, printed, verdict, write
from deeploop.train.loop import train

MODEL = TRMConfig(width=16, heads=2, hidden=32, cycles=1, low_cycles=1, blocks=1, puzzle_positions=1)


def train_run(out, puzzles):
    train(
        TRMTrainConfig(
            out=out, model=MODEL, data=PuzzleDataConfig(path=puzzles),
            optim=ReasonerOptimConfig(steps=3, batch=4, warmup_steps=1, ema=0.5),
            halting=HaltingConfig(segments=3, learn_continue=False), device=DeviceConfig(kind="cpu"),
        )
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def sudoku(tmp_path_factory):
    """A run on 4 × 4 Sudoku, and a puzzle with its answer."""
    root = tmp_path_factory.mktemp("solve")
    puzzles = build_sudoku(root / "sudoku", size=4, train=20, test=5)
    board = puzzles.test.inputs[0] - np.uint8(1)
    return train_run(root / "run", root / "sudoku"), "".join(map(str, board)).replace("0", ".")


@pytest.fixture
def say(capsys):
    def call(*words):
        code = main(["solve", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err.removeprefix("deeploop solve: error: ").strip()

    return call


def boards_of(out):
    """The cells of each printed 4 × 4 board: symbol, mark of what is wrong, mark of what changed."""
    parts = re.split(r"segment \d+ of \d+: .*\n", out)[1:]
    lines = [line.ljust(18) for part in parts for line in part.splitlines()[:4]]
    cells = [tuple(line[2 + 4 * n : 5 + 4 * n]) for line in lines for n in range(4)]
    return [cells[first : first + 16] for first in range(0, len(cells), 16)]


def test_every_segment_is_printed_and_marked(sudoku, say):
    """Marks are computed anew from the printed boards alone; the last board is that of `models.solve`."""
    run, puzzle = sudoku
    code, out, err = say(run, puzzle)
    assert (code, err) == (0, "")
    digits = np.array([int(c) for c in puzzle.replace(".", "0")], np.uint8)
    (answer,), _ = solve_sudoku(digits)
    before = puzzle
    boards = boards_of(out)
    assert len(boards) == 3
    for cells in boards:
        now = "".join(symbol for symbol, *_ in cells)
        expected = "".join(map(str, answer))
        assert [wrong == "!" for _, wrong, _ in cells] == [a != b for a, b in zip(now, expected, strict=True)]
        assert [mark == "*" for *_, mark in cells] == [a != b for a, b in zip(now, before, strict=True)]
        before = now
    model, config = load_reasoner(run)
    ids = torch.zeros(1, dtype=torch.long)
    inputs = torch.from_numpy(digits[None] + 1).long()
    halting, carry = config.halting, model.initial(1)
    (last,) = solve(model, carry, inputs, model.puzzle_rows(ids), halting, [halting.segments])
    assert before == "".join(" .1234"[token] for token in last.tokens[0].tolist())
    assert f"written: {run / 'solve.html'}" in out
    assert "\x1b" not in out
    page = (run / "solve.html").read_text()
    assert page.count('type="radio"') == 3
    assert page.count("<svg") == 4
    assert "<script" not in page


def test_grids_and_more_segments(sudoku, say, tmp_path):
    """A JSON grid of numbers is the same puzzle; further segments do not change the first ones."""
    run, puzzle = sudoku
    digits = [int(c) for c in puzzle.replace(".", "0")]
    grid = json.dumps([digits[n : n + 4] for n in range(0, 16, 4)])
    out = boards_of(say(run, puzzle, "--out", tmp_path / "a.html")[1])
    more = boards_of(say(run, grid, "--segments", 5, "--out", tmp_path / "b.html")[1])
    assert len(more) == 5
    assert more[:3] == out


@pytest.mark.parametrize(
    ("puzzle", "message"),
    [
        ("12", "puzzle: 2 cells, must be 4 × 4 = 16"),
        ("x" * 16, "puzzle: symbol 'x': must be one of . 1 2 3 4 0"),
        ("11" + "." * 14, "puzzle: has no answer"),
        ("." * 16, "puzzle: has more than one answer"),
        ("[[1, 2], [3]]", "puzzle: rows have 1 to 2 cells; must be equally long"),
        ("", "puzzle: is empty"),
        (
            "[1, x]",
            "puzzle: not JSON: Expecting value: column 5 (char 4); symbols that are letters need quotes",
        ),
    ],
)
def test_mistakes_are_one_line(sudoku, say, puzzle, message):
    assert say(sudoku[0], puzzle) == (2, "", message)


def board(rows):
    return np.array([[int(c) for c in row] for row in rows], np.uint8).reshape(-1)


TEXT = BoardText((2, 2), (2, 2), {1: ".", 2: "1", 3: "2"}, {}, full=True)
STEPS = [Step(board(["32", "33"]), 0.2, False), Step(board(["32", "23"]), 0.9, True)]


def test_marks_and_colours():
    boards = compare(TEXT, board(["31", "13"]), board(["32", "23"]), STEPS)
    assert [one.title(2) for one in boards] == [
        "segment 1 of 2: 2 cells changed, 1 wrong, confidence 0.20",
        "segment 2 of 2: 1 cells changed, 0 wrong, confidence 0.90, would halt",
    ]
    assert printed(boards[0], colours=False) == "  2   1 *\n  2!* 2"
    assert printed(boards[0], colours=True).count(RED) == 1
    assert verdict(boards, False)[-1] == "solved"
    assert verdict(boards[:1], False)[-1] == "not solved: 1 cells wrong"
    blind = compare(TEXT, board(["31", "13"]), None, STEPS)
    assert not blind[0].wrong.any()
    assert verdict(blind, False) == ["*: changed in this segment"]


def test_of_pairs_only_cells_that_agree_with_the_puzzle_are_grey(tmp_path):
    """In pairs "." and 0 are ordinary symbols, and an answer may change every cell."""
    puzzle = board(["33", "13"])
    wanted = {True: ([[1, 1], [0, 1]], "given", 3), False: ([[1, 0], [0, 1]], "as in the puzzle", 2)}
    for full, (given, legend, count) in wanted.items():
        text = replace(TEXT, full=full)
        boards = compare(text, puzzle, None, STEPS)
        assert boards[0].given.tolist() == given
        page = write(tmp_path / "solve.html", "run", text, puzzle, boards).read_text()
        assert f"Grey: {legend}. Green" in page
        assert page.count('<path class="given"') == count  # of pairs, not in the puzzle's own picture


def test_colours_only_on_a_terminal(sudoku, say, monkeypatch):
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert RED in say(*sudoku)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert RED not in say(*sudoku)[1]


def test_pairs_show_the_outputs_part(tmp_path, say):
    """Inputs are 2 × 2, outputs 1 × 2: one row is shown; symbols are escaped in the page."""
    lines = [{"input": [["<", n], [n, n]], "output": [[n, "<"]]} for n in range(6)]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    puzzles = build_pairs(PairsFile(file), tmp_path / "set")
    text = BoardText.of(puzzles)
    assert text.encode('[["<", 1]]').tolist() == [8, 3, 0, 0]
    run = train_run(tmp_path / "run", tmp_path / "set")
    code, out, _ = say(run, '[["<", 3], [3, 3]]', "--answer", '[[3, "<"]]')
    assert code == 0
    assert "solved" in out
    assert len(re.findall(r"segment \d of 3: .*wrong.*\n  .*\n\n", out)) == 3
    assert "&lt;</text>" in (run / "solve.html").read_text()
    assert say(run, "[[1, 2, 3]]")[2].startswith("puzzle: 1 × 3 cells, the board has 2 × 2")


def test_rows_of_pairs_in_one_line(tmp_path):
    """A line of rows × columns cells fills the board; another is told how to separate rows."""
    file = tmp_path / "mine.jsonl"
    file.write_text('{"input": "abc\\nabc", "output": "a"}\n{"input": "c", "output": "b"}\n')
    text = BoardText.of(build_pairs(PairsFile(file), tmp_path / "set"))
    rows = [2, 3, 4, 4, 3, 2]
    for same in ("abc\ncba", "abccba", '["a", "b", "c", "c", "b", "a"]'):
        assert text.encode(same).tolist() == rows
    how = r"separate rows by line breaks \(\$'ab\\ncd'\), or give a JSON grid$"
    for wrong in ("abca", r"abc\ncba"):
        with pytest.raises(ValueError, match=rf"puzzle: 1 × \d cells, the board has 2 × 3; {how}"):
            text.encode(wrong)
    with pytest.raises(ValueError, match=r"puzzle: 3 × 1 cells, the board has 2 × 3$"):
        text.encode("a\nb\nc")


def test_text_of_mazes(tmp_path):
    puzzles = build_maze(tmp_path / "maze", size=6, train=4, test=1)
    text = BoardText.of(puzzles)
    tokens = puzzles.test.inputs[0]
    rows = ["".join(row) for row in text.text(text.grid(tokens))]
    np.testing.assert_array_equal(text.encode("\n".join(rows)), tokens)
    np.testing.assert_array_equal(text.encode("".join(rows)), tokens)


def test_the_page_shows_one_board_at_a_time(browse, tmp_path):
    boards = compare(TEXT, board(["31", "13"]), board(["32", "23"]), STEPS)
    path = write(tmp_path / "solve.html", "run", TEXT, board(["31", "13"]), boards)
    dom, console = browse(path, "--dump-dom")
    assert console == []
    assert dom.count("<svg") == 3
