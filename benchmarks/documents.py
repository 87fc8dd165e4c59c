"""What keeping documents apart costs, and whether a packed document is the document alone: on one GPU.

    python benchmarks/documents.py
    python benchmarks/documents.py --device cpu --tiny     # the same path in seconds, to see that it works

1. Packed against unpacked, in the arithmetic of training: logits and gradients of documents that share rows
   of 1,024 tokens, and of each document in a row of its own. Their difference must not exceed that of the
   same unpacked documents in fp32: the arithmetic's own error.
2. Attention by itself, forward and backward: causal over whole rows, and inside documents.
3. Tokens per second of the real training step with `--data.mask-documents` and without, by turns in this
   process, and their ratio. The text is Python's standard library, cut into documents of --document-bytes;
   4,000 is about a page of the web. 0 leaves files whole.

`--cudnn` takes cuDNN's kernel of variable length, which torch does not offer by itself.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from deeploop.data.corpora import stdlib
from deeploop.data.prepare import prepare
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.data.tokenizers import get_tokenizer
from deeploop.models import LoopedGPT
from deeploop.nn.documents import Documents, document_attention, document_bounds, document_mask
from deeploop.recipes import get_recipe
from deeploop.train.config import TrainConfig
from deeploop.train.distributed import World, arithmetic, open_world
from deeploop.train.execution import choose_execution
from deeploop.train.progress import device_name
from deeploop.train.timing import time_steps, time_training

PARTS = ("packing", "attention", "training")


def cudnn_attention(q, k, v, bounds_q, bounds_k, longest_q, longest_k, window_size=None) -> Tensor:
    """cuDNN's kernel, causal, in place of torch's `varlen_attn`."""
    sizes = (bounds_q, bounds_k, longest_q, longest_k)
    return torch.ops.aten._cudnn_attention_forward(q, k, v, None, *sizes, True, 0.0, True, False)[0]


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


def documents_of(tokens: Tensor, end: int) -> Iterator[tuple[int, int, int]]:
    """Row, start and stop of each document of a batch."""
    for row, own in enumerate(tokens):
        edges = sorted({0, *(own == end).nonzero().flatten().tolist(), len(own)})
        yield from ((row, *edge) for edge in pairwise(edges))


def logits_and_gradients(
    model: LoopedGPT, pieces: list[tuple[Tensor, Tensor, Tensor | None]], exact: bool, config
):
    """Logits of every token, one piece after the other, and the gradient of the summed loss."""
    logits, device = [], next(model.parameters()).device
    model.zero_grad()
    for tokens, targets, bounds in pieces:
        tokens, targets = tokens.to(device), targets.to(device)
        own = {} if bounds is None else {"documents": bounds.to(device)}
        kind = replace(config.device, precision="fp32" if exact else config.device.precision)
        with arithmetic(kind, device):
            output = model(tokens, targets, **own)
        with torch.no_grad():
            logits.append(model.logits(output.states.float()).flatten(0, 1).cpu())
        output.loss.backward()
    return torch.cat(logits), torch.cat([p.grad.flatten().cpu() for p in model.parameters()])


def compare(config: TrainConfig, corpus: Corpus, world: World) -> dict[str, float]:
    """Relative differences: packed from unpacked, and unpacked from unpacked in fp32."""
    torch.manual_seed(0)
    model = LoopedGPT(config.model, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh weights hide too much
            parameter.add_(0.3 * parameter.std().nan_to_num(0) * torch.randn_like(parameter))
    choose_execution(config.device, world, model.to(world.device)).apply(model)
    end = corpus.end_of_text
    inputs, targets = validation_windows(corpus.validation, config.model.context, 4)
    packed = [(inputs, targets, document_bounds(inputs == end))]
    alone = [
        (inputs[row : row + 1, start:stop], targets[row : row + 1, start:stop], None)
        for row, start, stop in documents_of(inputs, end)
    ]
    of = partial(logits_and_gradients, model, config=config)
    a, b, c = of(packed, exact=False), of(alone, exact=False), of(alone, exact=True)
    far = lambda x, y: float((x - y).norm() / y.norm())  # noqa: E731
    return {
        "documents": len(alone),
        "logits_packed": far(a[0], b[0]),
        "logits_arithmetic": far(b[0], c[0]),
        "gradients_packed": far(a[1], b[1]),
        "gradients_arithmetic": far(b[1], c[1]),
    }


def time_attention(config: TrainConfig, corpus: Corpus, world: World, steps: int) -> dict[str, float]:
    """Milliseconds of a forward and a backward pass of attention in one visit."""
    size, T, H, D = config.optim.batch, config.model.context, config.model.heads, config.model.head_size
    inputs, _ = validation_windows(corpus.validation, T, size)
    bounds = document_bounds(inputs == corpus.end_of_text).to(world.device)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    mask = document_mask(bounds, inputs.shape, D, dtype)
    q, k, v = (
        torch.randn(len(inputs), T, H, D, device=world.device, dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )

    def causal() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def inside() -> Tensor:
        if isinstance(mask, Documents):
            return document_attention(q, k, v, mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def both(attend) -> None:
        torch.autograd.grad(attend().sum(), (q, k, v))

    times = {name: time_steps(partial(both, one), world.device, steps).seconds for name, one in
             (("causal", causal), ("documents", inside))}  # fmt: skip
    return {f"attention_{name}_ms": 1e3 * seconds for name, seconds in times.items()}


def time_both(config: TrainConfig, world: World, args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second with masks and without, by turns."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    tokens = 0
    for repeat in range(args.repeats):
        for masked in (False, True):
            data = replace(config.data, mask_documents=masked)
            one = replace(config, data=data, out=config.out.with_name(f"run-{repeat}-{masked}"))
            timing, tokens, _ = time_training(one, world, args.steps)
            seconds[masked].append(timing.seconds)
    plain, apart = (tokens / median(seconds[masked]) for masked in (False, True))
    return {"tokens_per_s": plain, "tokens_per_s_masked": apart, "ratio": apart / plain}


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
    parser.add_argument("--cudnn", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="leave out the other parts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.repeats = 2, 1
    if args.cudnn:
        varlen.varlen_attn = cudnn_attention
    with tempfile.TemporaryDirectory() as name:
        corpus = make_corpus(args, Path(name))
        config = make_config(args, corpus, Path(name))
        with open_world(config.device) as world:
            mean = len(corpus.train) / corpus.documents("train")
            record = {"device": device_name(world.device), "torch": torch.__version__, "rounds": args.rounds,
                      "batch": config.optim.batch, "context": config.model.context, "cudnn": args.cudnn,
                      "tokens_per_document": mean}  # fmt: skip
            if "packing" in args.only:
                record |= compare(config, corpus, world)
            if "attention" in args.only:
                record |= time_attention(config, corpus, world, args.steps)
            if "training" in args.only:
                record |= time_both(config, world, args)
    for key, value in record.items():
        print(f"{key:<24}{value:.6g}" if isinstance(value, float) else f"{key:<24}{value}")
    exact = world.device.type == "cpu"  # fp32 against fp32: no error of bf16 to compare with
    for what in ("logits", "gradients") if "packing" in args.only else ():
        allowed = 1e-5 if exact else record[f"{what}_arithmetic"]
        assert record[f"{what}_packed"] <= allowed, (
            f"{what}: packed differs from unpacked by more than {allowed}"
        )
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
