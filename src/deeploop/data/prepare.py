"""Write text as a corpus folder: `deeploop prepare stdlib | text PATH… | fineweb-edu`.

Each document is encoded in a thread (tiktoken releases the GIL), preceded by an end-of-text token, and put
whole into one split. A finite source is read once for its size; then a document goes to validation whenever
validation has fallen behind its share of the text read so far, so that the split samples the whole source. A
document that occurs more than once is always trained on, so that no validation text is, unless such documents
are most of the text. A stream, whose size is unknown, gives its first documents to validation. Both choices
depend only on the documents: the output is the same, byte for byte, for any number of workers and after any
interruption. An interrupted run that is started again skips the documents of its full shards without encoding
them.
"""

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from deeploop.data.bpe import MERGES, asked_vocabulary, find_tokenizer, read_bpe, tokenizer_files, train_bpe
from deeploop.data.corpus_writer import CorpusWriter, Settings
from deeploop.data.shards import Corpus
from deeploop.data.tokenizers import Tokenizer, utf8
from deeploop.data.workers import ordered_map
from deeploop.files import exclusive_folder, refuse_other, write_text

SHARD_TOKENS = 100_000_000
BPE_BYTES = 1_000_000_000
"""Largest amount of text that a tokenizer is trained on."""


def tokenizer_for(asked: str, documents: Iterable[str], out: Path, *, stream: bool = False) -> Tokenizer:
    """Find the tokenizer by its name or folder, or train it for `bpe:4096`.

    Training uses all documents, or an even sample of a gigabyte; of a stream, the first gigabyte. A folder
    that already has a trained tokenizer keeps it.
    """
    vocabulary = asked_vocabulary(asked)
    if vocabulary is None:
        return find_tokenizer(asked)
    if (trained := _begun_with(out)) is None:
        return train_bpe(_first(documents) if stream else _thinned(documents), vocabulary)
    if not trained.name.startswith(f"{asked}:"):
        raise ValueError(
            f"{out}: already holds a corpus with tokenizer {trained.name!r}, not {asked!r}; "
            "remove it or choose another folder with --out"
        )
    return trained


def _begun_with(out: Path) -> Tokenizer | None:
    if (corpus := _corpus_in(out)) is not None:
        return corpus.tokenizer()
    return read_bpe(out) if all((out / name).exists() for name in ("progress.npz", MERGES)) else None


def _thinned(documents: Iterable[str]) -> Iterator[str]:
    step = max(1, -(-sum(len(utf8(text)) for text in documents) // BPE_BYTES))
    return islice(documents, 0, None, step)


def _first(documents: Iterable[str]) -> Iterator[str]:
    size = 0
    for text in documents:
        yield text
        if (size := size + len(utf8(text))) >= BPE_BYTES:
            return


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
    text_sha256: str | None = None,
) -> Corpus:
    """Write the documents as a corpus folder, or return the one already there with the same settings.

    Unless it is a `stream`, `documents` is iterated twice. `source` is a description for corpus.json.
    `text_sha256` is the hash of the text, if known: other text with the same description is refused.
    """
    settings = Settings(source, tokenizer.name, validation_tokens, shard_tokens, limit_tokens, text_sha256)
    if (corpus := _prepared(out, settings)) is not None:
        return corpus
    with exclusive_folder(out):
        if (corpus := _prepared(out, settings)) is not None:  # written by another process meanwhile
            return corpus
        size, repeated = (None, frozenset[bytes]()) if stream else _measured(documents)
        writer = CorpusWriter(out, settings, tokenizer, size, repeated=len(repeated) or None)
        for name, text in tokenizer_files(tokenizer).items():
            write_text(out / name, text)
        _write(documents, tokenizer, writer, size, limit_tokens, workers or os.cpu_count() or 1, repeated)
    return Corpus.open(out)


def _prepared(out: Path, settings: Settings) -> Corpus | None:
    if (corpus := _corpus_in(out)) is not None:
        settings.check_same(corpus.facts["settings"], out)
    return corpus


def _corpus_in(out: Path) -> Corpus | None:
    """The corpus in the folder, if any. A folder of another kind is refused."""
    if (out / "corpus.json").exists():
        return Corpus.open(out)
    refuse_other(out, "corpus.json", "choose another folder with --out")
    return None


def _write(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    writer: CorpusWriter,
    size: int | None,
    limit_tokens: int | None,
    workers: int,
    repeated: frozenset[bytes],
) -> None:
    def encode(text: str) -> tuple[np.ndarray, int, bool]:
        ids = tokenizer.encode_array(text)
        tokens = np.concatenate([np.array([tokenizer.end_of_text], dtype=ids.dtype), ids])
        return tokens, len(utf8(text)), bool(repeated) and _hash(text) in repeated

    texts = islice(filter(None, documents), writer.documents, None)
    encoded = ordered_map(ThreadPoolExecutor(workers), encode, texts, ahead=4 * workers)
    with closing(encoded), _bar(writer, size, limit_tokens) as bar:
        for tokens, text_bytes, is_repeated in encoded:
            if limit_tokens is not None and writer.tokens >= limit_tokens:
                break
            writer.add(tokens, text_bytes, may_validate=not is_repeated)
            bar.update(text_bytes if limit_tokens is None else len(tokens))
    writer.finish()


def _measured(documents: Iterable[str]) -> tuple[int, frozenset[bytes]]:
    """The size of the text in bytes, and the hashes of documents that occur more than once.

    No hashes are returned if these documents are most of the text, as something must be held out.
    """
    bar = tqdm(documents, desc="measure", unit=" documents", dynamic_ncols=True, leave=False, disable=None)
    sizes, hashes = array("q"), bytearray()
    for text in bar:
        sizes.append(len(utf8(text)))
        hashes += _hash(text)
    distinct, places, counts = np.unique(
        np.frombuffer(hashes, dtype="<u8"), return_inverse=True, return_counts=True
    )
    again = counts > 1
    copies = again[places]
    is_most = 2 * max(copies.mean(), np.average(copies, weights=sizes)) > 1 if sum(sizes) else False
    hashed = [] if is_most else [each.tobytes() for each in distinct[again]]
    return sum(sizes), frozenset(hashed)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(utf8(text), digest_size=8).digest()


def _bar(writer: CorpusWriter, size: int | None, limit_tokens: int | None) -> "tqdm[NoReturn]":
    """A progress bar over tokens if they are limited, otherwise over the source's bytes."""
    by_token = limit_tokens is not None
    return tqdm(
        total=limit_tokens if by_token else size,
        initial=writer.tokens if by_token else writer.bytes,
        unit="token" if by_token else "B",
        unit_scale=True,
        desc="prepare",
        dynamic_ncols=True,
        disable=None,  # no bar unless stderr is a terminal
    )
