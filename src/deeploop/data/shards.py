"""Token shards, and the corpus folder that holds them.

A shard is a file in the layout of llm.c: a header of 256 little-endian int32 (magic 20240520, version 1,
number of tokens, zeros), then the tokens as little-endian uint16. Version 2 has uint32, for vocabularies
above 65,536. The header does not name the tokenizer; a corpus folder keeps that and the rest:

    train_000000.bin …        validation_000000.bin …
    merges.txt                a tokenizer trained on this text; or
    tokenizer.json            and tokenizer_config.json: that of a pretrained model
    unigram.npz               how often each token occurs: int64 arrays `train` and `validation`
    corpus.json               tokenizer, source, and per split documents, bytes, shards with sha256

corpus.json is written last: a folder that has it is complete.
"""

import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.arrays import read_npz
from deeploop.data.bpe import load_tokenizer
from deeploop.data.corpora import SUFFIXES
from deeploop.data.description import read_description
from deeploop.data.pretrained_tokenizer import LARGEST
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import atomic_file, refuse_other, sha256_of

MAGIC = 20240520
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version
HEADER_BYTES = 256 * 4
CORPUS_FORMAT = 1

# The fields of corpus.json and their types; every item of a list is like the one shown.
SPLIT_FIELDS = {
    "documents": int,
    "bytes": int,
    "tokens": int,
    "shards": [{"file": str, "tokens": int, "sha256": str}],
}
FIELDS = {
    "source": str,
    "tokenizer": str,
    "vocabulary": int,
    "end_of_text": int,
    "settings": dict,
    "unigram": {"file": str, "sha256": str},
    "splits": {"train": SPLIT_FIELDS, "validation": SPLIT_FIELDS},
}


def write_shard(path: Path, tokens: Sequence[int] | np.ndarray) -> str:
    """Write one shard atomically and return its sha256. A uint32 array is written as version 2."""
    tokens = np.asarray(tokens)
    if not 0 < tokens.size < 2**31:
        raise ValueError(f"{path}: a shard holds between 1 and 2^31 - 1 tokens, not {tokens.size}")
    version = 2 if tokens.dtype == np.uint32 else 1
    if version == 1 and tokens.dtype != np.uint16 and not (tokens.min() >= 0 and tokens.max() < 2**16):
        raise ValueError(f"{path}: tokens from {tokens.min()} to {tokens.max()} do not fit uint16")
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, version, tokens.size
    body = np.ascontiguousarray(tokens, dtype=DTYPES[version])
    digest = hashlib.sha256(header.data)
    digest.update(body.data)
    with atomic_file(path) as file:
        file.write(header.data)
        file.write(body.data)
    return digest.hexdigest()


def shard_layout(path: Path) -> tuple[int, np.dtype[Any]]:
    """The number of tokens in a shard and their type. The header must agree with the file's size."""
    if not path.is_file():
        raise ValueError(f"{path}: missing shard")
    with path.open("rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES), dtype=np.uint8)
    if header.size < HEADER_BYTES:
        raise ValueError(f"{path}: truncated shard: {header.size} bytes, the header alone has {HEADER_BYTES}")
    magic, version, tokens = (int(field) for field in header.view("<i4")[:3])
    if magic != MAGIC:
        raise ValueError(f"{path}: not a token shard: magic {magic}, expected {MAGIC}")
    if version not in DTYPES:
        raise ValueError(f"{path}: shard version {version}, expected one of {', '.join(map(str, DTYPES))}")
    size, expected = path.stat().st_size, HEADER_BYTES + DTYPES[version].itemsize * tokens
    if size != expected or tokens < 1:
        kind = "truncated shard" if size < expected else "damaged shard"
        raise ValueError(f"{path}: {kind}: {size} bytes, its header of {tokens} tokens needs {expected}")
    return tokens, DTYPES[version]


def read_shard(
    path: Path, start: int = 0, count: int | None = None, dtype: np.dtype[Any] | None = None
) -> np.ndarray:
    """Read `count` tokens from `start` on; by default, the whole shard. `dtype` is the shard's, if known.

    The file is not memory-mapped: truncating a mapped file kills the process.
    """
    if count is None or dtype is None:
        tokens, dtype = shard_layout(path)
        count = tokens - start if count is None else count
    size = dtype.itemsize
    try:
        with path.open("rb", buffering=0) as file:
            raw = os.pread(file.fileno(), size * count, HEADER_BYTES + size * start)
    except OSError as error:
        raise ValueError(f"{path}: can't be read any more ({error.strerror})") from None
    if len(raw) != size * count:
        raise ValueError(f"{path}: truncated shard: it ends before token {start + count}")
    return np.frombuffer(raw, dtype=dtype)


class TokenStream:
    """The tokens of consecutive shards as one sequence, read from disk on demand.

    Reading a token outside the vocabulary raises ValueError.
    """

    def __init__(self, shards: Sequence[Path], vocabulary: int = LARGEST) -> None:
        self._shards, self._vocabulary = tuple(shards), vocabulary
        layouts = [shard_layout(path) for path in self._shards]
        # _ends[i] is the number of tokens in shards 0 … i.
        self._ends = np.cumsum([tokens for tokens, _ in layouts], dtype=np.int64)
        self._dtypes = [dtype for _, dtype in layouts]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop - 1, which may span shards."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"slice {start}:{stop}: outside the stream's {len(self)} tokens")
        parts = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin, end = int(self._ends[shard - 1]) if shard else 0, int(self._ends[shard])
            take = min(stop, end) - start
            part = read_shard(self._shards[shard], start - begin, take, self._dtypes[shard])
            if (largest := int(part.max())) >= self._vocabulary:
                raise ValueError(
                    f"{self._shards[shard]}: damaged shard: token {largest} is outside the vocabulary of "
                    f"{self._vocabulary}; remove the folder and prepare it again"
                )
            parts.append(part)
            start, shard = start + take, shard + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: two token streams and their description."""

    folder: Path
    tokenizer_name: str
    vocabulary: int
    end_of_text: int
    source: str
    train: TokenStream
    validation: TokenStream
    facts: dict[str, Any]
    """corpus.json, as read."""

    @classmethod
    def open(cls, folder: Path | str) -> "Corpus":
        """Open a corpus folder, checking every shard's header and length but not the checksums."""
        folder = Path(folder)
        facts = _read_facts(folder)
        return cls(
            folder=folder,
            tokenizer_name=facts["tokenizer"],
            vocabulary=facts["vocabulary"],
            end_of_text=facts["end_of_text"],
            source=facts["source"],
            train=_open_split(folder, facts, "train"),
            validation=_open_split(folder, facts, "validation"),
            facts=facts,
        )

    @property
    def checksum(self) -> str:
        """sha256 over the checksums of the shards. It identifies the tokens, wherever the folder is."""
        shards = [shard["sha256"] for split in ("train", "validation") for shard in self._shards(split)]
        return hashlib.sha256(" ".join(shards).encode()).hexdigest()

    def _shards(self, split: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.facts["splits"][split]["shards"]
        return listed

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. A trained one is read from the folder."""
        return load_tokenizer(self.tokenizer_name, self.folder)

    def documents(self, split: str) -> int:
        """The number of documents in a split."""
        return int(self.facts["splits"][split]["documents"])

    def bytes(self, split: str) -> int:
        """The size of a split's text in UTF-8 bytes, end-of-text tokens not counted."""
        return int(self.facts["splits"][split]["bytes"])

    def counts(self, split: str) -> np.ndarray:
        """Count of each token of the vocabulary in a split, int64."""
        path = self.folder / self.facts["unigram"]["file"]
        try:
            counts = read_npz(path, [split], largest=8 * self.vocabulary + 1024)[split]  # 1 KB: its header
            tokens = self.facts["splits"][split]["tokens"]
            if counts.shape != (self.vocabulary,) or counts.dtype != np.int64:
                raise ValueError(f"{counts.shape} of {counts.dtype}, not ({self.vocabulary},) of int64")
            if counts.min() < 0 or int(counts.sum()) != tokens:
                raise ValueError(f"counts that do not add up to {tokens:,} tokens")
        except OSError as error:
            raise ValueError(f"{path}: can't be read ({error.strerror}); prepare the corpus again") from None
        except ValueError as error:
            raise ValueError(
                f"{path}: unreadable ({split}: {error}); remove the folder and prepare it again"
            ) from None
        return counts

    def verify(self) -> None:
        """Compare the sha256 of every file with corpus.json. ValueError names the first bad file."""
        listed = [shard for split in ("train", "validation") for shard in self._shards(split)]
        for entry in [*listed, self.facts["unigram"]]:
            self._verify(entry)
        self.tokenizer()  # the name of a tokenizer kept here has its checksum

    def verify_counts(self) -> None:
        """Verify only the token counts, which is cheap enough for every start."""
        self._verify(self.facts["unigram"])

    def _verify(self, entry: dict[str, Any]) -> None:
        path = self.folder / entry["file"]
        try:
            sha256 = sha256_of(path)
        except OSError as error:
            raise ValueError(f"{path}: can't be read ({error.strerror}); prepare the corpus again") from None
        if sha256 != entry["sha256"]:
            raise ValueError(
                f"{path}: damaged: sha256 {sha256:.12}…, corpus.json has {entry['sha256']:.12}…; "
                "remove the folder and prepare it again"
            )


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / "corpus.json"
    if not path.is_file():
        refuse_other(folder, "corpus.json", "`deeploop prepare text FILE… --out ANOTHER` makes one")
        _refuse_text(folder)
        what = "not a whole corpus (no corpus.json)" if folder.is_dir() else "no such corpus"
        # Under any other name, the folder is probably meant for the user's own text.
        source = folder.name if folder.name in ("stdlib", "fineweb-edu") else "text FILE…"
        raise ValueError(f"{folder}: {what}; make it with `deeploop prepare {source} --out {folder}`")
    facts = read_description(path, "corpus", CORPUS_FORMAT, FIELDS)
    for name in ("train", "validation"):
        split = facts["splits"][name]
        listed = sum(shard["tokens"] for shard in split["shards"])
        if split["tokens"] != listed or min(split["documents"], split["bytes"]) < 0:
            raise ValueError(
                f"{path}: corpus.splits.{name}: {split['tokens']!r:.40} tokens, its shards have {listed}"
            )
    return facts


def _refuse_text(path: Path) -> None:
    """Raise for text that is not prepared yet, with a command that writes elsewhere."""
    files = [path] if path.is_file() else itertools.islice(path.rglob("*"), 1000)
    if (path / "progress.npz").exists() or not any(file.name.endswith(SUFFIXES) for file in files):
        return
    made = Path("data", path.resolve().name.partition(".")[0])
    if made.exists():
        made = made.with_name(f"{made.name}-tokens")
    raise ValueError(
        f"{path}: holds text, not a corpus; "
        f"give --data {made} after `deeploop prepare text {path} --out {made}`"
    )


def _open_split(folder: Path, facts: dict[str, Any], split: str) -> TokenStream:
    shards = facts["splits"][split]["shards"]
    for shard in shards:
        if (tokens := shard_layout(folder / shard["file"])[0]) != shard["tokens"]:
            raise ValueError(
                f"{folder / shard['file']}: holds {tokens} tokens, corpus.json lists {shard['tokens']}"
            )
    return TokenStream([folder / shard["file"] for shard in shards], facts["vocabulary"])
