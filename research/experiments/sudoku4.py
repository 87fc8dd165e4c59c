"""How fast HRM learns 4 × 4 Sudoku on a CPU, with the published block and with DeepLoop's, over seeds.

    OMP_NUM_THREADS=1 python -m research.experiments.sudoku4 --seeds 0 1 2

Trains the recipes hrm-sudoku4 and hrm-sudoku4-deeploop for each seed and writes every validation, with the
training seconds behind it, to docs/results/sudoku4/seeds.json. Prints when each run first solved 90% of the
held-out puzzles. Finished runs are kept and not repeated. Ten minutes a run on one CPU thread.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeploop.commands import prepare_puzzles
from deeploop.report.tables import text_table
from deeploop.tasks.recipes import get_recipe
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from research import RESULTS

FILE = RESULTS / "sudoku4" / "seeds.json"
RECIPES = ("hrm-sudoku4", "hrm-sudoku4-deeploop")
GOAL = 0.9


def run_cell(recipe: str, seed: int, out: Path) -> dict[str, Any]:
    config = get_recipe(recipe)
    config = replace(config, seed=seed, out=out / f"{recipe}-{seed}", resume=True)
    if train(config)["ended"] == "stopped":
        raise SystemExit("stopped; run it again to continue")
    seconds = {row["step"]: row["seconds"] for row in read_metrics(config.out, "train")}
    kept = ("step", "loss", "exact", "cells", "segments")
    validations = [
        {key: row[key] for key in kept} | {"seconds": round(seconds.get(row["step"], 0.0), 1)}
        for row in read_metrics(config.out, "validation")
    ]
    return {"recipe": recipe, "seed": seed, "validations": validations}


def summary(row: dict[str, Any]) -> tuple[str, ...]:
    reached = [v for v in row["validations"] if v["exact"] >= GOAL]
    when = f"step {reached[0]['step']}, {reached[0]['seconds']:.0f} s" if reached else "never"
    last = row["validations"][-1]
    return row["recipe"], str(row["seed"]), when, f"{last['exact']:.1%}", f"{last['seconds']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/sudoku4"))
    options = parser.parse_args()

    data = get_recipe(RECIPES[0]).data.path
    print(prepare_puzzles.run(prepare_puzzles.PrepareSudoku(out=data, size=4, train=2000, test=500)))
    rows = [run_cell(recipe, seed, options.out) for seed in options.seeds for recipe in RECIPES]
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    header = ("recipe", "seed", f"{GOAL:.0%} exact at", "in the end", "after")
    print(text_table(header, [summary(row) for row in rows]))


if __name__ == "__main__":
    main()
