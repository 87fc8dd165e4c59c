"""The demo over seeds: what each call of `deeploop demo` measured, in one file.

    for seed in 11 12 13 14 15; do deeploop demo --seed $seed --out demo-$seed; done
    python -m research.experiments.demo_seeds demo-*/demo.json

Keeps of each demo.json the settings and the shares of cells and rows that are right, writes them to
docs/results/demo/seeds.json and prints how many seeds hold the claim: at least 99% of the cells are right at
127 and at 200 steps, for the flat loop.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from deeploop.commands.demo_page import HEADER, claim_holds, table_rows
from deeploop.report.tables import text_table
from research import RESULTS

FOLDER = RESULTS / "demo"


def kept(record: dict[str, Any]) -> dict[str, Any]:
    """A demo's record without the pictures of its row, and without what differs between machines."""
    models = {
        name: {key: value for key, value in own.items() if key != "states"}
        for name, own in record["models"].items()
    }
    dropped = ("truth", "seconds", "git")
    return {key: value for key, value in record.items() if key not in dropped} | {"models": models}


def collect(records: list[dict[str, Any]]) -> dict[str, Any]:
    """All seeds, and how many hold the claim; refuses quick looks and seeds that come twice."""
    seeds = [record["seed"] for record in records]
    if len(set(seeds)) < len(seeds) or any(record["quick"] for record in records):
        raise SystemExit(f"seeds {seeds}: each must come once, and none from --quick")
    rows = sorted(map(kept, records), key=lambda record: record["seed"])
    return {"claim": {"held": sum(map(claim_holds, rows)), "seeds": len(rows)}, "runs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    records = [json.loads(file.read_text(encoding="utf-8")) for file in parser.parse_args().files]
    found = collect(records)
    head = json.dumps(found["claim"])
    rows = ",\n".join(map(json.dumps, found["runs"]))
    text = f'{{"claim": {head},\n"runs": [\n{rows}\n]}}\n'
    (FOLDER / "seeds.json").write_text(text, encoding="utf-8")
    for run in found["runs"]:
        print(f"\nseed {run['seed']}\n{text_table(HEADER, table_rows(run))}")
    print(f"\nthe claim holds in {found['claim']['held']} of {found['claim']['seeds']} seeds")


if __name__ == "__main__":
    main()
