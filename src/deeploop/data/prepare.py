"""Text to a corpus folder: `deeploop prepare stdlib | text PATH… | fineweb-edu`.

Each document is encoded (in threads: tiktoken releases the GIL), preceded by an end-of-text token, and
put whole into one split. A finite source is first read through once for its size; a document then goes
to validation whenever validation has fallen behind its even share of the text read so far, so that the
split samples the whole source and ends near the wanted number of tokens. A stream, whose size is
unknown, gives its first documents to validation. Either choice depends on the documents alone: the
output is the same byte for byte for any number of workers and after any interruption. A run that was
killed and is called again reads past the documents of its full shards without encoding them.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
from tqdm import tqdm
from tyro.conf import Positional

from deeploop.data.corpora import (
    FINEWEB_EDU,
    FINEWEB_EDU_SAMPLE,
    Source,
    fineweb_edu,
    stdlib,
    text_files,
)
from deeploop.data.corpus_writer import CorpusWriter, Settings
from deeploop.data.shards import Corpus
from deeploop.data.tokenizers import Tokenizer, get_tokenizer, utf8
from deeploop.data.workers import ordered_map

SHARD_TOKENS = 100_000_000


def prepare(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    out: Path,
    *,
    validation_tokens: int,
    source: str,
    stream: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    limit_tokens: int | None = None,
    workers: int | None = None,
) -> Corpus:
    """Writes the documents as a corpus folder, or returns the one already there with the same settings.

    Unless it is a `stream`, `documents` is iterated twice. `source` is a description for corpus.json.
    """
    settings = Settings(source, tokenizer.name, validation_tokens, shard_tokens, limit_tokens)
    if (out / "corpus.json").exists():
        corpus = Corpus.open(out)
        settings.check_same(corpus.facts["settings"], out)
        return corpus
    with _folder(out):
        size = None if stream else _measured(documents)
        writer = CorpusWriter(out, settings, tokenizer, size)
        _write(documents, tokenizer, writer, size, limit_tokens, workers or os.cpu_count() or 1)
    return Corpus.open(out)


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Makes the folder; a failure before anything was written into it leaves none."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it holds shards to go on from
            out.rmdir()
        raise


def _write(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    writer: CorpusWriter,
    size: int | None,
    limit_tokens: int | None,
    workers: int,
) -> None:
    def encode(text: str) -> tuple[np.ndarray, int]:
        ids = tokenizer.encode(text)
        return np.concatenate([np.array([tokenizer.end_of_text], dtype=np.uint16), ids]), len(utf8(text))

    texts = islice(filter(None, documents), writer.documents, None)
    encoded = ordered_map(ThreadPoolExecutor(workers), encode, texts, ahead=4 * workers)
    with closing(encoded), _bar(writer, size, limit_tokens) as bar:
        for tokens, text_bytes in encoded:
            if limit_tokens is not None and writer.tokens >= limit_tokens:
                break
            writer.add(tokens, text_bytes)
            bar.update(text_bytes if limit_tokens is None else len(tokens))
    writer.finish()


def _measured(documents: Iterable[str]) -> int:
    bar = tqdm(documents, desc="measure", unit=" documents", dynamic_ncols=True, leave=False, disable=None)
    return sum(len(utf8(text)) for text in bar)


def _bar(writer: CorpusWriter, size: int | None, limit_tokens: int | None) -> "tqdm[NoReturn]":
    """A bar over tokens where they are limited, otherwise over the source's bytes."""
    by_token = limit_tokens is not None
    return tqdm(
        total=limit_tokens if by_token else size,
        initial=writer.tokens if by_token else writer.bytes,
        unit="token" if by_token else "B",
        unit_scale=True,
        desc="prepare",
        dynamic_ncols=True,
        disable=None,  # no bar where nobody watches
    )


@dataclass(frozen=True, kw_only=True)
class _Prepare:
    shard_tokens: int = SHARD_TOKENS
    """Tokens a shard."""

    workers: int | None = None
    """Threads that encode; as many as there are cores if not given. The output is the same for any number."""


@dataclass(frozen=True, kw_only=True)
class PrepareStdlib(_Prepare):
    """The Python standard library's own sources: a small corpus without a download."""

    out: Path = Path("data/stdlib")
    """The corpus folder to write."""

    tokenizer: Literal["bytes", "gpt2"] = "bytes"
    """How text becomes tokens."""

    validation_tokens: int = 500_000
    """Tokens to hold out, in whole documents spread over the corpus; never more than a tenth of it."""


@dataclass(frozen=True, kw_only=True)
class PrepareText(_Prepare):
    """Your own text: .txt, .jsonl, .gz or .xz of either, .parquet."""

    paths: Positional[tuple[Path, ...]]
    """Files, or folders to be searched for them."""

    field: str = "text"
    """Field of a .jsonl line, or column of a .parquet file, that holds the text."""

    out: Path = Path("data/text")
    """The corpus folder to write."""

    tokenizer: Literal["bytes", "gpt2"] = "gpt2"
    """How text becomes tokens."""

    validation_tokens: int = 1_000_000
    """Tokens to hold out, in whole documents spread over the corpus; never more than a tenth of it."""


@dataclass(frozen=True, kw_only=True)
class PrepareFinewebEdu(_Prepare):
    """FineWeb-Edu, streamed from the Hugging Face hub."""

    out: Path = Path("data/fineweb-edu")
    """The corpus folder to write."""

    tokenizer: Literal["bytes", "gpt2"] = "gpt2"
    """How text becomes tokens."""

    source: str = FINEWEB_EDU
    """A dataset on the hub, or a local folder or file of parquet or jsonl in the same layout."""

    name: str = FINEWEB_EDU_SAMPLE
    """Which sample of the dataset on the hub."""

    limit_tokens: int | None = 50_000_000_000
    """Stop after this many tokens; the paper's runs see 49.2 billion. None takes the whole sample."""

    validation_tokens: int = 100_000_000
    """Tokens to hold out: the first documents of the stream."""


def run(args: PrepareStdlib | PrepareText | PrepareFinewebEdu) -> str:
    """Does what a `deeploop prepare` command asks for; returns a summary to print."""
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"workers {args.workers}: must be at least 1")
    source = _source(args)
    found = (args.out / "corpus.json").exists()
    corpus = prepare(
        source,
        get_tokenizer(args.tokenizer),
        args.out,
        validation_tokens=args.validation_tokens,
        source=source.description,
        stream=source.stream,
        shard_tokens=args.shard_tokens,
        limit_tokens=args.limit_tokens if isinstance(args, PrepareFinewebEdu) else None,
        workers=args.workers,
    )
    return ("already prepared: " if found else "") + _summary(corpus, args.validation_tokens)


def _source(args: PrepareStdlib | PrepareText | PrepareFinewebEdu) -> Source:
    if isinstance(args, PrepareStdlib):
        return stdlib()
    if isinstance(args, PrepareText):
        return text_files(args.paths, args.field)
    return fineweb_edu(args.source, args.name)


def _summary(corpus: Corpus, asked: int) -> str:
    splits = ("train", "validation")
    documents = sum(corpus.documents(split) for split in splits)
    shards = sum(len(corpus.facts["splits"][split]["shards"]) for split in splits)
    return (
        f"{corpus.folder}: {documents:,} documents of {corpus.source}; {corpus.tokenizer_name} tokens: "
        f"{len(corpus.train):,} train, {len(corpus.validation):,} validation ({asked:,} asked); "
        f"{shards} shards"
    )
