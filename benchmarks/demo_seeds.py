"""How the demo's looped models fare over seeds.

    python benchmarks/demo_seeds.py --seeds 5

Trains the looped half of the demo (same code, same settings) for each seed, prints how many seeds escape
the unigram floor for each block, and writes every last validation to docs/results/demo/seeds.json.
Finished runs are kept and not repeated. About three minutes a seed on two cores.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from deeploop.experiments.demo import METHODS, DemoConfig, cell, prepare_corpus
from deeploop.experiments.page import text_table
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "demo" / "seeds.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args()

    print(prepare_corpus(DemoConfig(out=options.out)))
    rows = []
    for seed in range(options.seeds):
        config = DemoConfig(out=options.out, seed=seed)
        for method in METHODS:
            settings = cell(config, method, config.rounds)
            if train(settings)["ended"] == "stopped":
                raise SystemExit("stopped; run it again to continue")
            last = read_metrics(settings.out, "validation")[-1]
            rows.append({"method": method, "rounds": config.rounds, "seed": seed, **last})
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")

    by_method = defaultdict(list)
    for row in rows:
        by_method[row["method"]].append(row)
    table = [
        (
            method,
            f"{sum(row['verdict'] == 'escaped' for row in own)} of {len(own)}",
            "  ".join(f"{row['loss']:.3f}" for row in own),
        )
        for method, own in by_method.items()
    ]
    print(text_table(("block", "escape", "loss by seed"), table))


if __name__ == "__main__":
    main()
