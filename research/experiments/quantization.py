"""Measure the loss that int8 and int4 weights cost, against R, under each rule of a sweep.

    python -m research.experiments.quantization runs/quantization  # losses.jsonl there, and the tables
    python -m research.pack runs/quantization --out docs/results/quantization --train-every 300
    cp runs/quantization/losses.jsonl docs/results/quantization
    python -m research.experiments.quantization docs/results/quantization  # writes them into the README there

The matrices of the blocks are rounded to the nearest (`rounding.py`), and the loss on the first validation
windows is compared with that of the weights as trained. Runs that the file has are not scored again. In a
cell: the mean cost over seeds in nats per token, ± half of the 95% interval by Student's t (how many seeds).
"""

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Any

import deeploop
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.eval.validation import validate
from deeploop.files import read_json
from deeploop.models import LoopedGPT
from deeploop.report.page import filled
from deeploop.report.tables import markdown_table
from deeploop.runs.folder import load_config
from research.experiments.rounding import round_matrices_
from research.paired import Difference, paired

FORMATS: dict[str, tuple[int, int | None]] = {
    "int8, per channel": (8, None),
    "int4, per channel": (4, None),
    "int4, groups of 64": (4, 64),
    "int4, groups of 32": (4, 32),
    "int3, per channel": (3, None),
    "int3, groups of 32": (3, 32),
}
LOSSES = "losses.jsonl"
MARKERS = "<!-- written by research/experiments/quantization.py -->", "<!-- end -->"


def score(run: Path, data: Path | None, windows: int) -> dict[str, float]:
    """Loss of the weights as trained, and in each format."""
    model, _ = deeploop.load(run)
    corpus = Corpus.open(data or load_config(run).data.folders[0])
    pair = validation_windows(corpus.validation, model.config.context, windows)

    def loss(model: LoopedGPT) -> float:
        found = validate(model, *pair, batch=32)
        return found.loss / found.targets

    losses = {"loss": loss(model)}
    for name, (bits, group) in FORMATS.items():
        rounded = copy.deepcopy(model)
        round_matrices_(rounded.blocks, bits, group)
        losses[name] = loss(rounded)
    return losses


def finished(sweep: Path) -> dict[Path, dict[str, Any]]:
    """Run folder and axes of every finished cell."""
    cells = read_json(sweep / "sweep.json")["cells"]
    found = {sweep / name: cell["axes"] for name, cell in cells.items()}
    ended = {run: read_json(run / "run.json").get("ended", {}) for run in found}
    return {run: axes for run, axes in found.items() if ended[run].get("how") == "finished"}


def read_losses(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def cost_table(rows: list[dict[str, Any]]) -> str:
    """A row for each format and rule; a column for each R, and one for the largest R less the smallest."""
    depths = sorted({row["rounds"] for row in rows})
    body = []
    for name in FORMATS:
        for rule in dict.fromkeys(row["rule"] for row in rows):
            costs = [
                {
                    row["seed"]: row[name] - row["loss"]
                    for row in rows
                    if (row["rule"], row["rounds"]) == (rule, R)
                }
                for R in depths
            ]
            cells = [paired(own, dict.fromkeys(own, 0.0)) for own in costs]
            body.append([name, rule, *map(shown, [*cells, paired(costs[-1], costs[0])])])
    header = ["weights", "rule", *(f"R = {R}" for R in depths), f"R = {depths[-1]} less R = {depths[0]}"]
    return markdown_table(header, body)


def shown(cost: Difference | None) -> str:
    if cost is None:
        return "–"
    if math.isfinite(cost.half):
        return f"{cost.mean:.4f} ± {cost.half:.4f} ({cost.seeds})"
    return f"{cost.mean:.4f} ({cost.seeds})"


def loss_table(rows: list[dict[str, Any]]) -> str:
    """The mean loss as trained, over seeds."""
    depths, body = sorted({row["rounds"] for row in rows}), []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        losses = [[r["loss"] for r in rows if (r["rule"], r["rounds"]) == (rule, R)] for R in depths]
        body.append([rule, *(f"{sum(own) / len(own):.3f} ({len(own)})" if own else "–" for own in losses)])
    return markdown_table(["loss as trained (seeds)", *(f"R = {R}" for R in depths)], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--data", type=Path, help="corpus, where it is not where the runs were trained on it")
    parser.add_argument("--windows", type=int, default=128)
    options = parser.parse_args()

    file = options.sweep / LOSSES
    known = {row["run"] for row in read_losses(file)}
    for run, axes in finished(options.sweep).items():
        if run.name in known:
            continue
        row = {"run": run.name, **axes, **score(run, options.data, options.windows)}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
    rows = [*{row["run"]: row for row in read_losses(file)}.values()]
    rules = [*dict.fromkeys(row["rule"] for row in rows)]
    rows.sort(key=lambda row: (rules.index(row["rule"]), row["rounds"], row["seed"]))
    tables = f"{loss_table(rows)}\n\n{cost_table(rows)}"
    print(f"\n{tables}")
    page = options.sweep / "README.md"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text, *MARKERS, tables), encoding="utf-8")


if __name__ == "__main__":
    main()
