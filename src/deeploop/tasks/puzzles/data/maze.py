"""Mazes: a random layout, a start, a goal, and the shortest path between them as the answer.

Rooms are at even rows and columns. A depth-first walk connects them, and one in ten of the walls between
neighbouring rooms is removed as well, so that there are alternative paths. The goal is a cell far enough from
the start to which exactly one shortest path leads: there are no ties, and a rotated maze has the turned
answer. Tokens: 0 pad (never used), 1 `#` wall, 2 space, 3 `S` start, 4 `G` goal, 5 `o` path.
"""

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.draws import keys, orders, words
from deeploop.tasks.puzzles.data.dihedral import turn
from deeploop.tasks.puzzles.data.generated import Candidate, build_generated, check_counts
from deeploop.tasks.puzzles.data.sets import PuzzleSet

VERSION = 1
WALL, SPACE, START, GOAL, PATH = range(1, 6)
VOCABULARY = 6
LOOPS = 10  # one wall in so many is removed
STEPS = ((-1, 0), (0, -1), (0, 1), (1, 0))


def layout(size: int, key: np.ndarray) -> np.ndarray:
    """A random maze without start and goal: (size, size) of WALL and SPACE."""
    rooms = (size + 1) // 2
    drawn = words(key, np.arange(rooms**2), 6)
    grid = np.full((size, size), WALL, dtype=np.uint8)
    # Remove walls below and to the right of rooms; the walk then visits only unvisited rooms.
    for room, (down, right) in enumerate((drawn[:, 4:] % np.uint64(LOOPS) == 0).tolist()):
        row, column = divmod(room, rooms)
        if down and row + 1 < rooms:
            grid[2 * row + 1, 2 * column] = SPACE
        if right and column + 1 < rooms:
            grid[2 * row, 2 * column + 1] = SPACE
    ways = [iter(order) for order in orders(drawn[:, :4]).tolist()]
    stack = [(0, 0)]
    grid[0, 0] = SPACE
    while stack:
        row, column = stack[-1]
        way = next(ways[row * rooms + column], None)
        if way is None:
            stack.pop()
            continue
        down, right = STEPS[way]
        there = row + down, column + right
        if min(there) >= 0 and max(there) < rooms and grid[2 * there[0], 2 * there[1]] == WALL:
            grid[2 * row + down, 2 * column + right] = grid[2 * there[0], 2 * there[1]] = SPACE
            stack.append(there)
    return grid


def distances(walls: np.ndarray, start: int) -> tuple[list[int], list[int]]:
    """Steps from `start` to each cell (-1: unreachable), and the number of shortest paths to it."""
    size = len(walls)
    closed = np.pad(walls, 1, constant_values=True)  # a border, so that no step leaves the board
    width = size + 2
    blocked = closed.reshape(-1).tolist()
    away, paths = [-1] * width**2, [0] * width**2
    first = start // size * width + start % size + width + 1
    away[first], paths[first] = 0, 1
    queue = deque([first])
    while queue:
        cell = queue.popleft()
        for there in (cell - width, cell - 1, cell + 1, cell + width):
            if not blocked[there]:
                if away[there] < 0:
                    away[there] = away[cell] + 1
                    queue.append(there)
                if away[there] == away[cell] + 1:
                    paths[there] += paths[cell]
    inner = np.arange(width**2).reshape(width, width)[1:-1, 1:-1].reshape(-1).tolist()
    return [away[cell] for cell in inner], [paths[cell] for cell in inner]


def make_mazes(numbers: range, *, size: int, min_path: int, seed: int) -> list[Candidate]:
    """Make the numbered mazes of a seed, and keep those whose goal is far enough away."""
    made = []
    for number in numbers:
        layout_key, end_key = keys(seed, number, count=2)
        inputs = layout(size, layout_key)
        walls = inputs == WALL
        one, other = words(end_key, np.array([0]), 2)[0].tolist()
        open_cells = np.flatnonzero(~walls).tolist()
        start = open_cells[one % len(open_cells)]
        away, paths = distances(walls, start)
        goals = [cell for cell in open_cells if away[cell] >= min_path and paths[cell] == 1]
        if goals:
            goal = goals[other % len(goals)]
            labels = inputs.copy()
            labels.reshape(-1)[_way_back(away, goal, size)] = PATH
            for grid in (inputs, labels):
                grid.reshape(-1)[[start, goal]] = START, GOAL
            group = min(turn(walls, move).tobytes() for move in range(8))
            made.append(Candidate(inputs.reshape(-1), labels.reshape(-1), away[goal], group))
    return made


def _way_back(away: list[int], cell: int, size: int) -> list[int]:
    """The cells of the unique shortest path to `cell`, including both ends."""
    path = [cell]
    while away[cell]:
        row, column = divmod(cell, size)
        near = [(row + down, column + right) for down, right in STEPS]
        inside = [r * size + c for r, c in near if 0 <= r < size and 0 <= c < size]
        cell = next(there for there in inside if away[there] == away[cell] - 1)
        path.append(cell)
    return path


def build_maze(out: Path, *, workers: int = 1, **asked: Any) -> PuzzleSet:
    """Generate a set of mazes with these `maze_settings`; independent of the number of workers."""
    build = maze_settings(**asked)
    make = partial(make_mazes, size=build["size"], min_path=build["min_path"], seed=build["seed"])
    return build_generated(out, make, build, kind="maze", vocabulary=VOCABULARY, workers=workers)


def maze_settings(
    size: int = 30, train: int = 1000, test: int = 1000, min_path: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """The settings that determine the content of a build, as in puzzles.json."""
    if not 5 <= size <= 255:
        raise ValueError(f"size {size}: must be between 5 and 255")
    min_path = size if min_path is None else min_path
    if not 1 <= min_path < size**2 // 2:
        raise ValueError(f"min_path {min_path}: must be at least 1 and below half the {size**2} cells")
    check_counts(train, test)
    asked = {"size": size, "train": train, "test": test, "min_path": min_path, "seed": seed}
    return {"builder": "maze", "version": VERSION, **asked}
