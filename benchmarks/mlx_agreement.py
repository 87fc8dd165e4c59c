"""Compare mlx-lm with the run that was exported: logits within 1e-4, and the same greedy tokens.

    pip install "mlx[cpu]" mlx-lm
    deeploop export RUN FOLDER --format nanbeige
    python benchmarks/mlx_agreement.py RUN FOLDER

Reads the first validation window of the run's corpus with both, in fp32, and continues its first 16 tokens by
64 with each engine's own `generate`. Exits with 1 unless they agree.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import torch
from mlx_lm.generate import generate_step

import deeploop
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.eval.generation import generate
from deeploop.runs.folder import load_config

TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, help="corpus, where it is not where the run was trained on it")
    options = parser.parse_args()

    ours, tokenizer = deeploop.load(options.run)
    theirs, their_tokenizer = mlx_lm.load(str(options.folder))
    corpus = Corpus.open(options.data or load_config(options.run).data.folders[0])
    window = validation_windows(corpus.validation, ours.config.context, 1)[0]
    with torch.no_grad():
        expected = ours.logits(ours(window).states).numpy()
    worst = float(np.abs(np.array(theirs(mx.array(window.numpy()))) - expected).max())

    prompt = window[0, :16].tolist()
    count = min(64, ours.config.context - len(prompt))
    own = list(generate(ours, prompt, max_tokens=count))
    steps = generate_step(mx.array(prompt), theirs, max_tokens=count)
    found = [int(token) for token, _ in islice(steps, count)]
    text = tokenizer.decode([token for token in prompt if token != tokenizer.end_of_text])
    same_ids = list(their_tokenizer.encode(text)) == tokenizer.encode(text)
    print(f"{options.folder}: K = {ours.config.blocks}, R = {ours.rounds}, mlx-lm {mlx_lm.__version__}")
    print(f"logits: at most {worst:.1e} apart (largest {np.abs(expected).max():.1f})")
    equal = sum(map(int.__eq__, own, found))
    print(f"greedy tokens: {equal} of {count} equal, {len(set(own))} distinct; tokenizer agrees: {same_ids}")
    sys.exit(not (worst <= TOLERANCE and own == found and same_ids))


if __name__ == "__main__":
    main()
