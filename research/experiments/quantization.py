"""Measure the loss that int8 and int4 weights cost, against R, under each rule of a sweep.

    python -m research.experiments.quantization runs/quantization  # writes losses.jsonl there
    python -m research.pack runs/quantization --out docs/results/quantization --train-every 300
    cp runs/quantization/losses.jsonl docs/results/quantization && make results

The matrices of the blocks are rounded to the nearest (`rounding.py`), and the loss on the first
validation windows is compared with that of the weights as trained. Runs in the file are not scored again.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import deeploop
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.eval.validation import validate
from deeploop.files import read_json
from deeploop.models import LoopedGPT
from deeploop.runs.folder import load_config
from research.experiments.rounding import round_matrices_
from research.tables.quantization import FORMATS, LOSSES


def score(run: Path, data: Path | None, windows: int, device: str) -> dict[str, float]:
    """Loss of the weights as trained, and in each format."""
    model, _ = deeploop.load(run, device=device)
    corpus = Corpus.open(data or load_config(run).data.folders[0])
    pair = validation_windows(corpus.validation, model.config.context, windows)

    def loss(model: LoopedGPT) -> float:
        found = validate(model, *pair, batch=32, device=device)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--data", type=Path, help="corpus, where it is not where the runs were trained on it")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    file = options.sweep / LOSSES
    known = {json.loads(line)["run"] for line in file.read_text().splitlines()} if file.exists() else set()
    for run, axes in finished(options.sweep).items():
        if run.name in known:
            continue
        row = {"run": run.name, **axes, **score(run, options.data, options.windows, options.device)}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})


if __name__ == "__main__":
    main()
