"""Measure the cost of document masks on one GPU.

    python benchmarks/documents.py
    python benchmarks/documents.py --device cpu --tiny     # the same path in seconds, to see that it works

1. Attention by itself, forward and backward, replayed as a CUDA graph: causal over whole rows, and inside
   documents by torch's kernel of variable length and by ours (`nn/kernels/document_attention.py`), with the
   larger of their errors in the output and in the gradients, against float64.
2. Tokens per second of the real training step with `--data.mask-documents` and without, by turns in this
   process, and their ratio; with masks also by torch's kernel, where ours is taken. The text is Python's
   standard library, cut into documents of --document-bytes; 4,000 is about a page of the web. 0 leaves files
   whole.

`--only tiles` times each of our kernels of attention with other tiles, to choose those in `CUTS`; parts named
beside it take the fastest.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.accelerate.known import HAS_TRITON
from deeploop.bench.timing import time_steps, time_training
from deeploop.data.corpora import stdlib
from deeploop.data.prepare import prepare
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.data.tokenizers import get_tokenizer
from deeploop.nn.documents import (
    Documents,
    document_attention,
    document_bounds,
    document_mask,
    document_spans,
)
from deeploop.nn.kernels import on_hopper
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.recipes import get_recipe
from deeploop.train.device import device_name
from deeploop.train.distributed import World, open_world

PARTS = ("attention", "training")
# Queries and keys of a tile, tiles in flight, warps; by head size, for the kernels of `CUTS` in their order.
OTHER_TILES = {
    64: (
        [(128, 64, 3, 8), (128, 128, 3, 8), (64, 64, 3, 4), (64, 128, 2, 4)],
        [(128, 64, 3, 8), (128, 128, 2, 8), (64, 64, 3, 4), (64, 128, 2, 4)],
        [(64, 128, 3, 8), (128, 128, 2, 8), (64, 64, 3, 4), (128, 64, 2, 4)],
    ),
    128: (
        [(128, 64, 3, 8), (128, 64, 4, 8), (128, 128, 3, 8), (64, 64, 3, 4), (64, 64, 2, 4)],
        [(128, 64, 3, 8), (128, 64, 4, 8), (128, 128, 2, 8), (64, 64, 2, 4), (64, 32, 3, 4), (128, 32, 3, 8)],
        [(64, 128, 3, 8), (64, 128, 4, 8), (32, 128, 3, 8), (64, 64, 2, 4), (32, 64, 3, 4), (32, 64, 4, 4)],
    ),
}


class Pieces:
    """Python's standard library in documents of at most so many bytes."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit

    def __iter__(self) -> Iterator[str]:
        read = 0
        for text in stdlib():
            for start in range(0, len(text), self.size or len(text)):
                yield text[start : start + (self.size or len(text))]
            read += len(text)
            if read > self.limit:
                return


def make_corpus(args: argparse.Namespace, folder: Path) -> Corpus:
    if args.data is not None:
        return Corpus.open(args.data)
    tokenizer = get_tokenizer("bytes" if args.tiny else "gpt2")
    source = Pieces(40 if args.tiny else args.document_bytes, 200_000 if args.tiny else 40_000_000)
    return prepare(
        source, tokenizer, folder / "corpus", validation_tokens=100_000, source="stdlib", workers=4
    )


def make_config(args: argparse.Namespace, corpus: Corpus, folder: Path) -> TrainConfig:
    base = get_recipe("tiny" if args.tiny else "gpt2-small")
    size = 4 if args.tiny else args.batch
    return replace(
        base,
        out=folder / "run",
        model=replace(base.model, rounds=args.rounds),
        data=replace(base.data, path=corpus.folder, validation_sequences=1),
        optim=replace(base.optim, batch=size),
        device=replace(base.device, kind=args.device, micro_batch=size),
    )


def attention_inputs(config: TrainConfig, corpus: Corpus, world: World) -> tuple[Tensor, ...]:
    """Bounds of a batch; q, k, v (B, H, T, D) as the model has them; a gradient of the output."""
    size, T, H, D = config.optim.batch, config.model.context, config.model.heads, config.model.head_size
    inputs, _ = validation_windows(corpus.validation, T, size)
    bounds = document_bounds(inputs == corpus.end_of_text).to(world.device)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    heads = (torch.randn(len(inputs), T, H, D, device=world.device, dtype=dtype) for _ in range(4))
    q, k, v, d_out = (x.transpose(1, 2) for x in heads)
    return bounds, q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out


def replayed(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The step as a CUDA graph, as in training, so that the host's time for launches does not count."""
    if device.type != "cuda":
        return step
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def attention_variants(
    bounds: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Functions of q, k, v: causal, and inside documents by each of our ways."""
    B, _, T, D = q.shape
    mask = document_mask(bounds, torch.Size((B, T)), D, q.dtype)
    masked = document_attention if isinstance(mask, Documents) else F.scaled_dot_product_attention
    variants = {
        "causal": partial(F.scaled_dot_product_attention, is_causal=True),
        "documents": lambda q, k, v: masked(q, k, v, mask),
    }
    if HAS_TRITON and q.is_cuda:
        from deeploop.nn.kernels import document_attention as ours

        spans = document_spans(bounds, torch.Size((B, T)))
        variants["documents_triton"] = lambda q, k, v: ours.attend_documents(q, k, v, spans)
    return variants


def time_attention(config: TrainConfig, corpus: Corpus, world: World, steps: int) -> dict[str, float]:
    """Milliseconds of a forward and a backward pass of attention in one visit; errors of the first rows."""
    bounds, q, k, v, d_out = attention_inputs(config, corpus, world)

    def both(attend) -> tuple[Tensor, ...]:
        y = attend(q, k, v)
        return y, *torch.autograd.grad(y, (q, k, v), d_out)

    exact = exact_attention(bounds, q, k, v, d_out, rows=2)
    record = {}
    for name, attend in attention_variants(bounds, q, k, v).items():
        step = replayed(partial(both, attend), world.device)
        record[f"attention_{name}_ms"] = 1e3 * time_steps(step, world.device, steps).seconds
        if name != "causal":
            errors = (
                far(a[:2].detach().double(), b.detach()) for a, b in zip(both(attend), exact, strict=True)
            )
            record[f"attention_{name}_error"] = max(errors)
    return record


def exact_attention(
    bounds: Tensor, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, rows: int
) -> tuple[Tensor, ...]:
    """Attention inside documents and its gradients in the first rows of a batch, in float64."""
    shape = torch.Size((q.shape[0], q.shape[2]))
    mask = document_mask(bounds, shape, q.shape[3], torch.float64)[:rows]
    q, k, v = (x[:rows].detach().double().requires_grad_() for x in (q, k, v))
    scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(~mask, -torch.inf)
    y = scores.softmax(-1) @ v
    return y, *torch.autograd.grad(y, (q, k, v), d_out[:rows].double())


def far(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


def time_tiles(config: TrainConfig, corpus: Corpus, world: World, steps: int) -> dict[str, float]:
    """Milliseconds of our attention: forward with other tiles, backward with others of either kernel.

    The fastest of each are taken from here on.
    """
    from deeploop.nn.kernels import document_attention as ours

    bounds, q, k, v, d_out = attention_inputs(config, corpus, world)
    q, k, v = (x.detach() for x in (q, k, v))
    spans = document_spans(bounds, torch.Size((q.shape[0], q.shape[2])))
    cut = ours.CUTS[q.shape[3]]
    out, lse = ours.attend_forward(q, k, v, spans, cut)
    record = {}
    for kernel, others in zip(cut._fields, OTHER_TILES[q.shape[3]], strict=True):
        times = {}
        for tiles in others:
            own = cut._replace(**{kernel: ours.Tiles(*tiles)})
            forward = partial(ours.attend_forward, q, k, v, spans, own)
            backward = partial(ours.attend_backward, q, k, v, spans, out, lse, d_out, own)
            step = replayed(forward if kernel == "out" else backward, world.device)
            times[tiles] = 1e3 * time_steps(step, world.device, steps).seconds
        record |= {f"{kernel} {tiles}": time for tiles, time in times.items()}
        fastest = ours.Tiles(*min(times, key=times.__getitem__))
        ours.CUTS[q.shape[3]] = ours.CUTS[q.shape[3]]._replace(**{kernel: fastest})
    return record


def time_both(config: TrainConfig, world: World, args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second without masks and with them, by our kernels and by torch's, by turns."""
    ways: dict[str, AbstractContextManager[object]] = {"": nullcontext(), "_masked": nullcontext()}
    if HAS_TRITON and on_hopper(torch.empty(0, device=world.device)):
        from deeploop.nn.kernels import document_attention as ours

        ways["_masked_torch"] = patch.object(ours, "TIMED", ())
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    tokens = 0
    for repeat in range(args.repeats):
        for way, chosen in ways.items():
            data = replace(config.data, mask_documents=way != "")
            one = replace(config, data=data, out=config.out.with_name(f"run-{repeat}{way}"))
            with chosen:
                timing, tokens, _ = time_training(one, world, args.steps)
            seconds[way].append(timing.seconds)
    rates = {f"tokens_per_s{way}": tokens / median(times) for way, times in seconds.items()}
    return rates | {"ratio": rates["tokens_per_s_masked"] / rates["tokens_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on little text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step, computed at once")
    parser.add_argument("--document-bytes", type=int, default=4_000)
    parser.add_argument("--data", type=Path, help="a corpus of GPT-2 tokens in place of the standard library")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "tiles"), default=PARTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.repeats = 2, 1
    with tempfile.TemporaryDirectory() as name:
        corpus = make_corpus(args, Path(name))
        config = make_config(args, corpus, Path(name))
        with open_world(config.device) as world:
            mean = len(corpus.train) / corpus.documents("train")
            record = {
                "device": device_name(world.device),
                "torch": torch.__version__,
                "rounds": args.rounds,
                "batch": config.optim.batch,
                "context": config.model.context,
                "tokens_per_document": mean,
            }
            if "tiles" in args.only:
                record |= time_tiles(config, corpus, world, args.steps)
            if "attention" in args.only:
                record |= time_attention(config, corpus, world, args.steps)
            if "training" in args.only:
                record |= time_both(config, world, args)
    for key, value in record.items():
        print(f"{key:<32}{value:.6g}" if isinstance(value, float) else f"{key:<32}{value}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
