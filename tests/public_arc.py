"""A folder as `build_arc_dataset.py` of HRM and TRM writes it, with grids placed one by one."""

import json

import numpy as np

from arc_views import augment

SEPARATORS = {"hrm": "_", "trm": "|||"}


def placed(grid, row, column):
    """Tokens (900,): colours from 2, end marks (1) below and right of the grid, the rest 0."""
    board = np.zeros((31, 31), np.uint8)  # with a margin for the end marks of grids that reach the edge
    height, width = grid.shape
    board[row + height, column : column + width] = board[row : row + height, column + width] = 1
    board[row : row + height, column : column + width] = grid + 2
    return board[:30, :30].reshape(-1)


def write_public(folder, tasks, kind="hrm", views=3, seed=0):
    """Write tasks {name: (train pairs, held-out pairs or None)} under views; return the names of the ids."""
    draw = np.random.default_rng(seed)
    names, splits = ["<blank>"], {split: [] for split in ("train", "test")}
    for name, (train, test) in tasks.items():
        own = [np.array([0, *range(10)])]
        own += [np.array([draw.integers(8), 0, *(1 + draw.permutation(9))]) for _ in range(views)]
        ids = range(len(names), len(names) + len(own))
        sep = SEPARATORS[kind]
        names += [name, *(f"{name}{sep}t{view[0]}{sep}{''.join(map(str, view[1:]))}" for view in own[1:])]
        for split, pairs in (("train", train), ("test", test or [])):
            shown = [[tuple(augment(grid, view) for grid in pair) for pair in pairs] for view in own]
            if pairs:
                splits[split].append(list(zip(ids, shown, strict=True)))
    for split, groups in splits.items():
        arrays = {name: [] for name in ("inputs", "labels", "puzzle_identifiers")}
        arrays |= {"puzzle_indices": [0], "group_indices": [0]}
        for group in groups:
            for own_id, pairs in group:
                stays = draw.integers(len(pairs))
                for number, pair in enumerate(pairs):
                    room = 31 - np.max([grid.shape for grid in pair], axis=0)
                    corner = draw.integers(room) if split == "train" and number != stays else (0, 0)
                    for name, grid in zip(("inputs", "labels"), pair, strict=True):
                        arrays[name].append(placed(grid, *corner))
                arrays["puzzle_identifiers"].append(own_id)
                arrays["puzzle_indices"].append(len(arrays["inputs"]))
            arrays["group_indices"].append(len(arrays["puzzle_identifiers"]))
        (folder / split).mkdir(parents=True)
        for name, values in arrays.items():
            kept = np.stack(values) if name in ("inputs", "labels") else np.array(values, np.int32)
            np.save(folder / split / f"all__{name}.npy", kept)
    (folder / "identifiers.json").write_text(json.dumps(names))
    return names


def small_tasks(seed=1, largest=6):
    """Two tasks to train on, and two whose test pairs, one and two of them, are held out."""
    draw = np.random.default_rng(seed)

    def pairs(count, side=largest):
        sizes = draw.integers(1, side + 1, (count, 2, 2))
        return [tuple(draw.integers(0, 10, size).astype(np.uint8) for size in pair) for pair in sizes]

    return {
        "00a1": (pairs(3), None),
        "Above1": (pairs(2, 30), None),
        "c3": (pairs(2), pairs(2)),
        "d4": (pairs(4), pairs(1)),
    }
