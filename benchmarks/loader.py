"""The input pipeline: what the loader takes of a training step, and `prepare` against tiktoken's own batches.

    python benchmarks/loader.py [TEXT …] [--threads 1]

The step is gpt2-small's at R=1: 32 windows of 1024 tokens, at 535 thousand tokens a second. Waiting is
measured beside a main thread that sleeps for the rest of the step, as one does that waits for a GPU. TEXT is
any file or folder that `deeploop prepare text` reads; the standard library's sources otherwise. Both encoders
see the same documents and threads, in turn, three times; the best counts. Where others share the cores, CPU
seconds are the fairer ratio.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median

import numpy as np

from deeploop.data.corpora import stdlib, text_files
from deeploop.data.prepare import prepare
from deeploop.data.shards import TokenStream, write_shard
from deeploop.data.token_loader import PrefetchLoader, TokenLoader
from deeploop.data.tokenizers import get_tokenizer

SEQUENCES, CONTEXT, TOKENS_PER_S = 32, 1024, 535e3
CHARACTERS = 10_000_000
STEPS = 50


def random_shards(folder: Path) -> TokenStream:
    draw, paths = np.random.default_rng(0), [folder / f"{index}.bin" for index in range(4)]
    for path in paths:
        write_shard(path, draw.integers(0, 50257, 10_000_000, dtype=np.uint16))
    return TokenStream(paths)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def time_loader(stream: TokenStream) -> None:
    step = SEQUENCES * CONTEXT / TOKENS_PER_S
    plain = TokenLoader(stream, context=CONTEXT, batch=SEQUENCES, seed=0)
    alone = median(seconds(plain.step_batch)[0] for _ in range(STEPS))
    ahead, waits = PrefetchLoader(plain), []
    for _ in range(STEPS):
        waits.append(seconds(ahead.step_batch)[0])
        time.sleep(step - waits[-1])
    waiting = median(waits[1:])
    print(
        f"loader             {SEQUENCES * CONTEXT / alone / 1e6:.1f} M tokens/s, {1e3 * alone:.2f} ms a step"
    )
    print(
        f"of a {1e3 * step:.0f} ms step     {alone / step:.2%} if waited for, {waiting / step:.2%} made ahead"
    )


def time_prepare(documents: list[str], threads: int) -> None:
    tokenizer = get_tokenizer("gpt2")
    encoding = tokenizer._encoding
    ours, theirs = [], []
    for _ in range(3):
        theirs.append(seconds(lambda: encoding.encode_ordinary_batch(documents, num_threads=threads)))
        with tempfile.TemporaryDirectory() as folder:
            out, rest = (
                Path(folder) / "corpus",
                {"validation_tokens": 10_000, "source": "x", "workers": threads},
            )
            ours.append(seconds(partial(prepare, documents, tokenizer, out, **rest)))
    count = sum(len(tokens) for tokens in encoding.encode_ordinary_batch(documents, num_threads=threads))
    for name, found in (("tiktoken", theirs), ("prepare", ours)):
        wall, cpu = map(min, zip(*found, strict=True))
        print(f"{name:18} {count / wall / 1e6:.2f} M tokens/s, {count / cpu / 1e6:.2f} M a CPU second")
    wall, cpu = (min(pair[i] for pair in theirs) / min(pair[i] for pair in ours) for i in (0, 1))
    print(f"prepare/tiktoken   {wall:.2f} by the clock, {cpu:.2f} by CPU seconds, {threads} threads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        time_loader(random_shards(Path(folder)))
    read = 0

    def enough(text: str) -> bool:
        nonlocal read
        read += len(text)
        return read < CHARACTERS

    source = text_files(args.text) if args.text else stdlib()
    time_prepare(list(takewhile(enough, source)), args.threads)


if __name__ == "__main__":
    main()
