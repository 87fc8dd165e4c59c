"""Puts a trained run into the package as the model that comes with it (`make checkpoint`).

python tools/ship_checkpoint.py runs/shipped src/deeploop/assets/tiny

What is copied can be loaded but not resumed: without the optimizer's moments it is a third of the size.
"""

import shutil
import sys
from pathlib import Path

from deeploop.runs.folder import require_checkpoint
from deeploop.train.checkpoint import copy_weights

LIMIT = 2_000_000


def ship(run: Path, folder: Path) -> int:
    """Writes the folder anew; returns its size in bytes."""
    checkpoint = require_checkpoint(run)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("run.json", "config.json", "metrics.jsonl"):
        shutil.copyfile(run / name, folder / name)
    copy_weights(checkpoint, folder / "checkpoints" / checkpoint.name)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    run, folder = map(Path, sys.argv[1:])
    size = ship(run, folder)
    print(f"{folder}: {size:,} bytes")
    sys.exit(f"more than {LIMIT:,} bytes: too large to ship" if size > LIMIT else 0)
