"""How the models of `deeploop demo --collapse` fare over seeds.

    python -m research.experiments.collapse_seeds --seeds 0 1 2 3 4
    python -m research.experiments.collapse_seeds --seeds 0 1 2 3 4 --rounds 1

Trains one half of them (same code, same settings; the looped one unless --rounds says otherwise) for each
seed and writes every validation to docs/results/demo-collapse: seeds.json, or seeds-rR.json for other rounds
R. Prints how many seeds escape the unigram floor, by our rule (the last validation has loss below floor - 0.1
and token similarity below 0.95) and by the paper's (any validation after the first is below the floor).
Finished runs are kept and not repeated. About three minutes per seed on two cores, under one at R = 1.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeploop.commands.demo import train_cells
from deeploop.commands.demo_collapse import CURES, METHODS, ROUNDS, grid, prepare_corpus, run_record
from deeploop.report.tables import text_table
from research import RESULTS

FOLDER = RESULTS / "demo-collapse"


def run_seed(out: Path, seed: int, rounds: int) -> list[dict[str, Any]]:
    runs = out / "runs" / f"collapse-seed{seed}-r{rounds}"
    cells = replace(grid(out, seed, (rounds,)), omit=tuple({"method": name} for name in CURES))
    found = [
        run_record(cell.axes["method"], runs / cell.name)
        for cell in train_cells(runs, cells, here=False).cells
    ]
    return [
        {**{key: one[key] for key in ("method", "rounds")}, "seed": seed, "validations": one["validations"]}
        for one in found
    ]


def summary(method: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    own = [row["validations"] for row in rows if row["method"] == method]
    ours = sum(validations[-1]["verdict"] == "escaped" for validations in own)
    papers = sum(any(v["loss"] < v["floor"] for v in validations[1:]) for validations in own)
    losses = "  ".join(f"{validations[-1]['loss']:.3f}" for validations in own)
    return method, f"{ours} of {len(own)}", f"{papers} of {len(own)}", losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args()

    print(prepare_corpus(options.out))
    rows = [row for seed in options.seeds for row in run_seed(options.out, seed, options.rounds)]
    name = "seeds.json" if options.rounds == ROUNDS else f"seeds-r{options.rounds}.json"
    (FOLDER / name).write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    header = ("block", "escaped", "below the floor once", "last loss by seed")
    print(text_table(header, [summary(title, rows) for title, _ in METHODS.values()]))


if __name__ == "__main__":
    main()
