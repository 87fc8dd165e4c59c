"""The gallery of votes in a real browser: it draws every grid in ARC's colours, light and dark."""

import re

import numpy as np
import pytest

from deeploop.tasks.puzzles import gallery as gallery
from deeploop.tasks.puzzles.test_time import Question, TaskVotes
from deeploop.tasks.puzzles.voting import Vote

RECORD = {
    "model": "hrm", "checkpoint": "step-00000007", "tasks": 4, "inputs": 5, "most_views": 9, "examples": 45,
    "exact": 0.2, "ladder": dict.fromkeys(("1", "2", "10", "100", "1000"), 0.25), "deviations": ["few tasks"],
}  # fmt: skip
EXPECTED = np.arange(10, dtype=np.uint8).reshape(2, 5)
WRONG = EXPECTED.copy()
WRONG[1, 2:] = 0
EMPTY = np.zeros((0, 0), dtype=np.uint8)


def task(name, *rows):
    """A row lists the grids of its votes, the best first."""
    questions = []
    for grids in rows:
        votes = [Vote(grid, 9 - index, 0.5) for index, grid in enumerate(grids)]
        place = next((i for i, grid in enumerate(grids, 1) if np.array_equal(grid, EXPECTED)), None)
        questions.append(Question(EXPECTED.T, EXPECTED, len(grids), place, votes))
    return TaskVotes(name, 9, questions)


TASKS = [
    task("first", [EXPECTED, WRONG]),
    task("later", [WRONG, EXPECTED]),
    task("<b>never</b>", [WRONG, EMPTY, EXPECTED.T]),
    task("half", [EXPECTED], [WRONG]),
]


def test_kinds_take_turns_up_to_the_number_asked_for():
    found = gallery.by_outcome(TASKS)
    assert {title: [one.name for one in own] for title, own in found.items()} == {
        gallery.NEVER: ["<b>never</b>", "half"],
        gallery.LATER: ["later"],
        gallery.FIRST: ["first"],
    }
    assert [len(own) for own in gallery.choose(found, 3).values()] == [1, 1, 1]
    assert [len(own) for own in gallery.choose(found, 99).values()] == [2, 1, 1]
    assert list(gallery.choose(found, 1)) == [gallery.NEVER]


def test_every_cell_is_drawn_once():
    """Runs of a colour cover exactly the cells that have it."""
    grid = np.random.default_rng(0).integers(0, 3, (7, 9))
    drawn = np.full(grid.shape, -1)
    for colour in range(3):
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", gallery.runs(grid == colour)):
            cells = (int(y), slice(int(x), int(x) + int(length)))
            assert (drawn[cells] == -1).all()
            drawn[cells] = colour
    np.testing.assert_array_equal(drawn, grid)


def test_it_draws(browse, tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = gallery.write(tmp_path, RECORD, TASKS, 99)
    dom, console = browse(path, "--dump-dom")
    assert console == []
    assert len(re.findall("<article", dom)) == 4
    assert len(re.findall('class="grid right"', dom)) == 3
    assert len(re.findall('class="grid wrong"', dom)) == 6
    assert "&lt;b&gt;never" in dom
    assert "3 of 10 cells differ" in dom
    papers = []
    for scheme in (0, 1):  # Blink's: dark, light
        picture = tmp_path / f"{scheme}.png"
        options = [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1280,1600"]
        browse(path, *options, f"--screenshot={picture}")
        with image.open(picture) as drawn:
            pixels = np.asarray(drawn.convert("RGB")).astype(int)
        papers.append(pixels[2, 2].mean())
        for colour in gallery.COLOURS:
            code = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
            rgb = [int(code[i : i + 2], 16) for i in (0, 2, 4)]
            assert (pixels == rgb).all(-1).sum() > 500, colour
    assert papers[0] < 60 < 200 < papers[1]
