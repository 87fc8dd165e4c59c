"""Loss of every validation window that a run's own validations did not use, under its last weights.

    python -m research.experiments.window_losses runs/long-training/* --out windows.npz

Training validates on `data.validation_sequences` windows of the validation split. Rates are chosen on
those; this takes the rest, so that what is reported was never chosen on. The file has one float32 array of
losses (nats per token, a window each) per run, under the run's name.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from deeploop.data import Corpus
from deeploop.data.token_loader import read_windows
from deeploop.runs.folder import load_config
from deeploop.train.rundir import load_model

BATCH = 256


def unused_windows(windows: int, used: int) -> np.ndarray:
    """Numbers of the windows that a validation on `used` of them leaves out."""
    count = min(used, windows)
    return np.setdiff1d(np.arange(windows), np.arange(count) * windows // count)


@torch.no_grad()
def window_losses(run: Path, device: str) -> np.ndarray:
    config = load_config(run)
    model = load_model(run, device=device).eval()
    context, stream = config.model.context, Corpus.open(config.data.path).validation
    numbers = unused_windows((len(stream) - 1) // context, config.data.validation_sequences)
    inputs, targets = read_windows(stream, context, context * numbers)
    losses = []
    for x, y in zip(inputs.to(device).split(BATCH), targets.to(device).split(BATCH), strict=True):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model.logits(model(x).states)
        losses.append(F.cross_entropy(logits.float().mT, y, reduction="none").mean(1))
    return torch.cat(losses).cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    found = {}
    for run in args.runs:
        try:
            found[run.name] = window_losses(run, args.device)
        except (OSError, ValueError) as why:
            print(f"{run.name}: left out, {why}")
            continue
        losses = found[run.name]
        error = losses.std() / len(losses) ** 0.5
        print(f"{run.name}: {losses.mean():.4f} ± {error:.4f}, {len(losses)} windows", flush=True)
    np.savez_compressed(args.out, allow_pickle=False, **found)


if __name__ == "__main__":
    main()
